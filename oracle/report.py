"""What a person reads: verdicts, operators and machines, as rich renderables and plain text.

All functions are pure: they take data and return something to print. Text that comes from a
candidate (its output, its error messages, its path) is shown with control characters escaped and
is never read as markup.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .definition import Axis, Case, Operator, TensorSpec, Variant
from .verdict import STATUSES, CaseResult, Diagnosis, Element, RegionResult, Verdict, loosest

DEFAULT_CONTRACT = "stored_intermediates"
"""The contract that a candidate must meet where none is asked for."""

NOT_ON_A_GPU = "not run on a GPU"

_MOST_CASES = 6
_MOST_REMARKS = 6
_MOST_OUTPUT_LINES = 8
_NONE = "-"


def to_text(renderable: RenderableType, width: int = 100) -> str:
    """Render as plain text without colours or escape sequences, ``width`` columns wide.

    Commands to copy are never broken into lines and may be wider.
    """
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False, markup=False)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def verdict_view(verdict: Verdict, verbose: bool = False) -> Group:
    """Show a verdict on one screen: its status, the cases by group, and the first failure.

    Args:
        verdict: what to show.
        verbose: list every case, region, remark and line of output instead of the first few.
    """
    parts: list[RenderableType] = [_heading(verdict), _facts(verdict)]
    if verdict.cases:
        parts += [Text(), _groups(verdict)]
    failed = [case for case in verdict.cases if _has_failed(case)]
    shown = list(verdict.cases) if verbose else failed[:_MOST_CASES]
    # A single failure is told in full below.
    if shown and (verbose or len(failed) > 1):
        parts += [Text(), cases_table(shown)]
        if len(failed) > _MOST_CASES and not verbose:
            parts.append(Text(f"and {len(failed) - _MOST_CASES} more failed; --verbose shows all"))
    failure = verdict.first_failure
    if failure is not None:
        parts += [Text(), failure_view(failure, verdict.contract, verbose)]
    elif verdict.detail:
        parts += [Text(), _foreign(verdict.detail)]
    if verdict.diagnosis is not None:
        parts += [Text(), _diagnosis(verdict.diagnosis)]
    if verdict.claim:
        parts += [Text(), Text.assemble(("Claim: ", "bold"), verdict.claim)]
    parts += [Text(), _totals(verdict), *_remarks(verdict, verbose)]
    if verdict.reproduce:
        parts.append(_command(verdict.reproduce))
    return Group(*parts)


def _diagnosis(diagnosis: Diagnosis) -> Group:
    """Show which known fault it is, what that does, and the evidence."""
    name = Text("Diagnosis: ", style="bold")
    if diagnosis.name:
        name.append("matches ").append(diagnosis.name, style="bold red")
    else:
        name.append("matches no known fault")
    grid = _grid()
    if diagnosis.description:
        grid.add_row("fault", Text(diagnosis.description))
    grid.add_row("evidence", Text(diagnosis.evidence))
    return Group(name, Padding(grid, (0, 0, 0, 2)))


def refusal_line(verdict: Verdict) -> Text:
    """Say in one line why nothing was judged."""
    status = _status(verdict.status, verdict.violation)
    return Text.assemble(f"{status}: ", _foreign(verdict.detail or "no element was compared"))


def cases_table(cases: Sequence[CaseResult]) -> Group:
    """List cases: name, sizes, status, grade, elements, certified, worst error, seconds."""
    varying, _ = _axes_by_variation(cases)
    graded = any(case.grade is not None for case in cases)
    table = _table()
    table.add_column("case", no_wrap=True)
    table.add_column("sizes", overflow="fold")
    table.add_column("status", no_wrap=True)
    if graded:
        table.add_column("grade", overflow="fold")
    _add_number_columns(table)
    for case in cases:
        table.add_row(
            _foreign(case.name),
            _sizes(case, varying),
            Text(_status(case.status, case.violation), style=_style(case.status)),
            *([case.grade or _NONE] if graded else []),
            f"{case.elements:,}",
            f"{case.certified:,}",
            _ulp(_worst(case)),
            f"{case.seconds:.2f}",
        )
    return Group(table, _sizes_note(cases))


def failure_view(case: CaseResult, contract: str, verbose: bool = False) -> Group:
    """Show one failed case: what it exposes, the first wrong element, the regions, the output."""
    title = Text.assemble(("First failure: ", "bold"), "case ", (case.name, "bold"))
    title.append(f" of {case.group}: ")
    title.append(_status(case.status, case.violation), style=_style(case.status))
    parts: list[RenderableType] = [title]
    grid = _grid()
    if case.exposes:
        grid.add_row("exposes", Text(case.exposes))
    grid.add_row("sizes", Text(" ".join(f"{axis}={size}" for axis, size in case.sizes.items())))
    if case.detail:
        grid.add_row("what", _foreign(case.detail))
    found = case.first_wrong
    if found is not None:
        for name, value in _evidence(*found, contract):
            grid.add_row(name, value)
    parts.append(Padding(grid, (0, 0, 0, 2)))
    if case.regions:
        parts += _regions(case.regions, verbose)
    if case.output_text:
        parts += _output(case.output_text, verbose)
    return Group(*parts)


def operators_table(operators: Iterable[Operator]) -> Table:
    """List operators with their probes and suites by name."""
    table = _table(show_lines=True)
    table.add_column("operator", overflow="fold")
    table.add_column("cases", overflow="fold")
    for operator in operators:
        dtypes = ", ".join(operator.dtypes)
        table.add_row(
            Text.assemble((operator.id, "bold"), f"\n{operator.title}\n{dtypes}"),
            Text("\n").join(
                Text.assemble((f"{group}", "bold"), f" ({len(cases)}): ", ", ".join(cases))
                for group, cases in _case_names(operator).items()
            ),
        )
    return table


def operator_page(operator: Operator) -> Group:
    """Show all of an operator: meaning, axes, tensors, contracts, probes and suites."""
    constants = " ".join(f"{axis}={size}" for axis, size in operator.official.items())
    parts: list[RenderableType] = [
        Text.assemble((operator.id, "bold"), f": {operator.title}"),
        Text(f"source: {operator.source}"),
        Text(f"dtypes: {', '.join(operator.dtypes)}; domain official: {constants}"),
        Text(),
        Padding(Text(operator.formula.strip("\n")), (0, 0, 0, 2)),
        *_section("Axes", _axes_table(operator.axes)),
        *_section("Inputs, in call order", _tensors_table(operator.inputs)),
        *_section("Outputs, in the order returned", _tensors_table(operator.outputs)),
        *_section("Numeric contracts, the tightest first", _contracts_table()),
    ]
    if operator.variety or operator.constraints or operator.inplace:
        parts += _section("The general domain, and what may be claimed", _claims_grid(operator))
    if operator.probes:
        parts += _section("Probes", _probes_table(operator.probes))
    if operator.general_probes:
        title = "Probes of the general domain, where all are tried in every dtype and size"
        parts += _section(title, _probes_table(operator.general_probes))
    if operator.large:
        parts += _section("Large cases, for a GPU", _probes_table(operator.large))
    for suite in operator.suites:
        title = f"Suite {suite.id} ({suite.source})"
        parts += _section(title, _suite_table(suite.cases))
    if operator.variants:
        title = "Known variants: faults that a diagnosis names, and legal liberties"
        parts += _section(title, _variants_table(operator.variants))
    return Group(*parts)


def _claims_grid(operator: Operator) -> Table:
    grid = _grid()
    for axis, sizes in operator.variety.items():
        grid.add_row(
            axis, "tried at " + ", ".join(map(str, sorted({*sizes, operator.official[axis]})))
        )
    grid.add_row("dtype", ", ".join(operator.dtypes))
    grid.add_row("layout=contiguous", "all inputs are contiguous")
    for name, constraint in operator.constraints.items():
        grid.add_row(name, Text(constraint.description))
    if operator.inplace:
        pairs = ", ".join(f"{source} -> {target}" for source, target in operator.inplace)
        grid.add_row("style inplace", f"writes {pairs}")
    return grid


def _variants_table(variants: Sequence[Variant]) -> Table:
    table = _table()
    for name in ("variant", "", "what it does"):
        table.add_column(name, overflow="fold")
    for variant in variants:
        table.add_row(variant.name, "legal" if variant.legal else "wrong", variant.description)
    return table


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Show a machine as :func:`oracle.machine.environment` describes it."""
    grid = _grid()
    for name, value in environment.items():
        if name == "gpus":
            for number, gpu in enumerate(value):
                grid.add_row(f"gpu {number}", _gpu(gpu))
            if not value:
                grid.add_row("gpus", "none")
        else:
            grid.add_row(name, Text(_plain_value(value)))
    return grid


