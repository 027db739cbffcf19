"""The gradient checks: what they accept, what they find, and how they say it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle.gradients import (
    FINDINGS,
    GradientCheckFailed,
    GradientCheckInconclusive,
    NoiseFloor,
    Terms,
    check_adjoint,
    check_operator_gradients,
    check_operator_vjp,
    check_vjp,
    gradcheck,
    gradgradcheck,
    numeric_jvp,
)
from oracle.gradients.adjoint import dot
from oracle.operators import find_operator
from tests.gradient_cases import (
    BACKWARD,
    BFLOAT16_CHANGES,
    FORWARD,
    NAMES,
    bfloat16_cases,
    float64_cases,
    operator_backward,
    update,
    update_backward,
    update_inputs,
    with_backward,
)
from tests.smooth_functions import draw_inputs, smooth_functions

SMALL = (2, 3, 2, 4, 4)
MEDIUM = (2, 6, 5, 12, 16)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def kinds(result) -> list[str]:
    return [finding.kind for finding in result.findings]


def product(x, y):
    return x * y


def product_backward(g, x, y):
    return g * y, g * x


# What is right passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", float64_cases(SMALL), ids=lambda case: case.name)
def test_every_fault_is_caught_and_what_is_right_passes_in_float64(case):
    names = NAMES if len(case.inputs) == len(NAMES) else None
    result = gradcheck(case.function, case.inputs, names=names, raise_exception=False)
    assert result.passed is case.right, result.summary()
    assert result.status == ("passed" if case.right else "failed")


@pytest.mark.parametrize("number", range(len(BFLOAT16_CHANGES)))
def test_every_fault_is_caught_and_what_is_right_passes_in_bfloat16(number):
    case = bfloat16_cases(MEDIUM)[number]
    measured = gradcheck(
        case.function, case.inputs, names=NAMES, reference=update, raise_exception=False
    )
    named = dict(zip(NAMES, (tensor.detach() for tensor in case.inputs), strict=True))
    backward = operator_backward(BFLOAT16_CHANGES[number][1])
    contract = check_operator_gradients(FORWARD, BACKWARD, backward, named)
    for result in (measured, contract):
        assert result.passed is case.right, result.summary()
        wrong = [each.name for each in result.inputs if each.disagreeing]
        assert [name.removeprefix("grad_") for name in wrong] == ["key_states"] * (not case.right)
    assert "measured noise floor" in measured.budget
    assert contract.budget == "the contract stored_intermediates of kv_rope.static.backward"


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(smooth_functions(), st.integers(0, 10**6))
def test_random_smooth_functions_raise_no_alarm(function, seed):
    inputs = draw_inputs(seed)
    result = gradcheck(function, inputs, raise_exception=False)
    if result.status == "inconclusive" and is_constant(function, inputs):
        # y minus y: its derivative is rounding and nothing else, of which nothing can be known.
        return
    assert result.passed, f"{function.text}: {result.summary()}"


def is_constant(function, inputs):
    """Whether all derivatives are zero but for roundings."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    total = function(*leaves).abs().sum()
    if not total.requires_grad:
        return True
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return all(g is None or bool((g.abs() < 1e-12).all()) for g in gradients)


def test_a_difference_of_equal_functions_is_inconclusive_and_no_false_alarm():
    def function(x, y):
        return y.expand(x.shape) - torch.softmax(x @ x.T, dim=-1) @ y.expand(x.shape)

    inputs = draw_inputs(0)
    assert is_constant(function, inputs)
    assert gradcheck(function, inputs, raise_exception=False).status in ("passed", "inconclusive")


def times_matrix(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.cos(torch.arange(16.0, dtype=x.dtype)).view(4, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, y: times_matrix(y) - times_matrix(y),
        lambda _, y: (y - torch.cos(5 * y)) - (y - torch.cos(5 * y)),
        lambda x, y: torch.softmax(x @ (4 * y)[:, None], -1) * x,
        lambda x, y: x - torch.atan(x) + 0 * y,
    ],
)
@pytest.mark.parametrize("seed", [1, 2948, 199235])
def test_gradients_made_of_roundings_only_are_no_false_alarm(function, seed):
    assert gradcheck(function, draw_inputs(seed)).passed


