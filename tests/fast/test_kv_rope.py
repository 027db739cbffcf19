from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import oracle
from fast import kv_rope
from fast.registration import OPS
from tests.triton_process import call_triton

Tensors = tuple[torch.Tensor, ...]

DEVICES = ("torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu))

# Sums that only the way by integers gets right


def one_column(g: list[float], k: list[float], dtype: torch.dtype) -> Tensors:
    """Inputs of ``concat_backward``, D = 2: the first column's head sum is that of ``g * k``."""
    heads = len(g)
    grad = torch.zeros(1, heads, 1, 2, dtype=dtype)
    key = torch.zeros(1, heads, 1, 2, dtype=dtype)
    grad[0, :, 0, 0], key[0, :, 0, 0] = torch.tensor(g), torch.tensor(k)
    table = torch.zeros(1, 1, 1, 2, dtype=dtype)
    return (grad, torch.zeros_like(grad), key, table, table)


# bfloat16: 1 + 2^-8 is halfway between 1 and 1 + 2^-7. A term far below decides, once the larger
# ones are gone; float64 loses it beside them.
HARD_SUMS: dict[str, tuple[list[float], list[float], float]] = {
    "just above a tie": (
        [2.0**100, -(2.0**100), 1.0, 2.0**-8, 2.0**-60, 2.0**-120],
        [1.0, 1.0, 1.0, 1.0, 2.0**-60, 2.0**-120],
        1 + 2.0**-7,
    ),
    "just below a tie": (
        [2.0**100, -(2.0**100), 1.0, 2.0**-8, 2.0**-60, -(2.0**-60)],
        [1.0, 1.0, 1.0, 1.0, 2.0**-60, 2.0**-59],
        1.0,
    ),
    "just above a tie, negative": (
        [-1.0, -(2.0**-8), 2.0**-30, 2.0**-90, -(2.0**-30), -(2.0**-120)],
        [1.0, 1.0, 2.0**-60, 2.0**-30, 2.0**-60, 2.0**-120],
        -1.0,
    ),
    "only the smallest is left": (
        [2.0**120, 3.0, -(2.0**120), -3.0, 2.0**-60, 0.0],
        [2.0**120, 1.0, 2.0**120, 1.0, 2.0**-60, 0.0],
        2.0**-120,
    ),
    "an exact tie": (
        [2.0**100, 2.0**-100, 1.0, 2.0**-8, -(2.0**-100), -(2.0**100)],
        [2.0**20, 2.0**-20, 1.0, 1.0, 2.0**-20, 2.0**20],
        1.0,
    ),
    "beyond the largest number": (
        [2.0**127, 2.0**-120, 2.0**127, 0.0, 0.0, 0.0],
        [2.0**127, 2.0**-120, 2.0**127, 0.0, 0.0, 0.0],
        float("inf"),
    ),
}


@pytest.fixture(
    scope="module", params=["torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def hard_sums(request: pytest.FixtureRequest) -> dict[str, float]:
    """The head sum of each of HARD_SUMS, on a device."""
    calls = [one_column(g, k, torch.bfloat16) for g, k, _ in HARD_SUMS.values()]
    if request.param == "torch":
        returned = [kv_rope.concat_backward(*call) for call in calls]  # type: ignore[arg-type]
    else:
        target = "fast.kv_rope:concat_backward"
        returned = call_triton({target: calls}, device=request.param)[target]
    return {name: float(out[2][0, 0, 0, 0]) for name, out in zip(HARD_SUMS, returned, strict=True)}


@pytest.mark.parametrize("name", HARD_SUMS)
def test_head_sums_are_right_however_far_apart_the_terms(
    hard_sums: dict[str, float], name: str
) -> None:
    assert hard_sums[name] == HARD_SUMS[name][2]


# Positions


def static_inputs(position: list[int], *, grad: bool = False, rows: int = 2) -> Tensors:
    """Inputs of ``static_forward``: B = 2, H = 3, M = 7, D = 8, float32."""
    generator = torch.Generator().manual_seed(len(position))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(grad)

    new = len(position)
    states, cache, table = (2, 3, new, 8), (2, 3, 7, 8), (rows, new, 8)
    shapes = (states, states, table, table, cache, cache)
    return (*(draw(*shape) for shape in shapes), torch.tensor(position))


def concat_inputs(*, grad: bool = False, rows: int = 2) -> Tensors:
    """Inputs of ``concat_forward``: B = 2, H = 3, N = 4, C = 7, D = 8, float32."""
    *inputs, _ = static_inputs([0, 1, 2, 3], grad=grad, rows=rows)
    inputs[2:4] = [table.detach()[:, None].requires_grad_(grad) for table in inputs[2:4]]
    return tuple(inputs)


def backward_of(inputs: Tensors) -> Tensors:
    """Inputs of ``static_backward`` from those of ``static_forward``."""
    key, _, cos, sin, key_cache, value_cache, position = inputs
    return (key_cache, value_cache, key, cos, sin, position)


OUTSIDE = [3, -1, 7, 2**40, 0]
INSIDE = [0, 4]  # tokens of OUTSIDE whose rows there are


@pytest.fixture(
    scope="module", params=["torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def outside(request: pytest.FixtureRequest) -> tuple[Tensors, Tensors]:
    """What the static functions return where some positions are no rows."""
    forward = static_inputs(OUTSIDE)
    if request.param == "torch":
        back = kv_rope.static_backward(*backward_of(forward))
        return kv_rope.static_forward(*forward), back
    names = ("fast.kv_rope:static_forward", "fast.kv_rope:static_backward")
    calls = {names[0]: [forward], names[1]: [backward_of(forward)]}
    returned = call_triton(calls, device=request.param)
    return returned[names[0]][0], returned[names[1]][0]


def test_tokens_whose_row_is_outside_the_cache_are_left_out(
    outside: tuple[Tensors, Tensors],
) -> None:
    inputs = static_inputs(OUTSIDE)
    fewer = tuple(
        t[..., INSIDE, :] if i < 4 else t[INSIDE] if i == 6 else t for i, t in enumerate(inputs)
    )
    expected = kv_rope.static_forward(*fewer)
    assert [torch.equal(*pair) for pair in zip(outside[0], expected, strict=True)] == [True, True]
    gradients, kept = outside[1], kv_rope.static_backward(*backward_of(fewer))
    for place in range(4):
        assert torch.equal(gradients[place][..., INSIDE, :], kept[place])
        assert not gradients[place][..., [1, 2, 3], :].any()
    assert torch.equal(gradients[4], kept[4])
    assert torch.equal(gradients[5], kept[5])


@pytest.mark.parametrize("function", ["static_forward", "static_forward_", "static_backward"])
@pytest.mark.parametrize(
    ("position", "message"),
    [
        ([0, 1, -1, 9, 2], r"distinct rows in 0\.\.6, but entry 2 is -1"),
        ([0, 1, 7, 9, 2], r"distinct rows in 0\.\.6, but entry 2 is 7"),
        ([0, 1, 2, 1, 2], r"entry 3 is 1, a repetition"),
    ],
)
def test_checked_positions_are_refused_with_the_first_bad_one(
    function: str, position: list[int], message: str
) -> None:
    inputs = static_inputs(position)
    arguments = backward_of(inputs) if function == "static_backward" else inputs
    with pytest.raises(ValueError, match=message):
        getattr(kv_rope, function)(*arguments, check=True)


# Autograd and the compiler


def forward_inputs(layout: str, *, grad: bool, rows: int) -> Tensors:
    if layout == "concat":
        return concat_inputs(grad=grad, rows=rows)
    return static_inputs([5, 0, 6, 2], grad=grad, rows=rows)


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("layout", ["concat", "static"])
def test_the_gradient_is_that_of_the_reference(layout: str, rows: int) -> None:
    inputs = forward_inputs(layout, grad=True, rows=rows)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    outputs = getattr(kv_rope, f"{layout}_forward")(*inputs)
    cotangents = [torch.randn_like(output) for output in outputs]
    actual = torch.autograd.grad(outputs, leaves, cotangents)
    reference = oracle.find_operator(f"kv_rope.{layout}.forward").reference(inputs, torch.float64)
    wide = [cotangent.double() for cotangent in cotangents]
    expected = torch.autograd.grad(reference, leaves, wide)
    for mine, exact in zip(actual, expected, strict=True):
        # The reference rounds a float64 result; a table shared by two entries is rounded thrice.
        torch.testing.assert_close(mine, exact, rtol=2e-7, atol=2e-6 if rows == 1 else 0)


@pytest.mark.parametrize("layout", ["concat", "static"])
def test_a_compiled_function_holds_the_whole_call(layout: str) -> None:
    inputs = forward_inputs(layout, grad=True, rows=2)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    function = getattr(kv_rope, f"{layout}_forward")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, actual = function(*inputs), compiled(*inputs)
    assert all(map(torch.equal, actual, expected))
    cotangents = [torch.randn_like(output) for output in expected]
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(actual, leaves, cotangents),
            torch.autograd.grad(expected, leaves, cotangents),
        )
    )


def test_a_compiled_update_in_place_is_the_fresh_one() -> None:
    inputs = static_inputs([5, 0, 6, 2])
    expected = kv_rope.static_forward(*inputs)
    caches = [cache.clone() for cache in inputs[4:6]]
    compiled = torch.compile(kv_rope.static_forward_, fullgraph=True, backend="aot_eager")
    compiled(*inputs[:4], *caches, inputs[6])
    assert all(map(torch.equal, caches, expected))


OPERATOR_CALLS: dict[str, Callable[[], Tensors]] = {
    "concat_forward": lambda: concat_inputs(grad=True),
    "static_forward": lambda: static_inputs([5, 0, 6], grad=True, rows=1),
    "static_forward_": lambda: static_inputs([5, 0, 6]),
    "static_backward": lambda: backward_of(static_inputs([5, 0, 6])),
    "concat_backward": lambda: (*concat_inputs()[4:], concat_inputs()[0], *concat_inputs()[2:4]),
}


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_torch_accepts_the_registration(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name), OPERATOR_CALLS[name]())


def test_a_second_derivative_is_refused() -> None:
    inputs = backward_of(static_inputs([5, 0], grad=True))
    with pytest.raises(NotImplementedError, match="no gradients of their own"):
        kv_rope.static_backward(*inputs)[0].sum().backward()


def test_writing_in_place_invalidates_what_autograd_saved() -> None:
    inputs = static_inputs([5, 0])
    weight = torch.ones(7, 8, requires_grad=True)
    product = (weight * inputs[4]).sum()
    kv_rope.static_forward_(*inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# Inputs that do not fit

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
    ],
)
def test_the_forward_names_the_input_that_does_not_fit(
    index: int, bad: torch.Tensor, message: str
) -> None:
    inputs = [torch.zeros(shape) for shape in (STATES, STATES, TABLE, TABLE, CACHE, CACHE)]
    inputs[index] = bad
    with pytest.raises(ValueError, match=message):
        kv_rope.concat_forward(*inputs)


def test_the_backward_refuses_a_cache_shorter_than_the_new_tokens() -> None:
    short = torch.zeros(2, 3, 4, 8)
    with pytest.raises(ValueError, match=r"has 4 rows, fewer than the 5 new tokens"):
        kv_rope.concat_backward(
            short, short, torch.zeros(STATES), torch.zeros(TABLE), torch.zeros(TABLE)
        )


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (torch.tensor([0, 1, 2, 3]), r"int64 of shape \[5\], but is torch\.int64 of shape \[4\]"),
        (torch.arange(5, dtype=torch.int32), r"int64 of shape \[5\], but is torch\.int32"),
    ],
)
def test_positions_of_another_type_or_shape_are_refused(
    position: torch.Tensor, message: str
) -> None:
    *inputs, _ = backward_of(static_inputs([0, 1, 2, 3, 4]))
    with pytest.raises(ValueError, match=message):
        kv_rope.static_backward(*inputs, position)


def test_importing_fast_is_cheap_and_never_imports_the_oracle() -> None:
    script = (
        "import sys, fast\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "import fast.kv_rope\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'oracle']\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)