def operator_summary(operator: Operator) -> dict[str, Any]:
    """Return an operator's id, title, dtypes and case names by group, as plain JSON data."""
    return {
        "id": operator.id,
        "title": operator.title,
        "dtypes": list(operator.dtypes),
        "cases": _case_names(operator),
    }


def operator_data(operator: Operator) -> dict[str, Any]:
    """Return all that :func:`operator_page` shows, as plain JSON data."""
    return {
        "id": operator.id,
        "title": operator.title,
        "formula": operator.formula,
        "source": operator.source,
        "dtypes": list(operator.dtypes),
        "official": dict(operator.official),
        "axes": [
            {
                "name": axis.name,
                "description": axis.description,
                "minimum": axis.minimum,
                "multiple_of": axis.multiple_of,
                "sum_of": list(axis.sum_of),
            }
            for axis in operator.axes
        ],
        "inputs": [_tensor_data(spec) for spec in operator.inputs],
        "outputs": [_tensor_data(spec) for spec in operator.outputs],
        "contracts": _contracts(),
        "default_contract": DEFAULT_CONTRACT,
        "variety": {axis: list(sizes) for axis, sizes in operator.variety.items()},
        "constraints": {name: one.description for name, one in operator.constraints.items()},
        "inplace": [list(pair) for pair in operator.inplace],
        "variants": [
            {"name": one.name, "description": one.description, "legal": one.legal}
            for one in operator.variants
        ],
        "probes": [_case_data(case) for case in operator.probes],
        "general_probes": [_case_data(case) for case in operator.general_probes],
        "large": [_case_data(case) for case in operator.large],
        "suites": [
            {
                "id": suite.id,
                "source": suite.source,
                "published": dict(suite.published),
                "cases": [_case_data(case) for case in suite.cases],
            }
            for suite in operator.suites
        ],
    }


