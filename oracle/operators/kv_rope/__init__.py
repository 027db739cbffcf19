"""The KV-cache update with rotary position embedding (RoPE): the first operator family."""

from __future__ import annotations

from ...definition import Axis, Operator, TensorSpec
from .cases import HEAD_DIM, HEADS, backward_probes, forward_probes, official_suite
from .meaning import (
    concat_forward,
    concat_forward_blocks,
    static_backward,
    static_backward_blocks,
)
from .values import BACKWARD_KINDS, FORWARD_KINDS

_BATCH = Axis("batch_size", "sequences")
_HEADS = Axis("num_kv_heads", "key/value heads", minimum=1)
_NEW = Axis("new_seq_len", "new tokens")
_CURRENT = Axis("current_seq_len", "tokens already cached")
_UPDATED = Axis(
    "updated_seq_len", "tokens cached afterwards", sum_of=("current_seq_len", "new_seq_len")
)
_CAPACITY = Axis("max_seq_len", "rows of the static cache")
_HEAD_DIM = Axis("head_dim", "components of a head, rotated in pairs", minimum=2, multiple_of=2)

_STATES = ("batch_size", "num_kv_heads", "new_seq_len", "head_dim")
_STATIC_CACHE = ("batch_size", "num_kv_heads", "max_seq_len", "head_dim")
_STATIC_TABLE = ("batch_size", "new_seq_len", "head_dim")

_ROTATION = """rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])
rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])"""


def _concat_table(name: str) -> TensorSpec:
    return TensorSpec(
        name,
        ("batch_size", "1", "new_seq_len", "head_dim"),
        f"{name} of the rotation angles; the two halves are independent",
        may_broadcast=("batch_size",),
    )


CONCAT_FORWARD = Operator(
    id="kv_rope.concat.forward",
    title="KV-cache update with RoPE, caches grown by concatenation, forward",
    formula=f"""{_ROTATION}
updated_key_cache = concat(key_cache, key_states * cos + rotate_half(key_states) * sin)
updated_value_cache = concat(value_cache, value_states)""",
    source="SOL-ExecBench L1/071 kv_cache_update_with_rope",
    axes=(_BATCH, _HEADS, _NEW, _CURRENT, _HEAD_DIM, _UPDATED),
    inputs=(
        TensorSpec("key_states", _STATES, "keys of the new tokens, not yet rotated"),
        TensorSpec("value_states", _STATES, "values of the new tokens"),
        _concat_table("cos"),
        _concat_table("sin"),
        TensorSpec(
            "key_cache",
            ("batch_size", "num_kv_heads", "current_seq_len", "head_dim"),
            "rotated keys of the cached tokens",
        ),
        TensorSpec(
            "value_cache",
            ("batch_size", "num_kv_heads", "current_seq_len", "head_dim"),
            "values of the cached tokens",
        ),
    ),
    outputs=(
        TensorSpec(
            "updated_key_cache",
            ("batch_size", "num_kv_heads", "updated_seq_len", "head_dim"),
            "the cached keys followed by the rotated new ones",
            regions=("old rows", "new rows"),
        ),
        TensorSpec(
            "updated_value_cache",
            ("batch_size", "num_kv_heads", "updated_seq_len", "head_dim"),
            "the cached values followed by the new ones",
            regions=("old rows", "new rows"),
        ),
    ),
    dtypes=("bfloat16",),
    official={"num_kv_heads": HEADS["kv_rope.concat.forward"], "head_dim": HEAD_DIM},
    reference=concat_forward,
    blocks=concat_forward_blocks,
    input_kinds=FORWARD_KINDS,
    probes=forward_probes(),
    suites=(
        official_suite(
            "kv_rope.concat.forward",
            "sol-execbench/L1/071_kv_cache_update_with_rope",
            "current_seq_len",
        ),
    ),
)

STATIC_BACKWARD = Operator(
    id="kv_rope.static.backward",
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
    axes=(_BATCH, _HEADS, _NEW, _CAPACITY, _HEAD_DIM),
    inputs=(
        TensorSpec("grad_key_cache", _STATIC_CACHE, "cotangent of the updated key cache"),
        TensorSpec("grad_value_cache", _STATIC_CACHE, "cotangent of the updated value cache"),
        TensorSpec("key_states", _STATES, "keys of the new tokens, not yet rotated"),
        TensorSpec(
            "cos", _STATIC_TABLE, "cos of the rotation angles; the two halves are independent"
        ),
        TensorSpec(
            "sin", _STATIC_TABLE, "sin of the rotation angles; the two halves are independent"
        ),
        TensorSpec(
            "cache_position",
            ("new_seq_len",),
            "the row of each new token: distinct, in any order",
            indexes="max_seq_len",
        ),
    ),
    outputs=(
        TensorSpec("grad_key_states", _STATES, "gradient of key_states", regions=("rows read",)),
        TensorSpec(
            "grad_value_states", _STATES, "gradient of value_states", regions=("rows read",)
        ),
        TensorSpec("grad_cos", _STATIC_TABLE, "gradient of cos", regions=("all rows",)),
        TensorSpec("grad_sin", _STATIC_TABLE, "gradient of sin", regions=("all rows",)),
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
    dtypes=("bfloat16",),
    official={"num_kv_heads": HEADS["kv_rope.static.backward"], "head_dim": HEAD_DIM},
    reference=static_backward,
    blocks=static_backward_blocks,
    input_kinds=BACKWARD_KINDS,
    probes=backward_probes(),
    suites=(
        official_suite(
            "kv_rope.static.backward",
            "sol-execbench/L1/062_kv_cache_update_with_rope_backward",
            "max_seq_len",
        ),
    ),
)

OPERATORS = (CONCAT_FORWARD, STATIC_BACKWARD)
