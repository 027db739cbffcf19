"""The KV-cache update with rotary position embedding (RoPE): the first operator family.

Four operators: the cache grows by concatenation or has a fixed capacity, forward and backward. The
published suites are of concat.forward and static.backward; the other direction of each layout is
judged on the same shapes.
"""

from __future__ import annotations

from ...definition import FLOATING_DTYPES, Axis, Operator, TensorSpec
from . import kinds, probes
from .cases import BACKWARD_SUITE, FORWARD_SUITE, Setting
from .concat import (
    concat_backward,
    concat_backward_blocks,
    concat_forward,
    concat_forward_blocks,
)
from .constraints import CONCAT_CONSTRAINTS, STATIC_CONSTRAINTS
from .general import general_probes
from .static import (
    static_backward,
    static_backward_blocks,
    static_forward,
    static_forward_blocks,
)
from .variants import (
    concat_backward_variants,
    concat_forward_variants,
    static_backward_variants,
    static_forward_variants,
)

_BATCH = Axis("batch_size", "sequences")
_HEADS = Axis("num_kv_heads", "key/value heads", minimum=1)
_NEW = Axis("new_seq_len", "new tokens")
_CURRENT = Axis("current_seq_len", "tokens already cached")
_UPDATED = Axis(
    "updated_seq_len", "tokens cached afterwards", sum_of=("current_seq_len", "new_seq_len")
)
_CAPACITY = Axis("max_seq_len", "rows of the static cache")
_HEAD_DIM = Axis("head_dim", "components of a head, rotated in pairs", minimum=2, multiple_of=2)

_CONCAT_AXES = (_BATCH, _HEADS, _NEW, _CURRENT, _HEAD_DIM, _UPDATED)
_STATIC_AXES = (_BATCH, _HEADS, _NEW, _CAPACITY, _HEAD_DIM)

_STATES = ("batch_size", "num_kv_heads", "new_seq_len", "head_dim")
_OLD_CACHE = ("batch_size", "num_kv_heads", "current_seq_len", "head_dim")
_UPDATED_CACHE = ("batch_size", "num_kv_heads", "updated_seq_len", "head_dim")
_STATIC_CACHE = ("batch_size", "num_kv_heads", "max_seq_len", "head_dim")
_CONCAT_TABLE = ("batch_size", "1", "new_seq_len", "head_dim")
_STATIC_TABLE = ("batch_size", "new_seq_len", "head_dim")

_CONCAT_HEADS = 10
_STATIC_HEADS = 8
_VARIETY = {
    "head_dim": (64, 2, 6, 96, 10, 192, 256, 128),
    "num_kv_heads": (1, 3, 5, 8, 33),
}

_ROTATION = """rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])
rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])"""


def _tables(axes: tuple[str, ...], may_broadcast: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name,
            axes,
            f"{name} of the rotation angles; the two halves are independent",
            may_broadcast=may_broadcast,
        )
        for name in ("cos", "sin")
    )


_KEY_STATES = TensorSpec("key_states", _STATES, "keys of the new tokens, not yet rotated")
_VALUE_STATES = TensorSpec("value_states", _STATES, "values of the new tokens")
_POSITION = TensorSpec(
    "cache_position",
    ("new_seq_len",),
    "the row of each new token: distinct, in any order",
    indexes="max_seq_len",
)