@pytest.mark.parametrize("layout", ["concat", "static"])
def test_the_backward_operators_are_the_derivatives_of_their_forwards(layout):
    rows = {"concat": ("current_seq_len", 3), "static": ("max_seq_len", 4)}[layout]
    forward = find_operator(f"kv_rope.{layout}.forward")
    backward = find_operator(f"kv_rope.{layout}.backward")
    sizes = dict([rows], batch_size=2, num_kv_heads=3, new_seq_len=2, head_dim=4)
    inputs = {
        spec.name: torch.tensor([3, 1])
        if spec.indexes
        else random(*forward.shape(spec, sizes), dtype=torch.bfloat16, seed=place)
        for place, spec in enumerate(forward.inputs)
    }
    result = check_operator_vjp(forward, backward, inputs)
    outputs = result.cotangents["one-hot"]
    assert result.passed, result.summary()
    for each in result.inputs:
        assert each.entries == each.agreeing == each.elements * (outputs + 5)
        assert each.largest_difference <= 1e-12


# Results are data -------------------------------------------------------------------------------


def test_a_result_says_what_was_compared_and_where_it_was_worst():
    def wrong(g, x, y):
        gradient = g * y
        gradient[1, 2] += 1e-9
        return gradient, g * x

    result = check_vjp(product, wrong, (random(2, 3), random(2, 3, seed=1)), names=("a", "b"))
    assert result.status == "failed"
    assert kinds(result) == ["wrong_values"]
    by_a, by_b = result.inputs
    assert (by_a.name, by_a.shape, by_a.elements, by_a.entries) == ("a", (2, 3), 6, 6 * (6 + 5))
    assert by_a.disagreeing == 6 + 5
    assert by_b.agreeing == by_b.entries
    assert by_a.worst.index == (1, 2)
    assert by_a.worst.difference == pytest.approx(1e-9, rel=1e-4)
    assert by_a.worst.allowed < 1e-13
    assert by_a.largest_difference == pytest.approx(1e-9, rel=1e-4)
    text = result.summary()
    for part in ("check_vjp of", "failed", "a: 1 of 6 elements", "[1, 2]", "allowed"):
        assert part in text
    with pytest.raises(GradientCheckFailed, match="1 of 6 elements") as raised:
        result.raise_for_failure()
    assert raised.value.result is result
    assert isinstance(raised.value, AssertionError)


def test_a_result_is_plain_data():
    result = check_vjp(lambda x: x.sqrt(), lambda g, x: g / x.sqrt() / 2, torch.zeros(2))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (data["status"], data["passed"], data["entries"]) == (
        result.status,
        False,
        result.entries,
    )
    assert data["inputs"][0]["unresolved"] > 0


def test_a_passed_result_is_true_and_names_the_entry_nearest_to_its_limit():
    result = gradcheck(torch.sin, random(3))
    assert result
    assert "nearest to its limit: input 0 at" in result.summary()
    result.raise_for_failure()


def test_a_wrong_sign_and_a_wrong_factor_are_named():
    x = random(4)
    flipped = check_vjp(torch.sin, lambda g, x: -g * x.cos(), x)
    assert "it is -1 times the derivative everywhere, a wrong sign" in flipped.summary()
    halved = check_vjp(torch.sin, lambda g, x: g * x.cos() / 2, x)
    assert "it is 0.5 times the derivative everywhere" in halved.summary()


def test_none_zeros_and_detached_are_three_findings():
    x, y = random(2, 3), random(2, 3, seed=1)
    assert kinds(check_vjp(product, lambda g, _, y: (g * y, None), (x, y))) == ["missing"]
    assert kinds(check_vjp(product, lambda g, x, y: (g * y, 0 * x), (x, y))) == ["zeros"]
    none = gradcheck(
        with_backward(product, lambda g, _, y: (g * y, None)), (x, y), raise_exception=False
    )
    assert kinds(none) == ["missing"]
    detached = gradcheck(lambda x, y: x * y.detach(), (x, y), raise_exception=False)
    assert kinds(detached) == ["detached"]
    assert "no path leads" in detached.summary()
    outside = gradcheck(lambda x: (2 * x).detach(), x, raise_exception=False)
    assert kinds(outside) == ["detached"]
    assert "output 0 does not require a gradient" in outside.remarks