def _heading(verdict: Verdict) -> Text:
    status = _status(verdict.status, verdict.violation)
    if verdict.interrupted:
        head, style = f"INTERRUPTED, {status} so far", "bold yellow"
    elif verdict.passed:
        head, style = f"PASSED{_not_run(verdict)}", "bold green"
    elif verdict.exit_status == 1:
        head, style = f"FAILED: {status}", "bold red"
    else:
        head, style = f"NOT JUDGED: {status}", "bold yellow"
    return Text.assemble((head, style), "  ", (verdict.operator, "bold"))


def _not_run(verdict: Verdict) -> str:
    skipped = sum(case.status == "not_run" for case in verdict.cases)
    return f", {skipped} of {len(verdict.cases)} cases not run" if skipped else ""


def _facts(verdict: Verdict) -> Padding:
    device = verdict.device
    if device != "cuda":
        device = f"{device} ({NOT_ON_A_GPU})"
    grid = _grid()
    grid.add_row("candidate", _foreign(verdict.candidate))
    grid.add_row("device", device)
    grid.add_row(
        "asked", f"contract {verdict.contract}, domain {verdict.domain}, style {verdict.style}"
    )
    grid.add_row("seed", str(verdict.seed))
    if verdict.grade is not None:
        grid.add_row("grade", Text(verdict.grade, style="bold"))
        for scheme in dict.fromkeys(verdict.rounding.values()):
            outputs = [name for name, own in verdict.rounding.items() if own == scheme]
            grid.add_row("rounding", f"{', '.join(outputs)}: {scheme}")
    return Padding(grid, (0, 0, 0, 2))


