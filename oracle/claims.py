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

FEWEST_OF_ONE_SIZE = 3
"""One size of an axis that every case varies is claimed only if so many cases passed with it, and
all others failed: more would be claimed by chance."""

Value = int | str


@dataclass(frozen=True)
class _Property:
    """Something that a claim can be about.

    Attributes:
        name: as written after ``--where``.
        of: the value of a case.
    """

    name: str
    of: Callable[[Case], Value]


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
        such a claim, else about two, else about one size of another axis; of several, the one that
        most passed cases meet. Empty where there is none.
    """
    passed = [case for case, status in results if status == "passed"]
    failed = [case for case, status in results if status not in ("passed", "empty_ok", "not_run")]
    found = _claims(operator, passed, failed)
    if not found:
        return ""
    best = max(found, key=lambda claim: (_met(claim, passed), -len(str(claim))))
    met = _met(best, passed)
    others = len(passed) + len(failed) - met
    return (
        f"All {met} cases with {best} passed, and {len(failed)} of the {others} others failed: it"
        f" meets the contract under --where {best}."
    )


def _claims(operator: Operator, passed: Sequence[Case], failed: Sequence[Case]) -> list[_Claim]:
    """Return the claims of the simplest kind that there are."""
    varied = _varied_properties(operator)
    for count in (1, 2):
        found = [
            claim
            for chosen in combinations(varied, count)
            for claim in _sound_claims(chosen, passed, failed)
            if _is_telling(claim, passed, failed)
        ]
        if found:
            return found
    free = [axis.name for axis in operator.axes if not axis.sum_of]
    return [
        claim
        for axis in free
        if axis not in operator.variety
        for claim in _sound_claims((_Property(axis, _size_of(axis)),), passed, failed)
        if _is_of_one_size(claim, passed)
    ]


def _varied_properties(operator: Operator) -> tuple[_Property, ...]:
    """Return what the general domain varies deliberately."""

    def layout_of(case: Case) -> Value:
        return "contiguous" if has_contiguous_inputs(operator, case) else "strided"

    return (
        *(_Property(axis, _size_of(axis)) for axis in operator.variety),
        _Property("dtype", lambda case: case.dtype),
        _Property("layout", layout_of),
    )


def _size_of(axis: str) -> Callable[[Case], Value]:
    return lambda case: case.sizes[axis]


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
    """Yield the claim if it claims something; that inputs are strided is no claim."""
    if all(allowed and "strided" not in allowed for _, allowed in values):
        yield _Claim(values)


def _is_telling(claim: _Claim, passed: Sequence[Case], failed: Sequence[Case]) -> bool:
    """Whether enough cases meet the claim, and most others failed."""
    met = _met(claim, passed)
    others = len(passed) - met + len(failed)
    return met >= FEWEST_PASSED and len(failed) >= FAILED_SHARE * others > 0


def _is_of_one_size(claim: _Claim, passed: Sequence[Case]) -> bool:
    """Whether a claim names one size, with which all passed cases passed."""
    ((_, sizes),) = claim.values
    return len(sizes) == 1 and _met(claim, passed) == len(passed) >= FEWEST_OF_ONE_SIZE


def _met(claim: _Claim, cases: Sequence[Case]) -> int:
    return sum(map(claim.is_met, cases))