def test_none_for_an_input_that_nothing_depends_on_is_right():
    result = gradcheck(lambda x, _: 2 * x, (random(2), random(3)))
    assert any("agrees with a derivative of zero" in remark for remark in result.remarks)


def test_a_missing_sum_shows_in_the_shape():
    result = check_vjp(product, product_backward, (random(4, 2, 3), random(1, 3)))
    assert kinds(result) == ["wrong_shape", "wrong_values"]
    assert "the sum over the broadcast axes [0, 1] is missing" in result.summary()


def test_another_dtype_is_a_finding_unless_it_is_meant():
    x = random(3, dtype=torch.bfloat16)

    def backward(g, _x):
        return g.float() * 2

    assert kinds(check_vjp(lambda x: 2 * x, backward, x)) == ["wrong_dtype"]
    meant = check_vjp(lambda x: 2 * x, backward, x, check_grad_dtypes=False)
    assert meant.passed
    assert meant.inputs[0].dtype == "float32"


def test_a_nan_never_passes():
    def backward(g, _x):
        gradient = 2 * g
        gradient[0] = torch.nan
        return gradient

    result = check_vjp(lambda x: 2 * x, backward, random(3))
    assert result.status == "failed"
    assert result.inputs[0].worst.index == (0,)


# What is undecided does not pass ----------------------------------------------------------------


def test_a_kink_is_not_differentiable_rather_than_wrong():
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    result = gradcheck(torch.relu, x, raise_exception=False)
    assert result.status == "inconclusive"
    assert kinds(result) == ["not_differentiable"]
    assert result.inputs[0].not_differentiable == 1 + 5
    with pytest.raises(GradientCheckInconclusive, match="no derivative here, the first at index"):
        gradcheck(torch.relu, x)


def test_a_forward_in_float32_is_unresolved_rather_than_passed():
    def function(x):
        return x.float().sin().double()

    result = gradcheck(function, random(3), raise_exception=False)
    assert result.status == "inconclusive"
    assert set(kinds(result)) == {"unresolved"}
    assert gradcheck(function, random(3), resolution=1e-3).passed


def test_zero_checked_entries_are_an_error():
    empty = gradcheck(lambda x: x * 2, torch.zeros(0, 3), raise_exception=False)
    assert empty.status == "nothing_checked"
    with pytest.raises(GradientCheckFailed, match="no entry was compared"):
        empty.raise_for_failure()
    no_output = check_vjp(lambda x: x[:0], lambda _, x: torch.zeros_like(x), random(3))
    assert not no_output.passed
    with pytest.raises(ValueError, match="nothing to check"):
        gradcheck(torch.argmax, random(3))


def test_an_input_without_elements_beside_others_is_no_error():
    assert gradcheck(lambda x, y: x.sum() + 2 * y, (torch.zeros(0), random(2))).passed


# Cotangents, layouts, repetitions ---------------------------------------------------------------


def test_a_backward_is_fed_contiguous_strided_and_expanded_cotangents():
    seen = set()

    def backward(g, _x):
        seen.add((g.is_contiguous(), 0 in g.stride()))
        return 2 * g

    assert check_vjp(lambda x: 2 * x, backward, random(3, 4)).passed
    assert seen == {(True, False), (False, False), (False, True)}


def test_a_backward_that_refuses_a_layout_is_told():
    result = check_vjp(lambda x: 2 * x, lambda g, x: 2 * g.view(-1).view(x.shape), random(3, 4))
    assert kinds(result) == ["raises"]
    assert "strided cotangent" in result.summary()