def _groups(verdict: Verdict) -> Table:
    table = _table()
    table.add_column("cases", overflow="fold")
    table.add_column("outcome", overflow="fold")
    table.add_column("grade", no_wrap=True)
    _add_number_columns(table)
    for group in dict.fromkeys(case.group for case in verdict.cases):
        cases = [case for case in verdict.cases if case.group == group]
        counts = Counter(case.status for case in cases)
        outcome = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        judged = [case for case in cases if case.status not in ("empty_ok", "not_run")]
        table.add_row(
            group,
            Text(outcome, style=_style(min(counts, key=STATUSES.index))),
            loosest([case.grade for case in judged]) or _NONE,
            f"{sum(case.elements for case in cases):,}",
            f"{sum(case.certified for case in cases):,}",
            _ulp(_largest(_worst(case) for case in cases)),
            f"{sum(case.seconds for case in cases):.1f}",
        )
    return table


def _totals(verdict: Verdict) -> Text:
    outside = sum(r.out_of_domain for case in verdict.cases for r in case.regions)
    if not verdict.elements:
        return Text(f"no element was compared; {verdict.seconds:.1f} s")
    text = Text(f"{verdict.certified:,} of {verdict.elements:,} elements certified")
    text.append(" (their correctly rounded answer is proved)")
    if outside:
        text.append(f", {outside:,} outside the domain of the contract")
    text.append(f"; {verdict.seconds:.1f} s")
    return text


def _evidence(region: RegionResult, element: Element, contract: str) -> list[tuple[str, Text]]:
    place = ", ".join(str(i) for i in element.index)
    rows = [
        ("where", Text(f"{region.output}[{place}], region {region.region}, first of those wrong")),
        ("got", Text(f"{element.got} ({element.got_bits})", style="red")),
        ("expected", Text(f"{element.expected} ({element.expected_bits})", style="green")),
    ]
    if element.exact:
        rows.append(("exact", Text(element.exact)))
    if element.error_ulp is not None:
        rows.append(("error", Text(f"{element.error_ulp:+.6g} ulp")))
    rows.append(("allowed", Text(_allowed(region, element, contract))))
    return rows


def _allowed(region: RegionResult, element: Element, contract: str) -> str:
    if region.meaning == "copied":
        return "only the expected bits, as the element is a copy"
    if region.meaning == "zeroed":
        return "only zero"
    if not element.low:
        return "only the expected infinity or NaN, as a term is not finite"
    return f"{element.low} to {element.high} under {contract}"


def _regions(regions: Sequence[RegionResult], verbose: bool) -> list[RenderableType]:
    wrong = [region for region in regions if not region.passed]
    shown = regions if verbose else wrong
    rest = len(regions) - len(shown)
    parts: list[RenderableType] = []
    if shown:
        table = _table()
        table.add_column("output", overflow="fold")
        table.add_column("region", overflow="fold")
        for name in ("outside", "elements", "correctly rounded", "worst ulp"):
            table.add_column(name, justify="right")
        for region in shown:
            outside = region.elements - region.within
            table.add_row(
                region.output,
                region.region,
                Text(f"{outside:,}", style="red" if outside else ""),
                f"{region.elements:,}",
                f"{region.identical:,}",
                _ulp(region.worst_error_ulp),
            )
        parts.append(Padding(table, (0, 0, 0, 2)))
    if rest:
        other = "other regions" if shown else "regions"
        parts.append(Text(f"  {rest} {other}: every element is allowed"))
    return parts


