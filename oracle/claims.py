"""Under which claims would a candidate that failed meet its contract?

A kernel made for one head_dim fails in the general domain, and rightly so; what its author wants
to hear is that it passes under ``--where head_dim=128``. A claim is suggested where every case that
meets it passed and most others failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from .definition import Case, Operator
from .domain import has_contiguous_inputs

FEWEST_PASSED = 2
"""A claim that fewer passed cases meet may hold by chance."""

FAILED_SHARE = 0.5
"""Of the cases that do not meet a claim, so many at least must have failed."""

_MOST_SIZES = 2
"""More sizes than this of an axis that every case varies would be claimed by chance."""

Value = int | str


@dataclass(frozen=True)
class _Property:
    """Something that a claim can be about.

    Attributes:
        name: as written after ``--where``.
        of: the value of a case.
        most: the most values that may be claimed.
    """

    name: str
    of: Callable[[Case], Value]
    most: int


@dataclass(frozen=True)
class _Claim:
    """Values of one or two properties that a case must have."""

    values: tuple[tuple[_Property, frozenset[Value]], ...]

    def is_met(self, case: Case) -> bool:
        return all(prop.of(case) in allowed for prop, allowed in self.values)

    def __str__(self) -> str:
        return " ".join(
            f"{prop.name}={','.join(map(str, sorted(allowed, key=str)))}"
            for prop, allowed in self.values
        )


def claim_hint(operator: Operator, results: Sequence[tuple[Case, str]]) -> str:
    """Suggest the claims under which a candidate that failed meets the contract.

    Args:
        operator: the cases' operator.
        results: cases of the general domain, each with its status.

    Returns:
        One sentence with the claims as written after ``--where``: about one property if there is
        such a claim, else about two; of several, the one that most passed cases meet. Empty where
        there is none.
    """
    passed = [case for case, status in results if status == "passed"]
    failed = [case for case, status in results if status not in ("passed", "empty_ok", "not_run")]
    properties = _properties(operator)
    for count in (1, 2):
        found = [
            claim
            for chosen in combinations(properties, count)
            for claim in _sound_claims(chosen, passed, failed)
            if _is_telling(claim, passed, failed)
        ]
        if found:
            best = max(found, key=lambda claim: (_met(claim, passed), -len(str(claim))))
            return (
                f"All {_met(best, passed)} cases with {best} passed, and {len(failed)} of the"
                f" {len(passed) + len(failed) - _met(best, passed)} others failed: it meets the"
                f" contract under --where {best}."
            )
    return ""


def _properties(operator: Operator) -> tuple[_Property, ...]:
    """Return what claims can be about; axes that the general domain varies may have many sizes."""
    free = [axis.name for axis in operator.axes if not axis.sum_of]

    def size_of(axis: str) -> Callable[[Case], Value]:
        return lambda case: case.sizes[axis]

    def layout_of(case: Case) -> Value:
        return "contiguous" if has_contiguous_inputs(operator, case) else "strided"

    axes = [
        _Property(axis, size_of(axis), 99 if axis in operator.variety else _MOST_SIZES)
        for axis in free
    ]
    return (
        *axes,
        _Property("dtype", lambda case: case.dtype, 99),
        _Property("layout", layout_of, 1),
    )


def _sound_claims(
    properties: Sequence[_Property], passed: Sequence[Case], failed: Sequence[Case]
) -> Iterator[_Claim]:
    """Yield the widest claims about these properties that no failed case meets."""
    first, *rest = properties
    good = {value: _good(rest, value, first, passed, failed) for value in map(first.of, passed)}
    if not rest:
        values = frozenset(value for value, fine in good.items() if fine is not None)
        yield from _limited(((first, values),))
        return
    for wanted in set(good.values()):
        if wanted:
            values = frozenset(v for v, fine in good.items() if fine and wanted <= fine)
            yield from _limited(((first, values), (rest[0], wanted)))


def _good(
    rest: Sequence[_Property],
    value: Value,
    first: _Property,
    passed: Sequence[Case],
    failed: Sequence[Case],
) -> frozenset[Value] | None:
    """Return the values of the second property with which a value of the first never failed.

    Without a second property: an empty set if it never failed, else None.
    """
    bad = [case for case in failed if first.of(case) == value]
    if not rest:
        return None if bad else frozenset()
    (second,) = rest
    seen = {second.of(case) for case in passed if first.of(case) == value}
    return frozenset(seen - {second.of(case) for case in bad})


def _limited(values: tuple[tuple[_Property, frozenset[Value]], ...]) -> Iterator[_Claim]:
    """Yield the claim if it claims something, and no more than a claim may; nothing strided."""
    for prop, allowed in values:
        if not 0 < len(allowed) <= prop.most or "strided" in allowed:
            return
    yield _Claim(values)


def _is_telling(claim: _Claim, passed: Sequence[Case], failed: Sequence[Case]) -> bool:
    """Whether enough cases meet the claim, and most others failed."""
    met = _met(claim, passed)
    others = len(passed) - met + len(failed)
    return met >= FEWEST_PASSED and len(failed) >= FAILED_SHARE * others > 0


def _met(claim: _Claim, cases: Sequence[Case]) -> int:
    return sum(map(claim.is_met, cases))