def test_inputs_reach_the_backward_with_their_strides_and_values():
    x = random(4, 6).T[::2]
    y = random(1, 4, seed=1).expand(3, 4)

    strides = []

    def backward(g, a, b):
        strides.append((a.stride(), b.stride()))
        return product_backward(g, a, b)

    result = check_vjp(lambda a, b: a * b, backward, (x, y))
    assert result.passed
    assert strides.count((x.stride(), y.stride())) >= 5 + 12
    assert {stride for stride, _ in strides} == {x.stride()}
    assert any("input 1 is expanded" in remark for remark in result.remarks)


def test_a_function_that_ignores_strides_is_told():
    def function(x):
        count = x.numel()
        return 2 * x.as_strided((count,), (1,)).view(x.shape)

    result = gradcheck(function, random(3, 4).T, raise_exception=False)
    assert "layout_dependent" in kinds(result)


@pytest.mark.parametrize("target", ["cotangent 0", "input 0"])
def test_a_backward_that_changes_what_it_is_given_is_told(target):
    def backward(g, x):
        gradient = 2 * g
        (g if target == "cotangent 0" else x).mul_(3)
        return gradient

    result = check_vjp(lambda x: 2 * x, backward, random(3))
    assert ("changes_inputs", target) in [(each.kind, each.input) for each in result.findings]


def test_other_bits_in_repetitions_are_reported_and_decide_only_when_asked():
    calls = []

    def backward(g, _x):
        calls.append(0)
        return 2 * g * (1 + (len(calls) % 7 == 0) * 2.0**-52)

    def check(**options):
        return check_vjp(lambda x: 2 * x, backward, random(3), **options)

    reported = check()
    assert reported.passed
    assert kinds(reported) == ["not_reproducible"]
    assert "of 19 repetitions returned other bits" in reported.findings[0].message
    assert check(nondet_tol=0.0).status == "failed"
    assert check(nondet_tol=1e-3).passed


# The parameters of torch.autograd.gradcheck -----------------------------------------------------


def test_failures_raise_only_when_asked():
    wrong = with_backward(torch.sin, lambda g, _: (g,))
    with pytest.raises(GradientCheckFailed):
        gradcheck(wrong, random(3))
    assert not gradcheck(wrong, random(3), raise_exception=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fast_mode": True}, "misses single wrong"),
        ({"masked": True}, "sparse"),
        ({"check_batched_forward_grad": True}, "not offered"),
        ({"check_backward_ad": False}, "leaves nothing to check"),
        ({"eps": 0.0}, "step is 0.0"),
        ({"atol": -1.0}, "atol is -1.0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"derivative": "exact"}, "derivative is 'exact'"),
        ({"only_requires_grad": True}, "no input requires one"),
    ],
)
def test_what_is_not_offered_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gradcheck(torch.sin, random(3), **options)


def test_the_other_parameters_are_honoured():
    x = random(3).requires_grad_()
    off = with_backward(torch.sin, lambda g, x: (g * x.cos() * (1 + 1e-5),))
    assert not gradcheck(off, x, raise_exception=False)
    assert gradcheck(off, x, rtol=1e-3)
    assert gradcheck(off, x, atol=1e-3)
    assert gradcheck(torch.sin, x, eps=1e-3).inputs[0].worst.step <= 1e-3
    assert gradcheck(
        torch.sin,
        x,
        check_batched_grad=True,
        check_forward_ad=True,
        check_grad_dtypes=True,
        check_undefined_grad=True,
        masked=False,
        nondet_tol=0.0,
    )


def test_inputs_that_require_no_gradient_are_checked_unless_told_otherwise():
    x, y = random(3).requires_grad_(), random(3, seed=1)

    def function(x, y):
        return x * y.detach()

    assert not gradcheck(function, (x, y), raise_exception=False)
    result = gradcheck(function, (x, y), only_requires_grad=True)
    assert [each.name for each in result.inputs] == ["input 0"]
    assert any("input 1 was not checked" in remark for remark in result.remarks)


class _NeedsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        if all(ctx.needs_input_grad):
            return g * y, g * x
        return (g * x if ctx.needs_input_grad[0] else None, None)


