"""Numeric derivatives: values, error estimates, and the points where there are none."""

from __future__ import annotations

import math

import pytest
import torch

from oracle.gradients import numeric_jacobian, numeric_jvp
from oracle.gradients.derivative import look_around
from oracle.gradients.evaluation import Arguments, Point, copy_as_laid_out, has_overlap


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def derivative_of(function, *values):
    """Differentiate an elementwise function; return the diagonal of every field."""
    ((jacobian,),) = numeric_jacobian(function, float64(*values))
    return {name: getattr(jacobian, name).diagonal() for name in ("value", "kink", "step")} | {
        "allowed": jacobian.allowed.diagonal(),
        "estimate": jacobian.estimate.diagonal(),
    }


def test_a_function_linear_in_each_input_is_differentiated_exactly_with_large_steps():
    a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    (found,) = numeric_jacobian(lambda a, b: a @ b, (a, b))
    by_a = torch.eye(5, dtype=torch.float64)[:, :, None] * b
    assert (found[0].value - by_a).abs().max() < 1e-14
    assert (found[1].value - a).abs().max() < 1e-14
    assert found[1].step[found[1].estimate + found[1].floor > 0].min() > 0.01
    assert found[1].allowed.max() < 1e-12


def test_linear_functions_cost_six_evaluations_per_element():
    point = Point(lambda x: 3 * x, Arguments.read(torch.randn(7, dtype=torch.float64)))
    look_around(point)
    before = point.evaluations
    from oracle.gradients.derivative import columns

    list(columns(point, 0, torch.zeros(7, dtype=torch.float64)))
    assert point.evaluations - before == 6 * 7


@pytest.mark.parametrize(
    ("function", "derivative"),
    [
        (torch.sin, torch.cos),
        (torch.exp, torch.exp),
        (torch.reciprocal, lambda x: -1 / x**2),
        (lambda x: x**5, lambda x: 5 * x**4),
        (lambda x: torch.sin(100 * x), lambda x: 100 * torch.cos(100 * x)),
        (lambda x: torch.exp(-x * x / 1e-4), lambda x: -2e4 * x * torch.exp(-x * x / 1e-4)),
        (lambda x: 1e10 * torch.tanh(x), lambda x: 1e10 / torch.cosh(x) ** 2),
    ],
)
def test_smooth_functions_are_within_what_is_allowed_and_that_is_little(function, derivative):
    x = float64(-1.7, -0.31, 0.02, 0.4, 2.6)
    found = derivative_of(function, *x.tolist())
    exact = derivative(x)
    assert bool(((found["value"] - exact).abs() <= found["allowed"]).all())
    assert bool((found["allowed"] <= 1e-8 * exact.abs().max()).all())
    assert not found["kink"].any()


@pytest.mark.parametrize("frequency", [1, 2, 4, 8])
def test_steps_that_are_periods_of_the_function_do_not_deceive(frequency):
    found = derivative_of(lambda x: torch.sin(2 * math.pi * frequency * x), 0.0, 0.3)
    exact = 2 * math.pi * frequency * torch.cos(2 * math.pi * frequency * float64(0.0, 0.3))
    assert bool(((found["value"] - exact).abs() <= found["allowed"]).all())
    assert found["allowed"].max() < 1e-8


def test_jumps_between_two_steps_do_not_deceive():
    found = derivative_of(torch.round, 0.3, 0.4999, -1.2)
    assert found["value"].tolist() == [0.0, 0.0, 0.0]
    assert found["allowed"].max() < 1e-9


@pytest.mark.parametrize("function", [torch.relu, torch.abs, lambda x: x + 0.01 * torch.abs(x)])
def test_a_kink_at_the_point_is_recognised(function):
    found = derivative_of(function, 0.0, 1.5)
    assert found["kink"].tolist() == [True, False]
    assert found["value"].isnan().tolist() == [True, False]


