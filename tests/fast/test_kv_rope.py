from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from fast.kv_rope import concat_forward, static_backward
from tests.triton_process import Kernel, Tensors, call_triton, compile_for_sm90

Results = dict[str, list[Tensors]]

INT_OF_SIZE = {2: torch.int16, 4: torch.int32}

# NaNs, quiet and signalling, of both signs; -0.0; the smallest subnormal; the infinities.
SPECIAL_BITS = {
    torch.bfloat16: (0x7FC1, 0x7F81, -0x7F, -0x8000, 0x0001, 0x7F80, -0x80),
    torch.float16: (0x7E01, 0x7C01, -0x3FF, -0x8000, 0x0001, 0x7C00, -0x400),
    torch.float32: (0x7FC00001, 0x7F800001, -0x7FFFFF, -(2**31), 1, 0x7F800000, -0x800000),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INT_OF_SIZE[tensor.element_size()])


def with_special_row(tensor: torch.Tensor) -> torch.Tensor:
    """Special values at the start of row 0 of every head, as many as fit."""
    special = torch.tensor(SPECIAL_BITS[tensor.dtype], dtype=INT_OF_SIZE[tensor.element_size()])
    columns = min(len(special), tensor.shape[-1])
    bits(tensor)[:, :, :1, :columns] = special[:columns]
    return tensor


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.equal(bits(actual), bits(expected))


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, but for the payload of a NaN that arithmetic made."""
    numbers = ~expected.isnan()
    return torch.equal(actual.isnan(), ~numbers) and same_bits(actual[numbers], expected[numbers])


def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values in memory that has a gap, of NaN or -1, after each entry of one dimension."""
    shape, index = list(tensor.shape), [slice(None)] * tensor.dim()
    shape[dim] *= 2
    index[dim] = slice(None, None, 2)
    gap = float("nan") if tensor.is_floating_point() else -1
    return tensor.new_full(shape, gap)[tuple(index)].copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Dimensions 1 and 2 exchanged in memory: [B, H, S, D] as models pass it, over [B, S, H, D]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": transposed,
    "rows apart": lambda tensor: spread(tensor, -2),
    "columns apart": lambda tensor: spread(tensor, -1),
}


@dataclass(frozen=True)
class Forward:
    B: int
    H: int
    N: int
    C: int
    D: int
    dtype: torch.dtype = torch.bfloat16
    table_rows: int | None = None  # B if not given
    layout: str = "contiguous"

    def inputs(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.N)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        rows = self.B if self.table_rows is None else self.table_rows
        k, v = draw(self.B, self.H, self.N, self.D), draw(self.B, self.H, self.N, self.D)
        cos, sin = draw(rows, 1, self.N, self.D), draw(rows, 1, self.N, self.D)
        key_cache = with_special_row(draw(self.B, self.H, self.C, self.D))
        value_cache = with_special_row(draw(self.B, self.H, self.C, self.D))
        with_special_row(v)
        inputs = (k, v, cos, sin, key_cache, value_cache)
        return tuple(LAYOUTS[self.layout](tensor) for tensor in inputs)


@dataclass(frozen=True)
class Backward:
    B: int
    H: int
    M: int
    D: int
    cache_position: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    layout: str = "contiguous"

    def inputs(self) -> Tensors:
        N = len(self.cache_position)
        generator = torch.Generator().manual_seed(N)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        grad_key_cache = with_special_row(draw(self.B, self.H, self.M, self.D))
        grad_value_cache = with_special_row(draw(self.B, self.H, self.M, self.D))
        k, cos, sin = (
            draw(self.B, self.H, N, self.D),
            draw(self.B, N, self.D),
            draw(self.B, N, self.D),
        )
        cache_position = torch.tensor(self.cache_position, dtype=torch.int64)
        inputs = (grad_key_cache, grad_value_cache, k, cos, sin)
        if self.layout == "columns apart":
            cache_position = spread(cache_position, 0)
        return (*(LAYOUTS[self.layout](tensor) for tensor in inputs), cache_position)


FORWARD_CASES = {
    "no two axes of one size": Forward(B=2, H=3, N=5, C=7, D=8),
    "one of everything": Forward(B=1, H=1, N=1, C=1, D=2),
    "a decode step": Forward(B=3, H=2, N=1, C=255, D=128),
    "several tiles, split inside one": Forward(B=2, H=1, N=200, C=77, D=128),
    "D is no power of two": Forward(B=2, H=3, N=5, C=7, D=96),
    "D / 2 is odd": Forward(B=2, H=3, N=5, C=7, D=6),
    "one table for the batch": Forward(B=3, H=2, N=5, C=7, D=8, table_rows=1),
    "transposed": Forward(B=2, H=3, N=5, C=7, D=8, layout="transposed"),
    "rows apart": Forward(B=2, H=3, N=5, C=7, D=8, layout="rows apart"),
    "columns apart": Forward(B=2, H=3, N=5, C=7, D=8, layout="columns apart"),
    "columns apart, one table": Forward(
        B=3, H=2, N=5, C=7, D=6, table_rows=1, layout="columns apart"
    ),
    "float16": Forward(B=2, H=3, N=5, C=7, D=8, dtype=torch.float16),
    "float32": Forward(B=2, H=3, N=5, C=7, D=8, dtype=torch.float32),
    "an empty cache": Forward(B=2, H=3, N=5, C=0, D=8),
    "no new token": Forward(B=2, H=3, N=0, C=7, D=8),
    "an empty sequence": Forward(B=2, H=3, N=0, C=0, D=8),
    "an empty batch": Forward(B=0, H=3, N=5, C=7, D=8),
}