def test_gradients_that_change_with_what_requires_one_are_told():
    result = gradcheck(_NeedsBoth.apply, (random(3), random(3, seed=1)), raise_exception=False)
    assert [(each.kind, each.input) for each in result.findings] == [
        ("depends_on_requires_grad", "input 0"),
        ("depends_on_requires_grad", "input 1"),
    ]


class _NeedsAllCotangents(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(_ctx, first, second):
        return 2 * first + 3 * second


def test_undefined_cotangents_must_mean_zero():
    result = gradcheck(_NeedsAllCotangents.apply, random(3), raise_exception=False)
    assert kinds(result) == ["undefined_gradient"] * 2
    assert gradcheck(_NeedsAllCotangents.apply, random(3), check_undefined_grad=False)


def test_wrong_forward_mode_and_batched_gradients_are_told():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return 2 * x

        @staticmethod
        def backward(_ctx, g):
            return torch.from_numpy(g.detach().numpy() * 2)

        @staticmethod
        def jvp(_ctx, tangent):
            return 2.001 * tangent

    result = gradcheck(Wrong.apply, random(3), check_forward_ad=True, raise_exception=False)
    assert kinds(result) == ["forward_mode"]
    result = gradcheck(Wrong.apply, random(3), check_batched_grad=True, raise_exception=False)
    assert kinds(result) == ["batched_gradient"]


# Second derivatives -----------------------------------------------------------------------------


class _CubeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x.detach() ** 2


def test_second_derivatives_are_checked():
    result = gradgradcheck(lambda x, y: (x.sin() * y, y.exp()), (random(3), random(3, seed=1)))
    assert [each.name for each in result.inputs] == [
        "input 0",
        "input 1",
        "cotangent 0",
        "cotangent 1",
    ]
    assert gradcheck(_CubeOnce.apply, random(3))
    wrong = gradgradcheck(_CubeOnce.apply, random(3), raise_exception=False)
    assert "detached" in kinds(wrong)
    assert wrong.finding("detached").input == "input 0"


def test_second_derivatives_take_cotangents_as_given_and_float64_only():
    assert gradgradcheck(torch.sin, random(3), random(3, seed=1))
    assert gradgradcheck(torch.sin, random(3, 2), gen_non_contig_grad_outputs=True)
    with pytest.raises(TypeError, match="second derivatives are checked in float64 only"):
        gradgradcheck(torch.sin, random(3, dtype=torch.float32))
    with pytest.raises(ValueError, match="2 cotangents were given for 1 floating outputs"):
        gradgradcheck(torch.sin, random(3), (random(3), random(3)))


# Low precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("derivative", ["numeric", "autograd"])
def test_a_low_precision_backward_is_judged_by_a_measured_noise_floor(dtype, derivative):
    inputs = (random(8, 16, dtype=dtype), random(1, 16, dtype=dtype, seed=1))

    def backward(g, x, y):
        wide = g.float()
        return (wide * y.float()).to(dtype), (wide * x.float()).sum(0, keepdim=True).to(dtype)

    def first_row(g, x, y):
        return backward(g, x, y)[0], (g * x)[:1]

    def zeroed(g, x, y):
        by_x, by_y = backward(g, x, y)
        by_x[3, 5] = 0
        return by_x, by_y

    right = check_vjp(product, backward, inputs, derivative=derivative)
    assert right.passed, right.summary()
    assert right.inputs[0].dtype == str(dtype).removeprefix("torch.")
    assert "measured noise floor" in right.budget
    assert not check_vjp(product, first_row, inputs, derivative=derivative).passed
    wrong = check_vjp(product, zeroed, inputs, derivative=derivative)
    assert wrong.inputs[0].worst.index == (3, 5)
    assert [each.disagreeing > 0 for each in wrong.inputs] == [True, False]


def product_terms(cotangents, inputs):
    (g,), (x, y) = cotangents, inputs
    wide = g.double()
    return (wide * y.double())[None], (wide * x.double()).unsqueeze(1)


def test_supplied_terms_and_a_contract_judge_a_low_precision_backward():
    x, y = random(8, 16, dtype=torch.bfloat16), random(1, 16, dtype=torch.bfloat16, seed=1)

    def eager(g, x, y):
        return g * y, (g * x).sum(0, keepdim=True)

    def truncating(g, x, y):
        wide = (g.float() * y.float()).view(torch.int32)
        return (wide & -65536).view(torch.float32).bfloat16(), eager(g, x, y)[1]

    terms = Terms(product_terms)
    result = check_vjp(product, eager, (x, y), budget=terms)
    assert result.passed, result.summary()
    assert "the contract stored_intermediates on the terms supplied" in result.budget
    assert check_vjp(product, truncating, (x, y)).passed
    assert kinds(check_vjp(product, truncating, (x, y), budget=terms)) == ["wrong_values"]


def test_terms_that_do_not_add_up_to_the_derivative_are_told():
    inputs = (random(8, 16, dtype=torch.bfloat16), random(1, 16, dtype=torch.bfloat16, seed=1))

    def wrong_terms(cotangents, tensors):
        by_x, by_y = product_terms(cotangents, tensors)
        return by_x, by_y[1:]

    def same_fault(g, x, y):
        return g * y, (g * x)[1:].sum(0, keepdim=True)

    result = check_vjp(product, same_fault, inputs, budget=Terms(wrong_terms))
    assert "terms_disagree" in kinds(result)


def test_a_kernel_that_knows_no_float64_is_checked_with_a_reference():
    def kernel(x):
        assert x.dtype == torch.bfloat16
        return torch.sin(x)

    x = random(5, dtype=torch.bfloat16)
    assert gradcheck(kernel, x, reference=torch.sin)
    with pytest.raises(ValueError, match="they must be the same"):
        gradcheck(kernel, x, reference=torch.sum)


def test_a_wrong_backward_shows_in_the_float64_gradient_of_a_large_function_too():
    inputs = update_inputs(*SMALL, torch.bfloat16)

    def backward(*tensors):
        gradients = update_backward(*tensors)
        gradients[2] = gradients[2] * 1.0001
        return gradients

    wrong = gradcheck(
        with_backward(update, backward), inputs, derivative="autograd", raise_exception=False
    )
    assert kinds(wrong) == ["reference_gradient"]


def test_a_noise_floor_that_measures_nothing_is_refused():
    with pytest.raises(ValueError, match="measures nothing"):
        NoiseFloor(perturbations=1)
    with pytest.raises(ValueError, match="measures nothing"):
        NoiseFloor(factor=0.0)


def test_a_forward_that_autograd_cannot_follow_needs_terms():
    def forward(x):
        return torch.from_numpy(x.detach().numpy() * 2)

    with pytest.raises(ValueError, match="supply Terms"):
        check_vjp(forward, lambda g, _: 2 * g, random(3, dtype=torch.float32))
    terms = Terms(lambda cotangents, _: [2 * cotangents[0].double()[None]])
    assert check_vjp(
        forward, lambda g, _: 2 * g, random(3, dtype=torch.float32), budget=terms
    ).passed


def test_an_operator_pair_that_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match="is no backward of"):
        check_operator_vjp(FORWARD, find_operator("kv_rope.concat.forward"), {})


