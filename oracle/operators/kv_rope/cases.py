"""How the cases of the family are put together: one operator's probes, suites and large case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ...definition import Case, DomainName, Layout, Suite, TensorSpec
from .kinds import is_random

HEAD_DIM = 128

OFFSET = 128
"""Elements before the first one in the ``offset`` probes: 256 bytes, so alignment is kept."""

Shape = tuple[int, int, int]
"""(batch_size, new_seq_len, rows of the cache: cached tokens, or the capacity of a static one)."""

Probe = tuple[str, str, Shape, str]
"""Name, kind of inputs, shape, what it exposes."""

FORWARD_SUITE = "sol-execbench/L1/071_kv_cache_update_with_rope"
BACKWARD_SUITE = "sol-execbench/L1/062_kv_cache_update_with_rope_backward"


@dataclass(frozen=True)
class Setting:
    """What all cases of one operator have in common.

    Attributes:
        operator: the operator's id.
        heads: num_kv_heads of the official suite of this layout.
        cache_axis: ``current_seq_len`` or ``max_seq_len``.
        inputs: the operator's inputs.
    """

    operator: str
    heads: int
    cache_axis: str
    inputs: tuple[TensorSpec, ...]

    @property
    def is_static(self) -> bool:
        """Whether the cache has a fixed capacity."""
        return self.cache_axis == "max_seq_len"

    @property
    def is_backward(self) -> bool:
        """Whether the operator is a gradient."""
        return self.operator.endswith(".backward")

    @property
    def official(self) -> dict[str, int]:
        """The constants of the official suite."""
        return {"num_kv_heads": self.heads, "head_dim": HEAD_DIM}

    def case(
        self,
        name: str,
        kind: str,
        shape: Shape,
        exposes: str = "",
        *,
        group: str = "probes",
        heads: int | None = None,
        head_dim: int = HEAD_DIM,
        layouts: Mapping[str, Layout] | None = None,
        broadcast: Sequence[str] = (),
        domain: DomainName = "official",
        published: Mapping[str, float] | None = None,
        needs_gpu: bool = False,
    ) -> Case:
        """Return a case of the operator.

        Args:
            name: see :class:`Case`, as for all that is not explained here.
            kind: the kind of inputs.
            shape: the sizes that vary in the official domain.
            exposes: for a probe, the fault.
            group: the suite's id, ``probes`` or ``large``.
            heads: num_kv_heads; the official number by default.
            head_dim: D.
            layouts: of inputs that are not plain.
            broadcast: the tables that have one row for all batch entries.
            domain: the case's domain.
            published: published figures.
            needs_gpu: whether it is too large for a machine without one.
        """
        batch, new, rows = shape
        layouts = layouts or {}
        # What is expanded along an axis repeats its numbers: no independent draws.
        repeats = any(layout.expanded for layout in layouts.values())
        return Case(
            operator=self.operator,
            name=name,
            group=group,
            sizes={
                "batch_size": batch,
                "num_kv_heads": self.heads if heads is None else heads,
                "new_seq_len": new,
                self.cache_axis: rows,
                "head_dim": head_dim,
            },
            kind=kind,
            exposes=exposes,
            layouts=layouts,
            random=is_random(kind) and not repeats,
            published=published or {},
            domain=domain,
            broadcast=dict.fromkeys(broadcast, ("batch_size",)),
            needs_gpu=needs_gpu,
        )

    def probes(self, table: tuple[Probe, ...]) -> tuple[Case, ...]:
        """Return the official probes of a table as cases."""
        inside = {spec.name: Layout(offset=OFFSET) for spec in self.inputs}
        return tuple(
            self.case(name, kind, shape, exposes, layouts=inside if name == "offset" else {})
            for name, kind, shape, exposes in table
        )

    def large(self, kind: str, shape: Shape) -> tuple[Case, ...]:
        """Return the case whose caches have more than 2^31 elements."""
        exposes = "offsets of elements formed in 32 bits"
        return (self.case("past-int32", kind, shape, exposes, group="large", needs_gpu=True),)

    def official_suite(self, suite_id: str) -> Suite:
        """Return a published suite of this operator, shipped as data."""
        published = _published(suite_id)
        return Suite(
            id=suite_id,
            source="SOL-ExecBench, public problem page",
            cases=self._suite_cases(suite_id, published, figures=True),
            published=published["published_b200_geomean_us"],
        )

    def derived_suite(self, suite_id: str) -> Suite:
        """Return a suite with the shapes of the published one of this layout's other direction."""
        derived_id = f"derived/{self.operator}"
        return Suite(
            id=derived_id,
            source=f"derived: the 16 shapes, the types and the distributions of {suite_id}, the"
            " other direction; nothing is published for these cases",
            cases=self._suite_cases(derived_id, _published(suite_id), figures=False),
        )

    def _suite_cases(
        self, group: str, published: Mapping[str, Any], figures: bool
    ) -> tuple[Case, ...]:
        letter = "M" if self.is_static else "C"
        cases = []
        for number, entry in enumerate(published["cases"], start=1):
            shape = (entry["batch_size"], entry["new_seq_len"], entry[self.cache_axis])
            batch, new, rows = shape
            times = ("scoring_baseline_us", "sol_us") if figures else ()
            cases.append(
                self.case(
                    f"suite-{number:02d}-B{batch}-N{new}-{letter}{rows}",
                    "official",
                    shape,
                    group=group,
                    published={name: entry[name] for name in times},
                )
            )
        return tuple(cases)


def _published(suite_id: str) -> Mapping[str, Any]:
    shipped: Mapping[str, Any] = json.loads(
        files("oracle").joinpath("suites/sol_execbench.json").read_text("utf-8")
    )
    found: Mapping[str, Any] = next(each for each in shipped["suites"] if each["id"] == suite_id)
    return found
