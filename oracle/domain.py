"""Domains: claims read, and the cases that a domain consists of.

The official domain is an operator's own cases. The general domain takes every probe as a template
and tries it in all floating types and at other sizes of the axes that the official suite fixes;
claims restrict what is tried, so that a kernel is judged on all it claims and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from .definition import DOMAINS, Case, Domain, InvalidInput, Operator

PROBE_ELEMENTS = 1 << 20
"""A probe at other sizes than its own has at most this many output elements, if it can."""

_MOST_COMBINATIONS = 6


class InvalidClaim(ValueError):
    """A domain or claim that is none; the message says what can be claimed."""


def read_domain(operator: Operator, name: str, where: Mapping[str, object] | None = None) -> Domain:
    """Read a domain and its claims.

    Args:
        operator: the operator.
        name: ``"official"`` or ``"general"``; with claims it is the general one.
        where: claims: an axis and its sizes, ``dtype`` and floating types,
            ``layout`` and ``contiguous``, or one of the operator's constraints split at its
            ``=``. A value may be a number, a text with commas, or a sequence.

    Raises:
        InvalidClaim: naming what is not known, or cannot be.
    """
    known = next((domain for domain in DOMAINS if domain == name), None)
    if known is None:
        raise InvalidClaim(f"domain {name!r} is not one of {', '.join(DOMAINS)}")
    if not where:
        return Domain(known)
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: tuple[str, ...] = ()
    contiguous = False
    constraints: list[str] = []
    free = {axis.name for axis in operator.axes if not axis.sum_of}
    for claim, value in where.items():
        values = _values(claim, value)
        if claim in free:
            sizes[claim] = tuple(_size(operator, claim, text) for text in values)
        elif claim == "dtype":
            dtypes = tuple(_dtype(operator, text) for text in values)
        elif claim == "layout" and values == ("contiguous",):
            contiguous = True
        elif all(f"{claim}={text}" in operator.constraints for text in values):
            constraints += [f"{claim}={text}" for text in values]
        else:
            raise InvalidClaim(
                f"{operator.id} knows no claim {claim}={','.join(values)}; {_claimable(operator)}"
            )
    return Domain("general", sizes, dtypes, contiguous, tuple(constraints))


def _values(claim: str, value: object) -> tuple[str, ...]:
    items: Sequence[object]
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, Sequence):
        items = value
    else:
        items = (value,)
    values = tuple(dict.fromkeys(str(item).strip() for item in items))
    if not values or not all(values):
        raise InvalidClaim(f"the claim {claim} has no value; write {claim}=VALUE[,VALUE...]")
    return values


def _size(operator: Operator, name: str, text: str) -> int:
    axis = next(axis for axis in operator.axes if axis.name == name)
    size = int(text) if text.isascii() and text.isdecimal() else -1
    if size < axis.minimum or size % axis.multiple_of:
        even = f" and a multiple of {axis.multiple_of}" if axis.multiple_of > 1 else ""
        raise InvalidClaim(
            f"{name}={text} is no size of {operator.id}: it must be at least {axis.minimum}{even}"
        )
    return size


def _dtype(operator: Operator, text: str) -> str:
    if text not in operator.dtypes:
        raise InvalidClaim(
            f"dtype={text} is none of {operator.id}, which is judged in"
            f" {', '.join(operator.dtypes)}"
        )
    return text


def _claimable(operator: Operator) -> str:
    axes = ", ".join(axis.name for axis in operator.axes if not axis.sum_of)
    others = ", ".join(("layout=contiguous", *operator.constraints))
    return f"claim sizes of {axes}, or dtype={'|'.join(operator.dtypes)}, or {others}"


def domain_cases(operator: Operator, domain: Domain) -> tuple[Case, ...]:
    """Return all cases of a domain: probes, suites in order, those that need a GPU.

    Raises:
        InvalidClaim: if no case meets the claims.
    """
    if domain.name == "official":
        return operator.cases
    templates = [base for base in operator.probes + operator.general_probes if not base.needs_gpu]
    probes = [
        case
        for number, base in enumerate(templates)
        for case in _at_other_sizes(operator, domain, base, number)
    ]
    suites = [
        case
        for suite in operator.suites
        for base in suite.cases
        for case in _suite_cases(operator, domain, base)
    ]
    large = [
        case
        for base in (*operator.general_probes, *operator.large)
        if base.needs_gpu
        for case in _fitting(operator, domain, base)
        if not domain.contiguous or has_contiguous_inputs(operator, base)
    ]
    cases = {case.name: case for case in (*probes, *suites, *large)}
    if not cases:
        raise InvalidClaim(f"no case of {operator.id} meets {' '.join(domain.claims())}")
    return tuple(cases.values())


def _at_other_sizes(operator: Operator, domain: Domain, base: Case, number: int) -> Iterator[Case]:
    """Yield a probe in the types and sizes of the domain; ``number`` varies what is tried."""
    if domain.contiguous and not has_contiguous_inputs(operator, base):
        return
    for place, dtype in enumerate(domain.dtypes or operator.dtypes):
        if dtype == base.dtype or base.domain == "general":
            yield from _fitting(operator, domain, replace(base, dtype=dtype), base)
        for sizes in _combinations(operator, domain, base, number + place):
            yield from _instance(operator, domain, base, sizes, dtype)


def _combinations(
    operator: Operator, domain: Domain, base: Case, turn: int
) -> list[dict[str, int]]:
    """Return sizes of the axes that the official suite fixes: all claimed ones, or one in turn."""
    claimed = {axis: sizes for axis, sizes in domain.sizes.items() if axis in operator.variety}
    every = [dict(zip(claimed, sizes, strict=True)) for sizes in product(*claimed.values())]
    start = turn % len(every)
    chosen = (every[start:] + every[:start])[:_MOST_COMBINATIONS]
    return [
        given | _in_turn(operator, base, given, turn + place) for place, given in enumerate(chosen)
    ]


def _in_turn(operator: Operator, base: Case, given: Mapping[str, int], turn: int) -> dict[str, int]:
    """Pick a size in turn for every varied axis not given, the smaller ones where it gets large."""
    picked: dict[str, int] = {}
    for step, (axis, pool) in enumerate(operator.variety.items()):
        if axis in given:
            continue
        start = (turn * (step + 1) + step) % len(pool)
        for size in (*pool[start:], *pool[:start]):
            picked[axis] = size
            sizes = {**base.sizes, **given, **picked}
            if output_elements(operator, sizes) <= PROBE_ELEMENTS:
                break
        else:
            picked[axis] = min(pool)
    return picked


def _suite_cases(operator: Operator, domain: Domain, base: Case) -> Iterator[Case]:
    """Yield a suite's case in the claimed types and, where its sizes are not claimed, at others."""
    for dtype in domain.dtypes or (base.dtype,):
        sizes = {
            axis: allowed[0]
            for axis, allowed in domain.sizes.items()
            if axis in operator.variety and base.sizes[axis] not in allowed
        }
        yield from _instance(operator, domain, base, sizes, dtype)