# Special values lie in cache row 0: among the positions of some cases, kept in others.
BACKWARD_CASES = {
    "no two axes of one size": Backward(B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 3, 4)),
    "one of everything": Backward(B=1, H=1, M=1, D=2, cache_position=(0,)),
    "one token": Backward(B=3, H=2, M=300, D=128, cache_position=(255,)),
    "several tiles and steps": Backward(
        B=2, H=1, M=277, D=128, cache_position=(*range(276, 77, -1), 0)
    ),
    "the whole cache": Backward(B=2, H=3, M=5, D=8, cache_position=(3, 1, 4, 0, 2)),
    "D is no power of two": Backward(B=2, H=3, M=11, D=96, cache_position=(7, 2, 9, 0, 4)),
    "D / 2 is odd": Backward(B=2, H=3, M=11, D=6, cache_position=(7, 2, 9, 0, 4)),
    "transposed": Backward(
        B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4), layout="transposed"
    ),
    "rows apart": Backward(
        B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4), layout="rows apart"
    ),
    "columns apart": Backward(
        B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4), layout="columns apart"
    ),
    "float16": Backward(B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4), dtype=torch.float16),
    "float32": Backward(B=2, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4), dtype=torch.float32),
    "no token": Backward(B=2, H=3, M=11, D=8, cache_position=()),
    "an empty cache": Backward(B=2, H=3, M=0, D=8, cache_position=()),
    "an empty batch": Backward(B=0, H=3, M=11, D=8, cache_position=(7, 2, 9, 0, 4)),
}


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    half = y.shape[-1] // 2
    return torch.cat((y[..., half:], -y[..., :half]), dim=-1)


def sum_over_heads(terms: torch.Tensor) -> torch.Tensor:
    """In float32 and from head 0 up, as in the kernel: the rounding depends on the order."""
    total = torch.zeros_like(terms[:, 0])
    for term in terms.unbind(1):
        total = total + term
    return total


def expected_forward(inputs: Tensors) -> Tensors:
    k, v, cos, sin, key_cache, value_cache = inputs
    rotated = (k.float() * cos.float() + rotate_half(k.float()) * sin.float()).to(k.dtype)
    return torch.cat((key_cache, rotated), 2), torch.cat((value_cache, v), 2)


def expected_backward(inputs: Tensors) -> Tensors:
    grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position = inputs
    dtype = key_states.dtype
    g, k = grad_key_cache[:, :, cache_position].float(), key_states.float()
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    zeroed_key, zeroed_value = grad_key_cache.clone(), grad_value_cache.clone()
    zeroed_key[:, :, cache_position] = 0
    zeroed_value[:, :, cache_position] = 0
    return (
        (g * cos + rotate_half_transposed(g * sin)).to(dtype),
        grad_value_cache[:, :, cache_position],
        sum_over_heads(g * k).to(dtype),
        sum_over_heads(g * rotate_half(k)).to(dtype),
        zeroed_key,
        zeroed_value,
    )


def assert_forward(actual: Tensors, inputs: Tensors) -> None:
    expected = expected_forward(inputs)
    assert len(actual) == 2
    assert [same_bits(*pair) for pair in zip(actual, expected, strict=True)] == [True, True]
    assert all(output.is_contiguous() for output in actual)


def assert_backward(actual: Tensors, inputs: Tensors) -> None:
    expected = expected_backward(inputs)
    computed, copied = (0, 2, 3), (1, 4, 5)
    assert len(actual) == 6
    assert [same_values(actual[i], expected[i]) for i in computed] == [True] * 3
    assert [same_bits(actual[i], expected[i]) for i in copied] == [True] * 3
    assert all(output.is_contiguous() for output in actual)


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def results(request: pytest.FixtureRequest) -> Results:
    """What the kernels return, by function, in the order of the cases."""
    calls = {
        "fast.kv_rope:concat_forward": [case.inputs() for case in FORWARD_CASES.values()],
        "fast.kv_rope:static_backward": [case.inputs() for case in BACKWARD_CASES.values()],
    }
    return call_triton(calls, device=request.param)


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_the_forward_kernel_equals_float32_with_one_rounding(results: Results, name: str) -> None:
    actual = results["fast.kv_rope:concat_forward"][list(FORWARD_CASES).index(name)]
    assert_forward(actual, FORWARD_CASES[name].inputs())


@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_the_backward_kernel_equals_float32_with_one_rounding(results: Results, name: str) -> None:
    actual = results["fast.kv_rope:static_backward"][list(BACKWARD_CASES).index(name)]
    assert_backward(actual, BACKWARD_CASES[name].inputs())


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_the_forward_without_triton_equals_float32_with_one_rounding(name: str) -> None:
    inputs = FORWARD_CASES[name].inputs()
    assert_forward(concat_forward(*inputs), inputs)


