"""The operators that can be judged. Each module here is one family and is found by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from ..definition import InvalidDefinition, Operator


class UnknownOperator(ValueError):
    """No operator has the id that was asked for; the message lists those there are."""


@cache
def all_operators() -> Mapping[str, Operator]:
    """Return every operator by id, in order of their ids.

    Raises:
        InvalidDefinition: if two families define the same id.
    """
    found: dict[str, Operator] = {}
    for module in iter_modules(__path__):
        family = import_module(f".{module.name}", __name__)
        for operator in family.OPERATORS:
            if operator.id in found:
                raise InvalidDefinition(f"operator {operator.id} is defined twice")
            found[operator.id] = operator
    return MappingProxyType(dict(sorted(found.items())))


def find_operator(operator_id: str) -> Operator:
    """Return the operator of that id.

    Raises:
        UnknownOperator: listing the ids there are.
    """
    operators = all_operators()
    if operator_id not in operators:
        raise UnknownOperator(f"no operator {operator_id!r}; there are {', '.join(operators)}")
    return operators[operator_id]