def _instance(
    operator: Operator, domain: Domain, base: Case, sizes: Mapping[str, int], dtype: str
) -> Iterator[Case]:
    """Yield a case at the given sizes, the other claimed axes at their nearest claimed size."""
    full = {**base.sizes, **sizes}
    for axis, allowed in domain.sizes.items():
        if axis not in sizes:
            full[axis] = min(allowed, key=lambda size: (abs(size - full[axis]), size))
    for spec in operator.inputs:
        # There must be as many rows as an index tensor names.
        rows = spec.indexes
        if rows is not None and rows in full and rows not in domain.sizes:
            full[rows] = max(full[rows], full[spec.axes[0]])
    yield from _fitting(operator, domain, replace(base, sizes=full, dtype=dtype), base)


def _fitting(
    operator: Operator, domain: Domain, case: Case, base: Case | None = None
) -> Iterator[Case]:
    """Yield the case as one of the domain if it is in it, named by what it has of its own."""
    base = base or case
    if domain.dtypes and case.dtype not in domain.dtypes:
        return
    if any(case.sizes[axis] not in allowed for axis, allowed in domain.sizes.items()):
        return
    try:
        operator.check_sizes(case.sizes)
    except InvalidInput:
        return
    changed = [f"{axis}-{size}" for axis, size in case.sizes.items() if size != base.sizes[axis]]
    changed += [case.dtype] if case.dtype != base.dtype else []
    yield replace(
        case,
        name=".".join((base.name, *changed)),
        domain="general",
        constraints=tuple(dict.fromkeys(case.constraints + domain.constraints)),
        published={} if changed or domain.constraints else base.published,
    )


def has_contiguous_inputs(operator: Operator, case: Case) -> bool:
    """Whether all inputs of a case are contiguous."""
    return all(
        case.layouts[spec.name].is_contiguous(operator.case_shape(spec, case))
        for spec in operator.inputs
        if spec.name in case.layouts
    )


def output_elements(operator: Operator, sizes: Mapping[str, int]) -> int:
    """Return how many elements all outputs have together."""
    return sum(math.prod(operator.shape(spec, sizes)) for spec in operator.outputs)
