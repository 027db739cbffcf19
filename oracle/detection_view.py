"""What was detected, as a person reads it: one table for each question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .detection import Catch, CorruptionDetection, Detection, LegalDetection, VariantDetection

_STYLES = {"caught": "green", "within_contract": "yellow", "unchanged": "dim", "missed": "red"}


def detection_view(detection: Detection, verbose: bool = False) -> Group:
    """Show what was caught, named and accepted.

    Args:
        detection: the data.
        verbose: list every corruption, and variants that are no kinds of their own.
    """
    kinds = detection.kinds
    parts: list[RenderableType] = [
        _heading(detection),
        Text(
            f"{len(detection.cases)} cases, seeds {_numbers(detection.seeds)}; legal variants on"
            f" seeds {_numbers(detection.legal_seeds)}; contract {detection.contract}",
            style="dim",
        ),
        Text(),
        _variants(detection.variants if verbose else kinds),
        Text(),
        _corruptions(detection.corruptions, verbose),
        Text(),
        _legal(detection.legal),
        Text(),
        Text(
            f"{detection.caught} of {len(kinds)} wrong kinds caught, {detection.named} named"
            f" rightly ({detection.roughly_named} when rounded otherwise);"
            f" {detection.false_alarms} of {len(detection.legal)} legal variants rejected"
        ),
    ]
    return Group(*parts)


def _heading(detection: Detection) -> Text:
    head, style = ("COMPLETE", "bold green") if detection.complete else ("INCOMPLETE", "bold red")
    return Text.assemble((head, style), "  detection of ", (detection.operator, "bold"))


def _variants(variants: Sequence[VariantDetection]) -> Table:
    table = _table("wrong variant", "outcome", "first caught by", "cases", "named")
    for variant in variants:
        named = Text("rightly", style="green") if variant.named_rightly else Text(variant.named)
        if variant.same_as:
            named = Text(f"same as {variant.same_as}", style="dim")
        table.add_row(
            Text.assemble(variant.name, ("\n" + variant.description, "dim")),
            Text(variant.outcome, style=_STYLES[variant.outcome]),
            _place(variant.first),
            str(len(variant.caught_in)),
            named,
        )
    return table


def _corruptions(corruptions: Sequence[CorruptionDetection], verbose: bool) -> Group:
    counts = Counter[str](corruption.outcome for corruption in corruptions)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _STYLES if counts[outcome])
    shown = [one for one in corruptions if verbose or one.outcome != "caught"]
    table = _table("generic corruption", "outcome", "first caught by")
    for one in shown:
        table.add_row(
            Text.assemble(one.name, ("\n" + one.description, "dim")),
            Text(one.outcome, style=_STYLES[one.outcome]),
            _place(one.first),
        )
    parts: list[RenderableType] = [Text(f"{len(corruptions)} generic corruptions: {summary}")]
    return Group(*parts, *([table] if shown else []))


def _legal(legal: Sequence[LegalDetection]) -> Table:
    table = _table("legal variant", "judged on", "not correctly rounded on", "rejected")
    for variant in legal:
        rejected = len(variant.rejected)
        style = "red" if rejected else "green"
        where = f" (first: {_place(variant.rejected[0])})" if rejected else ""
        table.add_row(
            Text.assemble(variant.name, ("\n" + variant.description, "dim")),
            f"{variant.judged} inputs",
            str(variant.changed),
            Text(f"{rejected}{where}", style=style),
        )
    return table


def _place(catch: Catch | None) -> str:
    if catch is None:
        return "-"
    return f"{catch.case}, {catch.output}, {catch.region}: {catch.wrong} elements"


def _numbers(seeds: Sequence[int]) -> str:
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds)) or "none"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
