"""kernel-oracle: the exact meaning of an operator, and the judge of its implementations.

``import oracle`` is cheap: nothing heavy (torch, numpy, triton) is imported until one of the
public names below is used. Programs that only want to know whether the package is there pay
nothing for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .candidate import BadCandidate as BadCandidate
    from .certified import Truth as Truth
    from .certified import truth as truth
    from .definition import Case as Case
    from .definition import InvalidInput as InvalidInput
    from .definition import Operator as Operator
    from .gradients import GradientCheckFailed as GradientCheckFailed
    from .gradients import GradientCheckInconclusive as GradientCheckInconclusive
    from .gradients import GradientResult as GradientResult
    from .gradients import NoiseFloor as NoiseFloor
    from .gradients import Terms as Terms
    from .gradients import check_adjoint as check_adjoint
    from .gradients import check_operator_gradients as check_operator_gradients
    from .gradients import check_operator_vjp as check_operator_vjp
    from .gradients import check_vjp as check_vjp
    from .gradients import gradcheck as gradcheck
    from .gradients import gradgradcheck as gradgradcheck
    from .gradients import numeric_jacobian as numeric_jacobian
    from .gradients import numeric_jvp as numeric_jvp
    from .inputs import make_inputs as make_inputs
    from .operators import all_operators as all_operators
    from .operators import find_operator as find_operator
    from .verdict import Verdict as Verdict
    from .verification import Judge as Judge
    from .verification import verify as verify

__version__ = "0.1.0"

_HOME = {
    "BadCandidate": "candidate",
    "Case": "definition",
    "GradientCheckFailed": "gradients",
    "GradientCheckInconclusive": "gradients",
    "GradientResult": "gradients",
    "InvalidInput": "definition",
    "Judge": "verification",
    "NoiseFloor": "gradients",
    "Operator": "definition",
    "Terms": "gradients",
    "Truth": "certified",
    "Verdict": "verdict",
    "all_operators": "operators",
    "check_adjoint": "gradients",
    "check_operator_gradients": "gradients",
    "check_operator_vjp": "gradients",
    "check_vjp": "gradients",
    "find_operator": "operators",
    "gradcheck": "gradients",
    "gradgradcheck": "gradients",
    "make_inputs": "inputs",
    "numeric_jacobian": "gradients",
    "numeric_jvp": "gradients",
    "truth": "certified",
    "verify": "verification",
}

__all__ = [
    "BadCandidate",
    "Case",
    "GradientCheckFailed",
    "GradientCheckInconclusive",
    "GradientResult",
    "InvalidInput",
    "Judge",
    "NoiseFloor",
    "Operator",
    "Terms",
    "Truth",
    "Verdict",
    "__version__",
    "all_operators",
    "check_adjoint",
    "check_operator_gradients",
    "check_operator_vjp",
    "check_vjp",
    "find_operator",
    "gradcheck",
    "gradgradcheck",
    "make_inputs",
    "numeric_jacobian",
    "numeric_jvp",
    "truth",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not yet imported included."""
    return sorted(__all__)