def _output(output: str, verbose: bool) -> list[RenderableType]:
    lines = output.rstrip("\n").splitlines()
    shown = lines if verbose else lines[-_MOST_OUTPUT_LINES:]
    dropped = len(lines) - len(shown)
    note = f" (the last {len(shown)} of {len(lines)} lines)" if dropped else ""
    return [
        Text(f"  the candidate printed{note}:"),
        Padding(_foreign("\n".join(shown)), (0, 0, 0, 4)),
    ]


def _remarks(verdict: Verdict, verbose: bool) -> list[RenderableType]:
    """Gather the remarks of the run and of the cases, equal ones on one line."""
    of_cases: dict[str, list[str]] = {}
    for case in verdict.cases:
        for remark in case.remarks:
            of_cases.setdefault(remark, []).append(case.name)
    lines = list(verdict.remarks)
    for remark, names in of_cases.items():
        more = f" and {len(names) - 1} more cases" if len(names) > 1 else ""
        lines.append(f"{names[0]}{more}: {remark}")
    shown = lines if verbose else lines[:_MOST_REMARKS]
    parts: list[RenderableType] = [_hanging("remark: ", _foreign(line)) for line in shown]
    if len(lines) > len(shown):
        rest = len(lines) - len(shown)
        parts.append(Text(f"and {rest} more remarks; --verbose shows all"))
    return parts


def _command(command: str) -> Text:
    """Return a command on one line, however long, so that it can be copied from a terminal."""
    text = Text.assemble("reproduce: ", _foreign(command))
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _axes_table(axes: Sequence[Axis]) -> Table:
    table = _table()
    for name in ("axis", "size", "what it counts"):
        table.add_column(name, overflow="fold")
    for axis in axes:
        size = " + ".join(axis.sum_of) if axis.sum_of else f"at least {axis.minimum}"
        if axis.multiple_of > 1:
            size += f", a multiple of {axis.multiple_of}"
        table.add_row(axis.name, size, axis.description)
    return table


def _tensors_table(specs: Sequence[TensorSpec]) -> Table:
    table = _table()
    regions = any(spec.regions for spec in specs)
    columns = ("tensor", "shape", "what it holds", *(("regions",) if regions else ()))
    for name in columns:
        table.add_column(name, overflow="fold")
    for spec in specs:
        shape = f"[{', '.join(spec.axes)}]"
        if spec.indexes is not None:
            shape += " int64"
        what = spec.description
        if spec.may_broadcast:
            what += f" ({', '.join(spec.may_broadcast)} may be 1)"
        cells = [Text(spec.name), Text(shape), Text(what)]
        table.add_row(*cells, *((Text(", ".join(spec.regions)),) if regions else ()))
    return table


def _contracts() -> dict[str, str]:
    """Return every numeric contract and what it allows, the tightest first."""
    from .budget import CONTRACTS

    exact = "bit-identical: what copied regions must always meet, and zeroed ones but for the sign"
    return {"exact": exact} | {str(name): meaning for name, meaning in CONTRACTS.items()}


def _contracts_table() -> Table:
    table = _table()
    table.add_column("contract", no_wrap=True)
    table.add_column("what an implementation may do", overflow="fold")
    for name, meaning in _contracts().items():
        table.add_row(name, meaning + (" (the default)" if name == DEFAULT_CONTRACT else ""))
    return table


def _probes_table(probes: Sequence[Case]) -> Group:
    varying, _ = _axes_by_variation(probes)
    table = _table()
    for name in ("probe", "sizes", "exposes"):
        table.add_column(name, overflow="fold")
    for case in probes:
        table.add_row(case.name, _sizes(case, varying), Text(case.exposes))
    return Group(table, _sizes_note(probes))


