"""Triton kernels for the KV-cache update with rotary position embedding (RoPE).

Each operator is one launch. Products and sums are taken in float32 and rounded once, to the output
type, when they are stored: the numeric contract ``single_rounding``. (Not ``correctly_rounded``:
the float32 sum has rounding errors of its own, which may carry a result across a rounding boundary
of the output type.) Rows that are copied keep every bit. There are no atomics: results repeat bit
for bit.

The tile sizes are plain defaults and have not been tuned.

On CPU tensors the functions compute the same in plain PyTorch, unless Triton's interpreter is on
(``TRITON_INTERPRET=1`` when triton is first imported): then the kernels themselves run there.

Axes: B batch, H key/value heads, N new tokens, C cached tokens, M cache capacity, D head dim, even.
``rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])`` is the half-split (NeoX) layout, and
``rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])`` its transpose.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTERPRETED = bool(triton.knobs.runtime.interpret)

# Elements of one tile: 16 a thread on a GPU; few, large tiles in the interpreter, which pays by the
# program.
_GPU_TILE_ELEMENTS = 2048
_INTERPRETER_TILE_ELEMENTS = 16384
# Entries of cache_position that a cache program compares its rows with at a time.
_POSITIONS_PER_STEP = 128


@triton.jit
def _concat_forward_kernel(
    key_states: tl.tensor,
    value_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    updated_key_cache: tl.tensor,
    updated_value_cache: tl.tensor,
    key_states_stride: tl.tuple,  # [B, H, N, D]
    value_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, 1, N, D], 0 along B where the table has one row
    sin_stride: tl.tuple,  # [B, 1, N, D], 0 along B where the table has one row
    key_cache_stride: tl.tuple,  # [B, H, C, D]
    value_cache_stride: tl.tuple,  # [B, H, C, D]
    num_heads: tl.tensor,
    cached_len: tl.tensor,
    updated_len: tl.tensor,
    blocks_per_sequence: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Each program writes BLOCK_ROWS rows of both updated caches of one batch entry and head."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // blocks_per_sequence
    batch = sequence // num_heads
    head = sequence % num_heads
    first_row = program % blocks_per_sequence * BLOCK_ROWS
    row = (first_row + tl.arange(0, BLOCK_ROWS))[:, None]
    target = (sequence * updated_len + row) * HEAD_DIM

    if first_row < cached_len:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
        mask = (row < cached_len) & (column < HEAD_DIM)
        key_source = key_cache + _offset(batch, head, row, column, key_cache_stride)
        value_source = value_cache + _offset(batch, head, row, column, value_cache_stride)
        tl.store(updated_key_cache + target + column, tl.load(key_source, mask=mask), mask=mask)
        tl.store(updated_value_cache + target + column, tl.load(value_source, mask=mask), mask=mask)

    if first_row + BLOCK_ROWS > cached_len:
        HALF: tl.constexpr = HEAD_DIM // 2
        token = row - cached_len
        column = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
        mask = (row >= cached_len) & (row < updated_len) & (column < HALF)
        key_source = key_states + _offset(batch, head, token, column, key_states_stride)
        value_source = value_states + _offset(batch, head, token, column, value_states_stride)
        cos_source = cos + _offset(batch, 0, token, column, cos_stride)
        sin_source = sin + _offset(batch, 0, token, column, sin_stride)
        k1 = tl.load(key_source, mask=mask).to(tl.float32)
        k2 = tl.load(key_source + HALF * key_states_stride[3], mask=mask).to(tl.float32)
        cos1 = tl.load(cos_source, mask=mask).to(tl.float32)
        cos2 = tl.load(cos_source + HALF * cos_stride[3], mask=mask).to(tl.float32)
        sin1 = tl.load(sin_source, mask=mask).to(tl.float32)
        sin2 = tl.load(sin_source + HALF * sin_stride[3], mask=mask).to(tl.float32)
        v1 = tl.load(value_source, mask=mask)
        v2 = tl.load(value_source + HALF * value_states_stride[3], mask=mask)

        out_dtype = updated_key_cache.dtype.element_ty
        rotated1 = (k1 * cos1 - k2 * sin1).to(out_dtype)
        rotated2 = (k2 * cos2 + k1 * sin2).to(out_dtype)
        tl.store(updated_key_cache + target + column, rotated1, mask=mask)
        tl.store(updated_key_cache + target + column + HALF, rotated2, mask=mask)
        tl.store(updated_value_cache + target + column, v1, mask=mask)
        tl.store(updated_value_cache + target + column + HALF, v2, mask=mask)


@triton.jit
def _static_backward_kernel(
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    key_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache_position: tl.tensor,
    grad_key_states: tl.tensor,
    grad_value_states: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache_input: tl.tensor,
    grad_value_cache_input: tl.tensor,
    grad_key_cache_stride: tl.tuple,  # [B, H, M, D]
    grad_value_cache_stride: tl.tuple,  # [B, H, M, D]
    key_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, 1, N, D]
    sin_stride: tl.tuple,  # [B, 1, N, D]
    cache_position_stride: tl.tensor,
    new_len: tl.tensor,
    max_len: tl.tensor,
    token_blocks: tl.tensor,
    cache_blocks: tl.tensor,
    token_programs: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
) -> None:
    """The first ``token_programs`` programs take BLOCK_ROWS tokens, the others as many cache rows.

    The two kinds write different outputs, so neither waits for the other.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < token_programs:
        batch = program // token_blocks
        token = (program % token_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        position = tl.load(
            cache_position + token * cache_position_stride, mask=token < new_len, other=-1
        )
        _token_gradients(
            grad_key_cache,
            grad_value_cache,
            key_states,
            cos,
            sin,
            grad_key_states,
            grad_value_states,
            grad_cos,
            grad_sin,
            grad_key_cache_stride,
            grad_value_cache_stride,
            key_states_stride,
            cos_stride,
            sin_stride,
            batch,
            token,
            position,
            new_len,
            max_len,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_ROWS,
            BLOCK_HALF,
        )
    else:
        cache_program = program - token_programs
        batch = cache_program // cache_blocks
        row = (cache_program % cache_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        overwritten = tl.zeros([BLOCK_ROWS, 1], tl.int32)
        start = 0
        # Not `range(0, new_len, ...)`: Triton 3.6's interpreter cannot do that under NumPy 2.4.
        while start < new_len:
            entry = (start + tl.arange(0, BLOCK_POSITIONS))[None, :].to(tl.int64)
            position = tl.load(
                cache_position + entry * cache_position_stride, mask=entry < new_len, other=-1
            )
            overwritten += tl.sum((row == position).to(tl.int32), axis=1, keep_dims=True)
            start += BLOCK_POSITIONS
        _cache_gradients(
            grad_key_cache,
            grad_value_cache,
            grad_key_cache_input,
            grad_value_cache_input,
            grad_key_cache_stride,
            grad_value_cache_stride,
            batch,
            row,
            overwritten == 0,
            max_len,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_HALF,
        )


@triton.jit
def _token_gradients(
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    key_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    grad_key_states: tl.tensor,
    grad_value_states: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache_stride: tl.tuple,
    grad_value_cache_stride: tl.tuple,
    key_states_stride: tl.tuple,
    cos_stride: tl.tuple,
    sin_stride: tl.tuple,
    batch: tl.tensor,
    token: tl.tensor,  # [BLOCK_ROWS, 1]
    position: tl.tensor,  # [BLOCK_ROWS, 1]
    new_len: tl.tensor,
    max_len: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Gradients of the keys, values, cos and sin of some tokens of one batch entry."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    mask = (token < new_len) & (column < HALF)
    # A row outside the cache is never read: its gradient is taken as 0.
    cache_mask = mask & (position >= 0) & (position < max_len)

    cos_source = cos + _offset(batch, 0, token, column, cos_stride)
    sin_source = sin + _offset(batch, 0, token, column, sin_stride)
    cos1 = tl.load(cos_source, mask=mask).to(tl.float32)
    cos2 = tl.load(cos_source + HALF * cos_stride[3], mask=mask).to(tl.float32)
    sin1 = tl.load(sin_source, mask=mask).to(tl.float32)
    sin2 = tl.load(sin_source + HALF * sin_stride[3], mask=mask).to(tl.float32)

    # The tables are shared by all heads, so their gradients are sums over the heads.
    sum_cos1 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    sum_cos2 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    sum_sin1 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    sum_sin2 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    out_dtype = grad_key_states.dtype.element_ty
    for head_index in range(NUM_HEADS):
        head = tl.cast(head_index, tl.int64)
        g_source = grad_key_cache + _offset(batch, head, position, column, grad_key_cache_stride)
        v_source = grad_value_cache + _offset(
            batch, head, position, column, grad_value_cache_stride
        )
        k_source = key_states + _offset(batch, head, token, column, key_states_stride)
        g_second = g_source + HALF * grad_key_cache_stride[3]
        v_second = v_source + HALF * grad_value_cache_stride[3]
        k_second = k_source + HALF * key_states_stride[3]
        g1 = tl.load(g_source, mask=cache_mask, other=0.0).to(tl.float32)
        g2 = tl.load(g_second, mask=cache_mask, other=0.0).to(tl.float32)
        v1 = tl.load(v_source, mask=cache_mask, other=0.0)
        v2 = tl.load(v_second, mask=cache_mask, other=0.0)
        k1 = tl.load(k_source, mask=mask).to(tl.float32)
        k2 = tl.load(k_second, mask=mask).to(tl.float32)

        sum_cos1 += g1 * k1
        sum_cos2 += g2 * k2
        sum_sin1 -= g1 * k2
        sum_sin2 += g2 * k1
        grad_k1 = (g1 * cos1 + g2 * sin2).to(out_dtype)
        grad_k2 = (g2 * cos2 - g1 * sin1).to(out_dtype)

        target = ((batch * NUM_HEADS + head) * new_len + token) * HEAD_DIM + column
        tl.store(grad_key_states + target, grad_k1, mask=mask)
        tl.store(grad_key_states + target + HALF, grad_k2, mask=mask)
        tl.store(grad_value_states + target, v1, mask=mask)
        tl.store(grad_value_states + target + HALF, v2, mask=mask)

    table_target = (batch * new_len + token) * HEAD_DIM + column
    tl.store(grad_cos + table_target, sum_cos1.to(out_dtype), mask=mask)
    tl.store(grad_cos + table_target + HALF, sum_cos2.to(out_dtype), mask=mask)
    tl.store(grad_sin + table_target, sum_sin1.to(out_dtype), mask=mask)
    tl.store(grad_sin + table_target + HALF, sum_sin2.to(out_dtype), mask=mask)


@triton.jit
def _cache_gradients(
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    grad_key_cache_input: tl.tensor,
    grad_value_cache_input: tl.tensor,
    grad_key_cache_stride: tl.tuple,
    grad_value_cache_stride: tl.tuple,
    batch: tl.tensor,
    row: tl.tensor,  # [BLOCK_ROWS, 1]
    kept: tl.tensor,  # [BLOCK_ROWS, 1]
    max_len: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Copies some cache rows of one batch entry, in all heads; those not ``kept`` become 0."""
    column = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
    store_mask = (row < max_len) & (column < HEAD_DIM)
    # A row that is not kept is not read, so a NaN in it cannot survive.
    load_mask = store_mask & kept
    for head_index in range(NUM_HEADS):
        head = tl.cast(head_index, tl.int64)
        key_source = grad_key_cache + _offset(batch, head, row, column, grad_key_cache_stride)
        value_source = grad_value_cache + _offset(batch, head, row, column, grad_value_cache_stride)
        target = ((batch * NUM_HEADS + head) * max_len + row) * HEAD_DIM + column
        key_row = tl.load(key_source, mask=load_mask, other=0.0)
        value_row = tl.load(value_source, mask=load_mask, other=0.0)
        tl.store(grad_key_cache_input + target, key_row, mask=store_mask)
        tl.store(grad_value_cache_input + target, value_row, mask=store_mask)


@triton.jit
def _offset(
    batch: tl.tensor, head: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.tuple
) -> tl.tensor:
    """Offset of an element of a [B, H, rows, D] tensor; int64 indices, since it may pass 2^31."""
    return batch * stride[0] + head * stride[1] + row * stride[2] + column * stride[3]


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append rotated keys, and values, to a growing KV cache (``kv_rope.concat.forward``).

    ``updated_key_cache = concat(key_cache, k * cos + rotate_half(k) * sin)`` and
    ``updated_value_cache = concat(value_cache, v)``, along the sequence.

    All tensors have one dtype (bfloat16, float16 or float32) and one device, and any strides.

    Args:
        key_states: new keys, [B, H, N, D]; D is even.
        value_states: new values, [B, H, N, D].
        cos: cosine table, [B, 1, N, D] or [1, 1, N, D]; its two halves are independent.
        sin: sine table, [B, 1, N, D] or [1, 1, N, D]; its two halves are independent.
        key_cache: cached keys, [B, H, C, D]; B, N and C may be 0.
        value_cache: cached values, [B, H, C, D].

    Returns:
        ``updated_key_cache`` and ``updated_value_cache``, both [B, H, C + N, D], contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the tensor.
    """
    batch, num_heads, new_len, head_dim = _states_shape(key_states)
    cached_len = _cache_len("key_cache", key_cache)
    states = (batch, num_heads, new_len, head_dim)
    caches = (batch, num_heads, cached_len, head_dim)
    table = (batch, 1, new_len, head_dim)
    _check("value_states", value_states, states, key_states)
    _check("cos", cos, (1, *table[1:]) if cos.shape[:1] == (1,) else table, key_states)
    _check("sin", sin, (1, *table[1:]) if sin.shape[:1] == (1,) else table, key_states)
    _check("key_cache", key_cache, caches, key_states)
    _check("value_cache", value_cache, caches, key_states)
    if not _runs_triton(key_states):
        return _concat_forward_torch(key_states, value_states, cos, sin, key_cache, value_cache)

    updated_len = cached_len + new_len
    updated_key_cache = key_states.new_empty(batch, num_heads, updated_len, head_dim)
    updated_value_cache = torch.empty_like(updated_key_cache)
    block_rows, block_half = _tile(key_states, updated_len, head_dim)
    blocks_per_sequence = triton.cdiv(updated_len, block_rows)
    programs = batch * num_heads * blocks_per_sequence
    if programs:
        with _device_of(key_states):
            _concat_forward_kernel[(programs,)](
                key_states,
                value_states,
                cos,
                sin,
                key_cache,
                value_cache,
                updated_key_cache,
                updated_value_cache,
                key_states.stride(),
                value_states.stride(),
                cos.expand(table).stride(),
                sin.expand(table).stride(),
                key_cache.stride(),
                value_cache.stride(),
                num_heads,
                cached_len,
                updated_len,
                blocks_per_sequence,
                HEAD_DIM=head_dim,
                BLOCK_ROWS=block_rows,
                BLOCK_HALF=block_half,
                enable_fp_fusion=False,
            )
    return updated_key_cache, updated_value_cache


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send gradients back through a static KV-cache update (``kv_rope.static.backward``).

    With ``g = grad_key_cache[:, :, cache_position]``: ``grad_key_states = g * cos +
    rotate_half_T(g * sin)``, ``grad_value_states = grad_value_cache[:, :, cache_position]``,
    ``grad_cos = sum over heads of g * k``, ``grad_sin = sum over heads of g * rotate_half(k)``, and
    the two grad caches come back with the rows ``cache_position`` set to 0.

    All floating tensors have one dtype (bfloat16, float16 or float32), all tensors one device, and
    any strides.

    Args:
        grad_key_cache: gradient of the updated key cache, [B, H, M, D]; D is even.
        grad_value_cache: gradient of the updated value cache, [B, H, M, D].
        key_states: the keys that were rotated, [B, H, N, D]; B and N may be 0.
        cos: cosine table, [B, N, D]; its two halves are independent.
        sin: sine table, [B, N, D]; its two halves are independent.
        cache_position: int64 [N], distinct rows in 0..M-1, in any order. The values are checked
            on a CPU only: on a GPU the check would stop the stream. There, a row outside the cache
            counts as a gradient of 0, and a repeated row is taken each time it occurs.

    Returns:
        ``grad_key_states``, ``grad_value_states`` [B, H, N, D], ``grad_cos``, ``grad_sin``
        [B, N, D], ``grad_key_cache_input``, ``grad_value_cache_input`` [B, H, M, D]; all
        contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit, or (on a CPU) a position; the message
            names the tensor, and the first bad position.
    """
    batch, num_heads, new_len, head_dim = _states_shape(key_states)
    max_len = _cache_len("grad_key_cache", grad_key_cache)
    caches = (batch, num_heads, max_len, head_dim)
    table = (batch, new_len, head_dim)
    _check("grad_key_cache", grad_key_cache, caches, key_states)
    _check("grad_value_cache", grad_value_cache, caches, key_states)
    _check("cos", cos, table, key_states)
    _check("sin", sin, table, key_states)
    _check_positions(cache_position, new_len, max_len, key_states.device)
    if not _runs_triton(key_states):
        return _static_backward_torch(
            grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position
        )

    grad_key_states = key_states.new_empty(batch, num_heads, new_len, head_dim)
    grad_value_states = torch.empty_like(grad_key_states)
    grad_cos = key_states.new_empty(table)
    grad_sin = torch.empty_like(grad_cos)
    grad_key_cache_input = key_states.new_empty(caches)
    grad_value_cache_input = torch.empty_like(grad_key_cache_input)
    block_rows, block_half = _tile(key_states, max_len, head_dim)
    token_blocks = triton.cdiv(new_len, block_rows)
    cache_blocks = triton.cdiv(max_len, block_rows)
    token_programs = batch * token_blocks
    programs = token_programs + batch * cache_blocks
    if programs:
        with _device_of(key_states):
            _static_backward_kernel[(programs,)](
                grad_key_cache,
                grad_value_cache,
                key_states,
                cos,
                sin,
                cache_position,
                grad_key_states,
                grad_value_states,
                grad_cos,
                grad_sin,
                grad_key_cache_input,
                grad_value_cache_input,
                grad_key_cache.stride(),
                grad_value_cache.stride(),
                key_states.stride(),
                cos.unsqueeze(1).stride(),
                sin.unsqueeze(1).stride(),
                cache_position.stride(0),
                new_len,
                max_len,
                token_blocks,
                cache_blocks,
                token_programs,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                BLOCK_ROWS=block_rows,
                BLOCK_HALF=block_half,
                BLOCK_POSITIONS=_POSITIONS_PER_STEP,
                enable_fp_fusion=False,
            )
    return (
        grad_key_states,
        grad_value_states,
        grad_cos,
        grad_sin,
        grad_key_cache_input,
        grad_value_cache_input,
    )


def _runs_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or _INTERPRETED


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _tile(tensor: torch.Tensor, rows: int, head_dim: int) -> tuple[int, int]:
    """Rows of a tile, no more than there are, and columns of half a row: powers of two."""
    block_half = triton.next_power_of_2(head_dim // 2)
    elements = _GPU_TILE_ELEMENTS if tensor.is_cuda else _INTERPRETER_TILE_ELEMENTS
    block_rows = min(elements // (2 * block_half), triton.next_power_of_2(rows))
    return max(1, block_rows), block_half


def _states_shape(key_states: torch.Tensor) -> tuple[int, int, int, int]:
    if key_states.dim() != 4 or key_states.shape[1] < 1:
        raise ValueError(
            f"key_states must be [B, H, N, D] with H >= 1, but has shape {list(key_states.shape)}"
        )
    batch, num_heads, new_len, head_dim = key_states.shape
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"key_states: the head dim D must be even and at least 2, but is {head_dim}"
        )
    if key_states.dtype not in _DTYPES:
        raise ValueError(
            f"key_states must be bfloat16, float16 or float32, but is {key_states.dtype}"
        )
    return batch, num_heads, new_len, head_dim


def _cache_len(name: str, cache: torch.Tensor) -> int:
    if cache.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions, but has shape {list(cache.shape)}")
    return cache.shape[2]


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], key_states: torch.Tensor
) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} to go with key_states "
            f"{list(key_states.shape)}, but has {list(tensor.shape)}"
        )
    if tensor.dtype != key_states.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but key_states is {key_states.dtype}")
    if tensor.device != key_states.device:
        raise ValueError(f"{name} is on {tensor.device}, but key_states is on {key_states.device}")


def _check_positions(
    cache_position: torch.Tensor, new_len: int, max_len: int, device: torch.device
) -> None:
    if cache_position.shape != (new_len,) or cache_position.dtype != torch.int64:
        raise ValueError(
            f"cache_position must be int64 of shape [{new_len}], but is {cache_position.dtype} of "
            f"shape {list(cache_position.shape)}"
        )
    if cache_position.device != device:
        raise ValueError(
            f"cache_position is on {cache_position.device}, but key_states on {device}"
        )
    if cache_position.is_cuda:  # pragma: gpu only
        return
    seen: set[int] = set()
    for index, position in enumerate(cache_position.tolist()):
        if not 0 <= position < max_len or position in seen:
            raise ValueError(
                f"cache_position must hold distinct rows in 0..{max_len - 1}, but entry {index} is "
                f"{position}{', a repetition' if position in seen else ''}"
            )
        seen.add(position)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def _concat_forward_torch(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    k = key_states.float()
    rotated = (k * cos.float() + _rotate_half(k) * sin.float()).to(key_states.dtype)
    return (
        torch.cat((key_cache, rotated), dim=2).contiguous(),
        torch.cat((value_cache, value_states), dim=2).contiguous(),
    )


def _static_backward_torch(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = key_states.dtype
    g = grad_key_cache.index_select(2, cache_position).float()
    k = key_states.float()
    rotated_back = g * cos.float()[:, None] + _rotate_half_transposed(g * sin.float()[:, None])
    grad_key_cache_input = grad_key_cache.clone(memory_format=torch.contiguous_format)
    grad_value_cache_input = grad_value_cache.clone(memory_format=torch.contiguous_format)
    return (
        rotated_back.to(dtype).contiguous(),
        grad_value_cache.index_select(2, cache_position).contiguous(),
        (g * k).sum(dim=1).to(dtype).contiguous(),
        (g * _rotate_half(k)).sum(dim=1).to(dtype).contiguous(),
        grad_key_cache_input.index_fill_(2, cache_position, 0.0),
        grad_value_cache_input.index_fill_(2, cache_position, 0.0),
    )
