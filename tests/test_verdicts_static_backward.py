"""Verdicts on the honest and the wrong kernels of ``kv_rope.static.backward``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracle.verification import Judge
from tests.honest import HONEST, HonestKernel
from tests.kernel_verdicts import check_honest, check_wrong, judges_of
from tests.wrong import static_backward
from tests.wrong.catalogue import WrongKernel

OPERATOR = "kv_rope.static.backward"


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Judge]]:
    with judges_of(OPERATOR) as made:
        yield made


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in HONEST if kernel.operator == OPERATOR],
    ids=lambda kernel: kernel.name,
)
def test_an_honest_kernel_passes_all_probes_with_its_grade(
    judges: dict[str, Judge], kernel: HonestKernel
) -> None:
    check_honest(judges, kernel)


@pytest.mark.parametrize("kernel", static_backward.WRONG, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason_at_the_right_element(
    judges: dict[str, Judge], kernel: WrongKernel
) -> None:
    check_wrong(judges, static_backward.__name__, kernel)