def test_a_kink_beside_the_point_is_avoided_by_smaller_steps():
    found = derivative_of(torch.relu, 0.01, -1e-4, 1.0)
    assert found["value"].tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-9)
    assert not found["kink"].any()


def test_a_kink_nearer_than_the_smallest_step_gives_no_value_that_is_trusted():
    found = derivative_of(torch.relu, 1e-7, 1.0)
    assert not found["allowed"][0] < 0.1


@pytest.mark.parametrize("function", [torch.floor, torch.sign, lambda x: x.sign() * x.abs().sqrt()])
def test_a_jump_or_a_vertical_slope_at_the_point_is_recognised(function):
    assert derivative_of(function, 0.0, 1.5)["kink"].tolist() == [True, False]


def test_where_the_function_is_not_finite_on_both_sides_there_is_no_value():
    found = derivative_of(torch.sqrt, 0.0, 4.0)
    assert found["value"].isnan().tolist() == [True, False]
    assert math.isinf(found["allowed"][0])
    assert derivative_of(torch.log, 1e-3)["value"].item() == pytest.approx(1000, abs=1e-6)


def test_an_infinite_output_has_no_derivative_and_spoils_no_other():
    ((found,),) = numeric_jacobian(
        lambda x: torch.stack((x[0] * torch.inf, 2 * x[0])), float64(1.0)
    )
    assert found.value[0].isnan().all()
    assert found.value[1, 0] == 2.0


def test_computing_in_float32_shows_in_what_is_allowed():
    found = derivative_of(lambda x: x.float().sin().double(), 0.3, 0.7)
    exact = torch.cos(float64(0.3, 0.7))
    assert bool(((found["value"] - exact).abs() <= found["allowed"]).all())
    assert 1e-8 < found["allowed"].max() < 1e-3


def test_cancellation_inside_the_function_shows_in_what_is_allowed():
    found = derivative_of(lambda x: (torch.sin(x) + 1e6) - 1e6, 0.3, 0.7)
    exact = torch.cos(float64(0.3, 0.7))
    assert bool(((found["value"] - exact).abs() <= found["allowed"]).all())
    assert found["allowed"].max() > 1e-10


def test_roundings_that_show_on_one_line_of_points_only_are_found():
    # On the first line, sixth differences of x - atan(x) vanish at the third element.
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ((found,),) = numeric_jacobian(lambda x: x - torch.atan(x), x)
    exact = torch.diag((x**2 / (1 + x**2)).reshape(-1)).view(3, 4, 3, 4)
    assert bool(((found.value - exact).abs() <= found.allowed).all())


def test_the_jacobian_has_the_shapes_of_outputs_and_inputs():
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    index = torch.tensor([1, 0])
    found = numeric_jacobian(lambda x, i, y: (x[i] * y, x.sum(), x.argmax(), [y][0]), (x, index, y))
    shapes = [[tuple(part.value.shape) for part in row] for row in found]
    assert shapes == [[(2, 3, 2, 3), (2, 3)], [(2, 3), ()], [(2, 3), ()]]
    assert found[2][1].value.item() == 1.0
    assert (found[1][0].value - 1).abs().max() < 1e-14


def test_inputs_without_elements_have_an_empty_jacobian():
    ((by_x, by_y),) = numeric_jacobian(
        lambda x, y: x.sum() + y.sum(), (torch.zeros(0), torch.ones(2))
    )
    assert by_x.value.shape == (0,)
    assert by_y.value.tolist() == [1.0, 1.0]


def test_low_precision_inputs_are_differentiated_in_float64():
    x = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    ((found,),) = numeric_jacobian(torch.sin, x)
    assert (found.value.diagonal() - x.double().cos()).abs().max() < 1e-12