def test_a_backward_operator_with_a_missing_or_misshapen_output_is_told():
    named = dict(zip(NAMES, update_inputs(*SMALL, torch.bfloat16), strict=True))
    good = operator_backward(None)

    def missing(*tensors):
        outputs = list(good(*tensors))
        return [*outputs[:2], None, outputs[3][:1], *outputs[4:]]

    result = check_operator_gradients(FORWARD, BACKWARD, missing, named)
    assert kinds(result) == ["missing", "wrong_shape", "wrong_values"]
    with pytest.raises(ValueError, match="returned 1 outputs"):
        check_operator_gradients(FORWARD, BACKWARD, lambda *t: good(*t)[:1], named)


# Adjoints ---------------------------------------------------------------------------------------


def test_the_adjoint_test_accepts_an_adjoint_and_refuses_any_other():
    a = random(200, 300)
    v, w = torch.empty(300), torch.empty(200)
    assert check_adjoint(lambda v: a @ v, lambda w: a.T @ w, v, w, terms=64)
    wrong = a.T.clone()
    wrong[17, 5] *= 1 + 1e-6
    result = check_adjoint(lambda v: a @ v, lambda w: wrong @ w, v, w, terms=64, names=["v"])
    assert result.status == "failed"
    with pytest.raises(GradientCheckFailed, match="v, trial 1: <J v, w> ="):
        result.raise_for_failure()
    json.dumps(result.to_dict(), allow_nan=False)