def _state_gradients(region: str, table: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Return the outputs that both backward operators begin with."""
    return (
        TensorSpec("grad_key_states", _STATES, "gradient of key_states", regions=(region,)),
        TensorSpec("grad_value_states", _STATES, "gradient of value_states", regions=(region,)),
        TensorSpec("grad_cos", table, "gradient of cos", regions=("all rows",)),
        TensorSpec("grad_sin", table, "gradient of sin", regions=("all rows",)),
    )


_CONCAT_FORWARD_INPUTS = (
    _KEY_STATES,
    _VALUE_STATES,
    *_tables(_CONCAT_TABLE, may_broadcast=("batch_size",)),
    TensorSpec("key_cache", _OLD_CACHE, "rotated keys of the cached tokens"),
    TensorSpec("value_cache", _OLD_CACHE, "values of the cached tokens"),
)
_CONCAT_FORWARD = Setting(
    "kv_rope.concat.forward", _CONCAT_HEADS, "current_seq_len", _CONCAT_FORWARD_INPUTS
)

CONCAT_FORWARD = Operator(
    id=_CONCAT_FORWARD.operator,
    title="KV-cache update with RoPE, caches grown by concatenation, forward",
    formula=f"""{_ROTATION}
updated_key_cache = concat(key_cache, key_states * cos + rotate_half(key_states) * sin)
updated_value_cache = concat(value_cache, value_states)""",
    source="SOL-ExecBench L1/071 kv_cache_update_with_rope",
    axes=_CONCAT_AXES,
    inputs=_CONCAT_FORWARD_INPUTS,
    outputs=(
        TensorSpec(
            "updated_key_cache",
            _UPDATED_CACHE,
            "the cached keys followed by the rotated new ones",
            regions=("old rows", "new rows"),
        ),
        TensorSpec(
            "updated_value_cache",
            _UPDATED_CACHE,
            "the cached values followed by the new ones",
            regions=("old rows", "new rows"),
        ),
    ),
    dtypes=FLOATING_DTYPES,
    official=_CONCAT_FORWARD.official,
    reference=concat_forward,
    blocks=concat_forward_blocks,
    input_kinds=kinds.CONCAT_FORWARD_KINDS,
    probes=_CONCAT_FORWARD.probes(probes.CONCAT_FORWARD),
    suites=(_CONCAT_FORWARD.official_suite(FORWARD_SUITE),),
    general_probes=general_probes(_CONCAT_FORWARD),
    # 144 rows of the last head lie past 2^31 elements, the new ones among them.
    large=_CONCAT_FORWARD.large("official", (2, 9, 838_859)),
    variety=_VARIETY,
    constraints=CONCAT_CONSTRAINTS,
    variants=concat_forward_variants(),
)

_CONCAT_BACKWARD_INPUTS = (
    TensorSpec("grad_updated_key_cache", _UPDATED_CACHE, "cotangent of the updated key cache"),
    TensorSpec("grad_updated_value_cache", _UPDATED_CACHE, "cotangent of the updated value cache"),
    _KEY_STATES,
    *_tables(_CONCAT_TABLE),
)
_CONCAT_BACKWARD = Setting(
    "kv_rope.concat.backward", _CONCAT_HEADS, "current_seq_len", _CONCAT_BACKWARD_INPUTS
)

CONCAT_BACKWARD = Operator(
    id=_CONCAT_BACKWARD.operator,
    title="KV-cache update with RoPE, caches grown by concatenation, backward",
    formula=f"""{_ROTATION}
g = grad_updated_key_cache[:, :, C:], the rows of the new tokens
grad_key_states = g * cos + rotate_half_T(g * sin)
grad_value_states = grad_updated_value_cache[:, :, C:]
grad_cos = sum over heads of g * key_states
grad_sin = sum over heads of g * rotate_half(key_states)
grad_key_cache = grad_updated_key_cache[:, :, :C]
grad_value_cache = grad_updated_value_cache[:, :, :C]""",
    source="the derivative of kv_rope.concat.forward (SOL-ExecBench L1/071)",
    axes=_CONCAT_AXES,
    inputs=_CONCAT_BACKWARD_INPUTS,
    outputs=(
        *_state_gradients("new rows", _CONCAT_TABLE),
        TensorSpec(
            "grad_key_cache",
            _OLD_CACHE,
            "gradient of the key cache before the update",
            regions=("old rows",),
        ),
        TensorSpec(
            "grad_value_cache",
            _OLD_CACHE,
            "gradient of the value cache before the update",
            regions=("old rows",),
        ),
    ),
    dtypes=FLOATING_DTYPES,
    official=_CONCAT_BACKWARD.official,
    reference=concat_backward,
    blocks=concat_backward_blocks,
    input_kinds=kinds.CONCAT_BACKWARD_KINDS,
    probes=_CONCAT_BACKWARD.probes(probes.CONCAT_BACKWARD),
    suites=(_CONCAT_BACKWARD.derived_suite(FORWARD_SUITE),),
    general_probes=general_probes(_CONCAT_BACKWARD),
    # 64 rows of the last head of the old rows' gradients lie past 2^31 elements.
    large=_CONCAT_BACKWARD.large("official", (2, 9, 838_864)),
    variety=_VARIETY,
    constraints=CONCAT_CONSTRAINTS,
    variants=concat_backward_variants(),
)

_STATIC_FORWARD_INPUTS = (
    _KEY_STATES,
    _VALUE_STATES,
    *_tables(_STATIC_TABLE, may_broadcast=("batch_size",)),
    TensorSpec("key_cache", _STATIC_CACHE, "rotated keys of the cached tokens"),
    TensorSpec("value_cache", _STATIC_CACHE, "values of the cached tokens"),
    _POSITION,
)
_STATIC_FORWARD = Setting(
    "kv_rope.static.forward", _STATIC_HEADS, "max_seq_len", _STATIC_FORWARD_INPUTS
)

STATIC_FORWARD = Operator(
    id=_STATIC_FORWARD.operator,
    title="KV-cache update with RoPE, caches of fixed capacity, forward",
    formula=f"""{_ROTATION}
updated_key_cache = key_cache with the rows cache_position set to
    key_states * cos + rotate_half(key_states) * sin
updated_value_cache = value_cache with the rows cache_position set to value_states""",
    source="what kv_rope.static.backward (SOL-ExecBench L1/062) is the derivative of",
    axes=_STATIC_AXES,
    inputs=_STATIC_FORWARD_INPUTS,
    outputs=(
        TensorSpec(
            "updated_key_cache",
            _STATIC_CACHE,
            "the key cache with the rotated new keys in their rows",
            regions=("rows written", "untouched rows"),
        ),
        TensorSpec(
            "updated_value_cache",
            _STATIC_CACHE,
            "the value cache with the new values in their rows",
            regions=("rows written", "untouched rows"),
        ),
    ),
    dtypes=FLOATING_DTYPES,
    official=_STATIC_FORWARD.official,
    reference=static_forward,
    blocks=static_forward_blocks,
    input_kinds=kinds.STATIC_FORWARD_KINDS,
    probes=_STATIC_FORWARD.probes(probes.STATIC_FORWARD),
    suites=(_STATIC_FORWARD.derived_suite(BACKWARD_SUITE),),
    inplace=(("key_cache", "updated_key_cache"), ("value_cache", "updated_value_cache")),
    general_probes=general_probes(_STATIC_FORWARD),
    # 128 rows of the last head lie past 2^31 elements, half of the new ones among them.
    large=_STATIC_FORWARD.large("positions_ends", (2, 64, 2**20 + 8)),
    variety=_VARIETY,
    constraints=STATIC_CONSTRAINTS,
    variants=static_forward_variants(),
)

_STATIC_BACKWARD_INPUTS = (
    TensorSpec("grad_key_cache", _STATIC_CACHE, "cotangent of the updated key cache"),
    TensorSpec("grad_value_cache", _STATIC_CACHE, "cotangent of the updated value cache"),
    _KEY_STATES,
    *_tables(_STATIC_TABLE),
    _POSITION,
)
_STATIC_BACKWARD = Setting(
    "kv_rope.static.backward", _STATIC_HEADS, "max_seq_len", _STATIC_BACKWARD_INPUTS
)

STATIC_BACKWARD = Operator(
    id=_STATIC_BACKWARD.operator,
    title="KV-cache update with RoPE, caches of fixed capacity, backward",
    formula=f"""{_ROTATION}
g = grad_key_cache[:, :, cache_position]
grad_key_states = g * cos + rotate_half_T(g * sin)
grad_value_states = grad_value_cache[:, :, cache_position]
grad_cos = sum over heads of g * key_states
grad_sin = sum over heads of g * rotate_half(key_states)
grad_key_cache_input = grad_key_cache with the rows cache_position set to 0
grad_value_cache_input = grad_value_cache with the rows cache_position set to 0""",
    source="SOL-ExecBench L1/062 kv_cache_update_with_rope_backward",
    axes=_STATIC_AXES,
    inputs=_STATIC_BACKWARD_INPUTS,
    outputs=(
        *_state_gradients("rows read", _STATIC_TABLE),
        TensorSpec(
            "grad_key_cache_input",
            _STATIC_CACHE,
            "gradient of the key cache before the update",
            regions=("zeroed rows", "untouched rows"),
        ),
        TensorSpec(
            "grad_value_cache_input",
            _STATIC_CACHE,
            "gradient of the value cache before the update",
            regions=("zeroed rows", "untouched rows"),
        ),
    ),
    dtypes=FLOATING_DTYPES,
    official=_STATIC_BACKWARD.official,
    reference=static_backward,
    blocks=static_backward_blocks,
    input_kinds=kinds.STATIC_BACKWARD_KINDS,
    probes=_STATIC_BACKWARD.probes(probes.STATIC_BACKWARD),
    suites=(_STATIC_BACKWARD.official_suite(BACKWARD_SUITE),),
    general_probes=general_probes(_STATIC_BACKWARD),
    # 128 rows of the last head lie past 2^31 elements, half of the new ones among them.
    large=_STATIC_BACKWARD.large("positions_ends", (2, 64, 2**20 + 8)),
    variety=_VARIETY,
    constraints=STATIC_CONSTRAINTS,
    variants=static_backward_variants(),
)

OPERATORS = (CONCAT_FORWARD, CONCAT_BACKWARD, STATIC_FORWARD, STATIC_BACKWARD)
