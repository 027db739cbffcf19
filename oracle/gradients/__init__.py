"""Gradient checks that say what they found.

* :func:`check_vjp`: a backward that is a function of its own, against its forward.
* :func:`gradcheck`, :func:`gradgradcheck`: differentiable functions, called as torch's are.
* :func:`check_adjoint`: the dot-product test, for shapes of any size.
* :func:`check_operator_vjp`, :func:`check_operator_gradients`: pairs of operators of this package.
* :func:`numeric_jacobian`, :func:`numeric_jvp`: derivatives with error estimates.
"""

from __future__ import annotations

from .adjoint import AdjointResult, AdjointTrial, check_adjoint
from .autograd import gradcheck, gradgradcheck
from .budgets import NoiseFloor, Terms
from .derivative import K, NumericDerivative, numeric_jacobian, numeric_jvp
from .findings import (
    FINDINGS,
    Entry,
    Finding,
    GradientCheckFailed,
    GradientCheckInconclusive,
    GradientResult,
    InputResult,
)
from .operators import OperatorPair, check_operator_gradients, check_operator_vjp
from .vjp import check_vjp

__all__ = [
    "FINDINGS",
    "AdjointResult",
    "AdjointTrial",
    "Entry",
    "Finding",
    "GradientCheckFailed",
    "GradientCheckInconclusive",
    "GradientResult",
    "InputResult",
    "K",
    "NoiseFloor",
    "NumericDerivative",
    "OperatorPair",
    "Terms",
    "check_adjoint",
    "check_operator_gradients",
    "check_operator_vjp",
    "check_vjp",
    "gradcheck",
    "gradgradcheck",
    "numeric_jacobian",
    "numeric_jvp",
]