def test_one_zeroed_element_of_many_breaks_the_adjoint():
    scale = random(200_000)
    like = torch.empty(200_000)

    def vjp(w):
        gradient = scale * w
        gradient[77_777] = 0
        return gradient

    assert check_adjoint(lambda v: scale * v, lambda w: scale * w, like, like, trials=1)
    assert not check_adjoint(lambda v: scale * v, vjp, like, like, trials=1)


def test_a_numeric_jvp_stands_for_a_jvp():
    x, y = random(30, 4), random(4, seed=1)

    def jvp(*tangents):
        return numeric_jvp(lambda x, y: torch.sin(x) * y, (x, y), tangents)

    def vjp(w):
        return w * x.cos() * y, (w * x.sin()).sum(0)

    assert check_adjoint(jvp, vjp, (x, y), x)
    result = check_adjoint(jvp, lambda w: (vjp(w)[0], None), (x, y), x, names=["x", "y"])
    assert {trial.input for trial in result.trials if not trial.passed} == {"y"}


def test_the_adjoint_test_refuses_low_precision_and_wrong_shapes():
    like = torch.empty(3)
    with pytest.raises(TypeError, match="judge low precision with check_vjp"):
        check_adjoint(lambda v: v.float(), lambda w: w, like, like)
    with pytest.raises(ValueError, match="has shape"):
        check_adjoint(lambda v: v, lambda w: w[:2], like, like)
    with pytest.raises(ValueError, match="returned 2 gradients for 1 inputs"):
        check_adjoint(lambda v: v, lambda w: (w, w), like, like)
    with pytest.raises(ValueError, match="nothing to test"):
        check_adjoint(lambda v: v, lambda w: w, (), like)
    empty = check_adjoint(lambda v: v, lambda w: w, torch.empty(0), torch.empty(0))
    assert empty.status == "nothing_checked"


def test_dot_products_do_not_lose_what_cancels():
    left = torch.tensor([1e16, 1.0, -1e16, 2.0**-30], dtype=torch.float64)
    right = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert dot([left], [right])[0] == 1.0 + 2.0**-30
    tiny = torch.tensor([1 + 2.0**-30, 1.0], dtype=torch.float64)
    other = torch.tensor([1 + 2.0**-30, -(1 + 2.0**-29)], dtype=torch.float64)
    assert dot([tiny], [other])[0] == 2.0**-60


# Misuse -----------------------------------------------------------------------------------------


def test_a_backward_with_a_wrong_number_or_kind_of_gradients_is_refused():
    with pytest.raises(ValueError, match="returned 3 gradients; expected one for each of the 2"):
        check_vjp(product, lambda g, *_: (g, g, g), (random(3), random(3)))
    with pytest.raises(TypeError, match="the gradient of input 0 is float"):
        check_vjp(torch.sin, lambda *_: [1.0], random(3))
    with pytest.raises(TypeError, match=r"the gradient of input 0 is torch\.int64"):
        check_vjp(torch.sin, lambda g, _: g.long(), random(3))


def test_gradients_may_be_given_for_all_inputs_or_the_floating_ones():
    inputs = (torch.tensor([2, 0]), random(3, 2))

    def forward(index, x):
        return x[index]

    def backward(g, index, x):
        return torch.zeros_like(x).index_add(0, index, g)

    assert check_vjp(forward, backward, inputs).passed
    assert check_vjp(forward, lambda g, i, x: (None, backward(g, i, x)), inputs).passed


def test_every_kind_of_finding_is_explained():
    assert all(FINDINGS.values())
    assert len(set(FINDINGS.values())) == len(FINDINGS)