def _suite_table(cases: Sequence[Case]) -> Group:
    varying, _ = _axes_by_variation(cases)
    table = _table()
    table.add_column("case", overflow="fold")
    table.add_column("sizes", overflow="fold")
    for case in cases:
        table.add_row(case.name, _sizes(case, varying))
    return Group(table, _sizes_note(cases))


def _sizes(case: Case | CaseResult, axes: Sequence[str]) -> str:
    return " × ".join(str(case.sizes[axis]) for axis in axes) or _NONE


def _sizes_note(cases: Sequence[Case] | Sequence[CaseResult]) -> Text:
    """Say which axes the sizes in a table are of, and what is the same in all of its rows."""
    varying, constant = _axes_by_variation(cases)
    named = [" × ".join(varying)] if varying else []
    fixed = [" ".join(f"{axis}={cases[0].sizes[axis]}" for axis in constant)] if constant else []
    return Text("sizes: " + "; all with ".join(named + fixed), style="dim")


def _axes_by_variation(
    cases: Sequence[Case] | Sequence[CaseResult],
) -> tuple[list[str], list[str]]:
    """Split the axes into those whose size differs between cases and those it does not.

    Of a single case, all axes vary, so that its sizes are shown where they are looked for.
    """
    axes = list(cases[0].sizes)
    if len(cases) == 1:
        return axes, []
    constant = [axis for axis in axes if len({case.sizes.get(axis) for case in cases}) == 1]
    return [axis for axis in axes if axis not in constant], constant


def _case_names(operator: Operator) -> dict[str, list[str]]:
    names = {"probes": [case.name for case in operator.probes]}
    names |= {suite.id: [case.name for case in suite.cases] for suite in operator.suites}
    if operator.large:
        names["large"] = [case.name for case in operator.large]
    return names


def _tensor_data(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "axes": list(spec.axes),
        "description": spec.description,
        "may_broadcast": list(spec.may_broadcast),
        "indexes": spec.indexes,
        "regions": list(spec.regions),
    }


def _case_data(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "sizes": dict(case.sizes),
        "dtype": case.dtype,
        "exposes": case.exposes,
        "published": dict(case.published),
    }


def _has_failed(case: CaseResult) -> bool:
    return case.status not in ("passed", "empty_ok", "not_run")


def _status(status: str, violation: str) -> str:
    return f"{status} ({violation})" if violation else status


def _style(status: str) -> str:
    if status in ("passed", "empty_ok"):
        return "green"
    return "yellow" if status in ("not_run", "nothing_compared", "judge_error") else "red"


def _worst(case: CaseResult) -> float | None:
    return _largest(region.worst_error_ulp for region in case.regions)


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the value of largest magnitude; None where there is none."""
    return max((value for value in values if value is not None), key=abs, default=None)


def _ulp(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"


def _gpu(gpu: Mapping[str, Any]) -> Text:
    return Text(
        f"{gpu['name']}, {gpu['memory_GiB']} GiB, compute capability {gpu['compute_capability']},"
        f" driver {_plain_value(gpu['driver'])}"
    )


def _plain_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _foreign(text: str) -> Text:
    """Return text from outside with every control character but newlines and tabs escaped.

    A candidate could otherwise move the cursor and repaint the verdict.
    """
    safe = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return Text(safe, overflow="fold")


def _hanging(label: str, text: Text) -> Table:
    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(label, text)
    return grid


def _section(title: str, table: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), table]


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    return grid


def _add_number_columns(table: Table) -> None:
    for name in ("elements", "certified", "worst ulp", "s"):
        table.add_column(name, justify="right", no_wrap=True)


def _table(show_lines: bool = False) -> Table:
    return Table(
        box=HORIZONTALS if show_lines else None,
        show_lines=show_lines,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="dim",
    )
