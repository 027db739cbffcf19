from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import oracle
from tests.triton_process import Kernel, Tensors, call_triton, compile_for_sm90

Results = dict[str, list[Tensors]]

D = 128
HALF = D // 2

# NaNs of both signs, quiet and signalling; both zeros; the smallest subnormals; the infinities.
SPECIAL_BITS = torch.tensor(
    [0x7FC1, -0x3F, 0x7F81, -0x7F, 0, -0x8000, 1, -0x7FFF, 0x7F80, -0x80], dtype=torch.int16
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def with_special_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Special values in row 0 of the last batch entry and head, where there is such a row."""
    bits(tensor)[-1:, -1:, :1, : len(SPECIAL_BITS)] = SPECIAL_BITS
    return tensor


@dataclass(frozen=True)
class Forward:
    B: int
    N: int
    C: int
    H: int = 10

    def inputs(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.N)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        return (
            draw(self.B, self.H, self.N, D),
            with_special_rows(draw(self.B, self.H, self.N, D)),
            draw(self.B, 1, self.N, D),
            draw(self.B, 1, self.N, D),
            with_special_rows(draw(self.B, self.H, self.C, D)),
            with_special_rows(draw(self.B, self.H, self.C, D)),
        )


@dataclass(frozen=True)
class Backward:
    B: int
    M: int
    cache_position: tuple[int, ...]
    H: int = 8

    def inputs(self) -> Tensors:
        N = len(self.cache_position)
        generator = torch.Generator().manual_seed(N)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        return (
            with_special_rows(draw(self.B, self.H, self.M, D)),
            with_special_rows(draw(self.B, self.H, self.M, D)),
            draw(self.B, self.H, N, D),
            draw(self.B, N, D),
            draw(self.B, N, D),
            torch.tensor(self.cache_position),
        )


# One token on an empty cache; axes of which no two are equal; more rows than a block of 256.
FORWARD_CASES = (Forward(B=1, N=1, C=0), Forward(B=2, N=5, C=7), Forward(B=3, N=13, C=40))
# Positions in and out of order. Special values lie in cache row 0, which only the last case keeps.
BACKWARD_CASES = (
    Backward(B=1, M=1, cache_position=(0,)),
    Backward(B=2, M=11, cache_position=(0, 1, 2, 3, 4)),
    Backward(B=2, M=11, cache_position=(7, 2, 9, 0, 4)),
    Backward(B=3, M=130, cache_position=tuple(range(129, 29, -1))),
)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., HALF:], x[..., :HALF]), dim=-1)


def rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    return torch.cat((y[..., HALF:], -y[..., :HALF]), dim=-1)


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    """The interleaved (GPT-J) pairing: (x0, x1, x2, x3, ...) becomes (-x1, x0, -x3, x2, ...)."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def concat_forward(rotate: Callable[[torch.Tensor], torch.Tensor], inputs: Tensors) -> Tensors:
    key_states, value_states, cos, sin, key_cache, value_cache = inputs
    k = key_states.float()
    rotated = (k * cos.float() + rotate(k) * sin.float()).bfloat16()
    return torch.cat((key_cache, rotated), 2), torch.cat((value_cache, value_states), 2)


def static_backward(inputs: Tensors) -> Tensors:
    """Sums over heads go from head 0 up, as in the example: a float32 sum depends on the order."""
    grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position = inputs
    g, k = grad_key_cache[:, :, cache_position].float(), key_states.float()
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    zeroed_key, zeroed_value = grad_key_cache.clone(), grad_value_cache.clone()
    zeroed_key[:, :, cache_position] = 0
    zeroed_value[:, :, cache_position] = 0
    return (
        (g * cos + rotate_half_transposed(g * sin)).bfloat16(),
        grad_value_cache[:, :, cache_position],
        sum((g * k).unbind(1)).bfloat16(),
        sum((g * rotate_half(k)).unbind(1)).bfloat16(),
        zeroed_key,
        zeroed_value,
    )


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(actual), bits(expected))


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, but for the payload of a NaN that arithmetic made."""
    numbers = ~expected.isnan()
    return torch.equal(actual.isnan(), ~numbers) and same_bits(actual[numbers], expected[numbers])


def assert_backward(actual: Tensors, expected: Tensors) -> None:
    computed, copied = (0, 2, 3), (1, 4, 5)
    assert len(actual) == 6
    assert [same_values(actual[i], expected[i]) for i in computed] == [True] * 3
    assert [same_bits(actual[i], expected[i]) for i in copied] == [True] * 3


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def results(request: pytest.FixtureRequest) -> Results:
    """What the examples return, by name of the file, in the order of the cases."""
    forward = [case.inputs() for case in FORWARD_CASES]
    backward = [case.inputs() for case in BACKWARD_CASES]
    calls = {
        "oracle.examples.right_concat_forward:concat_forward": forward,
        "oracle.examples.wrong_concat_forward:concat_forward": forward,
        "oracle.examples.right_static_backward:static_backward": backward,
        "oracle.examples.wrong_static_backward:static_backward": backward,
    }
    returned = call_triton(calls, device=request.param)
    return {
        name.removeprefix("oracle.examples.").split(":")[0]: outputs
        for name, outputs in returned.items()
    }


def test_the_right_forward_example_is_right_to_the_bit(results: Results) -> None:
    outputs = results["right_concat_forward"]
    for case, actual in zip(FORWARD_CASES, outputs, strict=True):
        expected = concat_forward(rotate_half, case.inputs())
        assert [same_bits(*pair) for pair in zip(actual, expected, strict=True)] == [True, True], (
            case
        )


def test_the_wrong_forward_example_is_wrong_by_neighbour_pairing_and_nothing_else(
    results: Results,
) -> None:
    outputs = results["wrong_concat_forward"]
    for case, actual in zip(FORWARD_CASES, outputs, strict=True):
        inputs = case.inputs()
        fault = concat_forward(rotate_neighbours, inputs)
        assert [same_bits(*pair) for pair in zip(actual, fault, strict=True)] == [True, True], case
        assert not same_bits(actual[0], concat_forward(rotate_half, inputs)[0])


def test_the_right_backward_example_is_right_to_the_bit(results: Results) -> None:
    outputs = results["right_static_backward"]
    for case, actual in zip(BACKWARD_CASES, outputs, strict=True):
        assert_backward(actual, static_backward(case.inputs()))


def test_the_wrong_backward_example_is_wrong_by_ignoring_cache_position_and_nothing_else(
    results: Results,
) -> None:
    outputs = results["wrong_static_backward"]
    for case, actual in zip(BACKWARD_CASES, outputs, strict=True):
        *tensors, cache_position = case.inputs()
        assert_backward(actual, static_backward((*tensors, torch.arange(len(cache_position)))))


def test_the_examples_compile_ahead_of_time_without_spills() -> None:
    kernels = []
    for forward in ("right_concat_forward", "wrong_concat_forward"):
        sizes = {"HEAD_DIM": D, "BLOCK_ROWS": 32}
        copy = f"oracle.examples.{forward}:_copy_cache_kernel"
        append = f"oracle.examples.{forward}:_append_kernel"
        kernels.append(Kernel(copy, (*4 * ["*bf16"], *3 * ["i32"]), sizes))
        kernels.append(Kernel(append, (*6 * ["*bf16"], *5 * ["i32"]), sizes))
    for backward in ("right_static_backward", "wrong_static_backward"):
        types = (*5 * ["*bf16"], "*i64", *6 * ["*bf16"], *3 * ["i32"])
        sizes = {"NUM_HEADS": 8, "HEAD_DIM": D, "BLOCK_ROWS": 8}
        kernels.append(Kernel(f"oracle.examples.{backward}:_static_backward_kernel", types, sizes))
    for kernel, used in zip(kernels, compile_for_sm90(kernels), strict=True):
        assert (used.stack_bytes, used.local_bytes) == (0, 0), kernel.name


@pytest.mark.parametrize("device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_through_float32_is_judged_alike_in_the_interpreter_and_on_a_gpu(
    device: str,
) -> None:
    verdict = oracle.verify(
        "tests/hostile/copies_through_float32.py:concat_forward",
        "kv_rope.concat.forward",
        cases="special-copies",
        device=device,
    )
    assert verdict.status == "wrong_values"
    wrong = {region.output for region in verdict.cases[0].regions if not region.passed}
    assert wrong == {"updated_value_cache"}