@pytest.mark.parametrize("expanded", [True, False])
def test_each_index_of_an_expanded_input_moves_alone(expanded):
    x = torch.randn(1, 3, dtype=torch.float64).expand(2, 3)
    if not expanded:
        x = x.clone()
    ((found,),) = numeric_jacobian(lambda x: x[0] * 2, x)
    assert found.value[:, 1].abs().max() == 0
    assert torch.equal(found.value[:, 0], 2 * torch.eye(3, dtype=torch.float64))


def test_a_directional_derivative_is_the_jacobian_times_the_tangent():
    x = torch.randn(3, 4, dtype=torch.float64)
    tangent = torch.randn(3, 4, dtype=torch.float64)

    def function(x):
        return torch.softmax(x, 1), x.square().sum()

    along = numeric_jvp(function, x, tangent)
    full = numeric_jacobian(function, x)
    for one, (whole,) in zip(along, full, strict=True):
        product = (whole.value * tangent).sum(dim=(-2, -1))
        assert bool(((one.value - product).abs() <= one.allowed + 1e-11).all())
        assert one.allowed.max() < 1e-10


def test_tangents_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"tangents of shapes \[\(2,\)\] .* inputs of shapes"):
        numeric_jvp(torch.sin, torch.ones(3), torch.ones(2))


@pytest.mark.parametrize(
    ("function", "inputs", "error", "message"),
    [
        (torch.abs, torch.ones(2, dtype=torch.complex64), TypeError, "input 0 is torch.complex64"),
        (lambda x: torch.complex(x, x), torch.ones(2), TypeError, "output 0 is torch.complex128"),
        (torch.abs, torch.ones(2).to_sparse(), TypeError, "layout torch.sparse_coo"),
        (torch.abs, torch.ones(2, dtype=torch.int64), ValueError, "nothing to check: no input"),
        (torch.abs, (), ValueError, "no inputs"),
        (torch.argmax, torch.ones(2), ValueError, "returns no floating-point tensor"),
        (lambda _: 3.0, torch.ones(2), TypeError, "returned float"),
        (lambda x: (x, "a"), torch.ones(2), TypeError, "output 1 is str"),
        (lambda x: x.mul_(2), torch.ones(2), ValueError, "changes input 0 in place"),
    ],
)
def test_what_cannot_be_differentiated_is_refused_by_name(function, inputs, error, message):
    with pytest.raises(error, match=message):
        numeric_jacobian(function, inputs)


def test_places_that_cannot_be_differentiated_are_refused():
    inputs = (torch.ones(2), torch.tensor([1]))
    with pytest.raises(ValueError, match="input 1 cannot be differentiated: it is a tensor of int"):
        numeric_jacobian(lambda x, _: x, inputs, wrt=[1])
    with pytest.raises(ValueError, match="input 5 cannot be differentiated: it is no input"):
        numeric_jacobian(lambda x, _: x, inputs, wrt=[5])
    with pytest.raises(ValueError, match="wrt names no input"):
        numeric_jacobian(lambda x, _: x, inputs, wrt=[])


def test_outputs_that_change_shape_nearby_are_refused():
    with pytest.raises(ValueError, match="returned shapes"):
        numeric_jacobian(lambda x: x[x > 0], float64(1e-9, 1.0))


def test_overlap_is_told_from_strides():
    base = torch.arange(24.0)
    assert has_overlap(base[:3].expand(2, 3))
    assert has_overlap(base.as_strided((3, 4), (2, 1)))
    assert not has_overlap(base.view(4, 6).T)
    assert not has_overlap(base.view(4, 6)[:, ::2])
    assert not has_overlap(base.as_strided((2, 3), (3, 2)))
    assert not has_overlap(base[:1].expand(1, 1))
    assert not has_overlap(base[:0].expand(5, 0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.arange(24.0).view(4, 6).T,
        torch.arange(3.0).expand(2, 3),
        torch.zeros(0, 3),
        torch.tensor(1.0),
    ],
)
def test_copies_have_the_same_strides_and_memory_of_their_own(tensor):
    copy = copy_as_laid_out(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    if tensor.numel():
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