@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_the_backward_without_triton_equals_float32_with_one_rounding(name: str) -> None:
    # Of two heads the sum does not depend on the order, which PyTorch does not promise.
    inputs = replace(BACKWARD_CASES[name], H=2).inputs()
    assert_backward(static_backward(*inputs), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_share_no_memory_with_inputs_or_each_other(layout: str) -> None:
    forward = Forward(B=2, H=3, N=0, C=7, D=8, layout=layout).inputs()
    backward = Backward(B=2, H=3, M=11, D=8, cache_position=(), layout=layout).inputs()
    for tensors in (
        (*forward, *concat_forward(*forward)),
        (*backward, *static_backward(*backward)),
    ):
        storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        assert len(set(storages)) == len(storages)


STATES, CACHE, TABLE = (2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 5, 8)


@pytest.mark.parametrize(
    ("index", "bad", "message"),
    [
        (0, torch.zeros(3, 5, 8), r"key_states must be \[B, H, N, D\].*\[3, 5, 8\]"),
        (0, torch.zeros(2, 0, 5, 8), r"key_states must .* H >= 1, but has shape \[2, 0, 5, 8\]"),
        (0, torch.zeros(2, 3, 5, 7), r"head dim D must be even and at least 2, but is 7"),
        (0, torch.zeros(STATES).double(), r"key_states must be bfloat16.*is torch\.float64"),
        (1, torch.zeros(CACHE), r"value_states must have shape \[2, 3, 5, 8\].*has \[2, 3, 7, 8\]"),
        (2, torch.zeros(2, 3, 5, 8), r"cos must have shape \[2, 1, 5, 8\].*has \[2, 3, 5, 8\]"),
        (3, torch.zeros(1, 1, 4, 8), r"sin must have shape \[1, 1, 5, 8\].*has \[1, 1, 4, 8\]"),
        (4, torch.zeros(7, 8), r"key_cache must have 4 dimensions, but has shape \[7, 8\]"),
        (5, torch.zeros(2, 3, 6, 8), r"value_cache must have shape \[2, 3, 7, 8\]"),
        (5, torch.zeros(CACHE).half(), r"value_cache is torch\.float16, but key_states is"),
        (5, torch.zeros(CACHE, device="meta"), r"value_cache is on meta, but key_states is on cpu"),
    ],
)
def test_the_forward_names_the_input_that_does_not_fit(
    index: int, bad: torch.Tensor, message: str
) -> None:
    inputs = [torch.zeros(shape) for shape in (STATES, STATES, TABLE, TABLE, CACHE, CACHE)]
    inputs[index] = bad
    with pytest.raises(ValueError, match=message):
        concat_forward(*inputs)


@pytest.mark.parametrize(
    ("cache_position", "message"),
    [
        (torch.tensor([0, 1, -1, 9, 2]), r"distinct rows in 0\.\.6, but entry 2 is -1"),
        (torch.tensor([0, 1, 7, 9, 2]), r"distinct rows in 0\.\.6, but entry 2 is 7"),
        (torch.tensor([0, 1, 2, 1, 2]), r"entry 3 is 1, a repetition"),
        (torch.tensor([0, 1, 2, 3]), r"int64 of shape \[5\], but is torch\.int64 of shape \[4\]"),
        (torch.arange(5, dtype=torch.int32), r"int64 of shape \[5\], but is torch\.int32"),
        (torch.arange(5, device="meta"), r"cache_position is on meta, but key_states on cpu"),
    ],
)
def test_the_backward_names_the_first_bad_position(
    cache_position: torch.Tensor, message: str
) -> None:
    shapes = (CACHE, CACHE, STATES, (2, 5, 8), (2, 5, 8))
    with pytest.raises(ValueError, match=message):
        static_backward(*(torch.zeros(shape) for shape in shapes), cache_position)


def test_the_kernels_compile_ahead_of_time_without_spills() -> None:
    tile = {"HEAD_DIM": 128, "BLOCK_ROWS": 16, "BLOCK_HALF": 64}
    kernels = []
    for pointer in ("*bf16", "*fp16", "*fp32"):
        types = (*8 * [pointer], *6 * ["strides"], *4 * ["i32"])
        kernels.append(Kernel("fast.kv_rope:_concat_forward_kernel", types, tile))
        pointers = (*5 * [pointer], "*i64", *6 * [pointer])
        types = (*pointers, *5 * ["strides"], "i64", *5 * ["i32"])
        constants = {**tile, "NUM_HEADS": 8, "BLOCK_POSITIONS": 128}
        kernels.append(Kernel("fast.kv_rope:_static_backward_kernel", types, constants))
    for kernel, used in zip(kernels, compile_for_sm90(kernels), strict=True):
        assert (used.stack_bytes, used.local_bytes) == (0, 0), kernel


def test_importing_fast_is_cheap_and_never_imports_the_oracle() -> None:
    script = (
        "import sys, fast\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "import fast.kv_rope\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'oracle']\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)
