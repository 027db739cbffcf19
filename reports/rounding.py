"""Measure the rounding tests: false alarms of the mean test, and what each layer catches.

    python reports/rounding.py                    write rounding.json and rounding.md beside this
    python reports/rounding.py --write FOLDER     write them there
    python reports/rounding.py --seeds 100        fewer draws for the false alarms

Kernels are simulated on the exact products of an operator's official inputs: a kernel is what it
does with the products of an element. First, honest ones (every scheme, and mixtures of schemes
fixed without regard to the data) are put to the mean test under many seeds. Second, faults and
honest liberties are put to all three layers: the interval of ``stored_intermediates``, the scheme
named, and the mean test. It takes about three minutes on one core.

Exit status 0: no honest kernel raised an alarm in either part.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oracle
from oracle.budget import interval
from oracle.certified import one_thread
from oracle.definition import Case, Summed
from oracle.machine import environment
from oracle.operators import find_operator
from oracle.rounding import Format, format_of, round_float64
from oracle.scheme import FALSE_ALARM, rounding_scheme

DTYPES = ("bfloat16", "float16")
HEAD_DIM = 128
OUTPUTS_TESTED = 3
CATCH_SEEDS = 5
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)

Kernel = Callable[[torch.Tensor, Format], torch.Tensor]


@dataclass(frozen=True)
class Place:
    """An output whose elements are sums.

    Attributes:
        title: what the sums are.
        operator: the operator's id.
        output: the output's name.
        terms: how many terms an element has.
        false_alarm_sizes: small sizes for many seeds.
        catch_sizes: larger ones for a few.
    """

    title: str
    operator: str
    output: str
    terms: int
    false_alarm_sizes: Mapping[str, int]
    catch_sizes: Mapping[str, int]


def _sizes(heads: int, tokens: int, **cache: int) -> dict[str, int]:
    return {
        "batch_size": 1,
        "num_kv_heads": heads,
        "new_seq_len": tokens,
        "head_dim": HEAD_DIM,
        **cache,
    }


PLACES = (
    Place(
        title="forward rotation",
        operator="kv_rope.concat.forward",
        output="updated_key_cache",
        terms=2,
        false_alarm_sizes=_sizes(1, 10, current_seq_len=0),
        catch_sizes=_sizes(8, 40, current_seq_len=0),
    ),
    Place(
        title="sum over 8 heads",
        operator="kv_rope.static.backward",
        output="grad_cos",
        terms=8,
        false_alarm_sizes=_sizes(8, 10, max_seq_len=10),
        catch_sizes=_sizes(8, 40, max_seq_len=40),
    ),
)


# Kernels: what they do with the exact products of an element, float64 [terms, elements].


def storing(*stored: int) -> Kernel:
    """Return the kernel that stores some products in the output type and adds in float32."""

    def kernel(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
        return _float32_sum(terms, fmt, stored).to(fmt.dtype)

    return kernel


def _float32_sum(terms: torch.Tensor, fmt: Format, stored: tuple[int, ...] = ()) -> torch.Tensor:
    parts = terms.to(torch.float32)
    for place in stored:
        parts[place] = parts[place].to(fmt.dtype).to(torch.float32)
    return parts.sum(dim=0)


def mixture(choice: Callable[[torch.Tensor], torch.Tensor], *kernels: Kernel) -> Kernel:
    """Return the kernel that takes one of several for each element, by the element's number."""

    def kernel(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
        chosen = choice(torch.arange(terms.shape[1]))
        values = torch.stack([one(terms, fmt) for one in kernels])
        return values.gather(0, chosen[None])[0]

    return kernel


def _alternate(ways: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda number: number % ways


def _second_half(number: torch.Tensor) -> torch.Tensor:
    return (number % HEAD_DIM) // (HEAD_DIM // 2)


def _one_in_ten(number: torch.Tensor) -> torch.Tensor:
    draws = torch.rand(number.shape, generator=torch.Generator().manual_seed(1))
    return (draws < 0.1).to(torch.int64)


def _cut(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float32 values toward zero."""
    nearest = value.to(fmt.dtype)
    bits = nearest.view(fmt.bits_dtype)
    too_large = nearest.abs().to(torch.float32) > value.abs()
    return torch.where(too_large, bits - 1, bits).view(fmt.dtype)


def truncated(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Cut off the float32 sum."""
    return _cut(_float32_sum(terms, fmt), fmt)


def truncated_after_storing(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Store all products, and cut off their float32 sum."""
    return _cut(_float32_sum(terms, fmt, tuple(range(terms.shape[0]))), fmt)


def products_truncated(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Cut off all products, and round their float32 sum."""
    products = _cut(terms.to(torch.float32), fmt).to(torch.float32)
    return products.sum(dim=0).to(fmt.dtype)


def truncated_where_allowed(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Cut off the float32 sum wherever the interval accepts that."""
    values = truncated(terms, fmt)
    accepted = interval(terms, "stored_intermediates", fmt).accepts(values)
    return torch.where(accepted, values, storing()(terms, fmt))


def ties_away(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round the float32 sum to nearest, ties away from zero."""
    total = _float32_sum(terms, fmt).to(torch.float64)
    # A part in 2^30 more settles ties, and moves no other sum of 24 bits across one.
    return round_float64(total * (1 + 2.0**-30), fmt)


def losing_small_terms(exponent: int) -> Kernel:
    """Return the kernel that drops terms below 2^exponent times the element's largest."""

    def kernel(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
        smallest = terms.abs().amax(dim=0) * 2.0**exponent
        return storing()(torch.where(terms.abs() < smallest, 0.0, terms), fmt)

    return kernel


def honest_kernels(terms: int) -> dict[str, Kernel]:
    """Return every scheme and the mixtures of schemes, by name."""
    everything = tuple(range(terms))
    kernels = {"one rounding": storing(), "all products stored": storing(*everything)}
    if terms == 2:
        kernels["first product stored"] = storing(0)
        kernels["second product stored"] = storing(1)
        four = (storing(), storing(0), storing(1), storing(0, 1))
        kernels["mixture: all four schemes in turn"] = mixture(_alternate(4), *four)
    pair = (storing(), storing(*everything))
    kernels["mixture: stored in every other element"] = mixture(_alternate(2), *pair)
    kernels["mixture: stored in the second half of a row"] = mixture(_second_half, *pair)
    kernels["mixture: stored in one element of ten"] = mixture(_one_in_ten, *pair)
    return kernels


def partly_storing_kernels(terms: int) -> dict[str, Kernel]:
    """Return honest kernels that store some heads' products: no scheme, so beyond the proof."""
    if terms == 2:
        return {}
    return {
        "products of every other head stored": storing(*range(0, terms, 2)),
        "products of one head stored": storing(0),
    }


FAULTS: dict[str, Kernel] = {
    "truncation": truncated,
    "truncation, products stored": truncated_after_storing,
    "truncation of the products": products_truncated,
    "truncation where the interval allows it": truncated_where_allowed,
    "ties away from zero": ties_away,
    "terms below 1/16 of the largest lost": losing_small_terms(-4),
    "terms below 1/64 of the largest lost": losing_small_terms(-6),
    "terms below 1/256 of the largest lost": losing_small_terms(-8),
    "terms below 1/1024 of the largest lost": losing_small_terms(-10),
}


# Measuring


@dataclass(frozen=True)
class Sums:
    """The exact products of an output's elements, and which elements share inputs."""

    terms: torch.Tensor
    clusters: torch.Tensor


def draw(place: Place, sizes: Mapping[str, int], dtype: str, seed: int) -> Sums:
    """Draw official inputs and return the products of the output's elements."""
    operator = find_operator(place.operator)
    case = Case(
        operator=place.operator,
        name="rounding",
        group="reports",
        sizes=sizes,
        kind="official",
        dtype=dtype,
        random=True,
    )
    inputs = oracle.make_inputs(case, seed)
    terms, clusters = [], []
    for block in operator.blocks(inputs, place.output, 1 << 30):
        if isinstance(block.meaning, Summed) and block.meaning.clusters is not None:
            exact = block.meaning.terms()
            numbers = block.meaning.clusters().broadcast_to(exact.shape[1:])
            terms.append(exact.reshape(place.terms, -1))
            clusters.append(numbers.reshape(-1))
    return Sums(torch.cat(terms, dim=1), torch.cat(clusters))


def false_alarms(seeds: int) -> Iterator[dict[str, Any]]:
    """Put honest kernels to the mean test under many seeds."""
    for place in PLACES:
        proved, further = honest_kernels(place.terms), partly_storing_kernels(place.terms)
        for dtype in DTYPES:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in proved | further}
            alarms = dict.fromkeys(found, 0)
            biased = dict.fromkeys(found, 0)
            clusters = 0
            for seed in range(seeds):
                _progress(f"false alarms, {place.title}, {dtype}", seed, seeds)
                sums = draw(place, place.false_alarm_sizes, dtype, seed)
                fmt = format_of(dtype)
                for name, kernel in (proved | further).items():
                    result = rounding_scheme(
                        sums.terms,
                        kernel(sums.terms, fmt),
                        fmt,
                        clusters=sums.clusters,
                        outputs_tested=OUTPUTS_TESTED,
                    )
                    mean = result.mean
                    if mean is None:
                        raise RuntimeError(f"no mean was tested of {name}, seed {seed}")
                    beyond = max(mean.low + mean.tau - mean.mean, mean.mean - mean.high + mean.tau)
                    found[name].append((round(max(0.0, beyond) / mean.tau, 6), mean.tau))
                    alarms[name] += mean.alarm
                    biased[name] += bool(result.biased)
                    clusters = mean.clusters
            for name, pairs in found.items():
                beyond_tau, taus = torch.tensor(pairs, dtype=torch.float64).T
                yield {
                    "place": place.title,
                    "dtype": dtype,
                    "kernel": name,
                    "covered_by_proof": name in proved,
                    "seeds": seeds,
                    "clusters": clusters,
                    "alarms": alarms[name],
                    "called_biased": biased[name],
                    "median_tau": _digits(float(taus.median())),
                    "beyond_schemes_over_tau": {
                        f"{quantile:g}": _digits(float(beyond_tau.quantile(quantile)))
                        for quantile in QUANTILES
                    },
                }


def catches() -> Iterator[dict[str, Any]]:
    """Put honest kernels and faults to all layers."""
    for place in PLACES:
        honest = honest_kernels(place.terms) | partly_storing_kernels(place.terms)
        for dtype in DTYPES:
            rows: dict[str, list[dict[str, Any]]] = {name: [] for name in honest | FAULTS}
            for seed in range(CATCH_SEEDS):
                _progress(f"layers, {place.title}, {dtype}", seed, CATCH_SEEDS)
                sums = draw(place, place.catch_sizes, dtype, seed)
                for name, kernel in (honest | FAULTS).items():
                    rows[name].append(_layers(sums, kernel, format_of(dtype)))
            for name, runs in rows.items():
                yield {
                    "place": place.title,
                    "dtype": dtype,
                    "kernel": name,
                    "honest": name in honest,
                    "runs": runs,
                }


def _layers(sums: Sums, kernel: Kernel, fmt: Format) -> dict[str, Any]:
    values = kernel(sums.terms, fmt)
    accepted = interval(sums.terms, "stored_intermediates", fmt).accepts(values)
    classical = interval(sums.terms, "bounded_error", fmt).accepts(values)
    result = rounding_scheme(
        sums.terms, values, fmt, clusters=sums.clusters, outputs_tested=OUTPUTS_TESTED
    )
    mean = result.mean
    if mean is None:
        raise RuntimeError("no mean was tested")
    elements = values.numel()
    return {
        "elements": elements,
        "outside_interval": elements - int(accepted.sum()),
        "outside_classical_bound": elements - int(classical.sum()),
        "scheme": result.name,
        "fewest_disagreements": min(one.disagreements for one in result.agreements),
        "mean": _digits(mean.mean),
        "low": _digits(mean.low),
        "high": _digits(mean.high),
        "clusters": mean.clusters,
        "biased": result.biased,
    }


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty() and done % 10 == 0:
        print(f"\r{what}: {done} of {total}\033[K", end="", file=sys.stderr, flush=True)


# Writing


FALSE_ALARM_COLUMNS = (
    "sums",
    "type",
    "kernel",
    "seeds",
    "alarms",
    "tau, ulp (median)",
    "beyond the schemes, tau: 99 %",
    "most",
)
CATCH_COLUMNS = (
    "sums",
    "type",
    "kernel",
    "interval",
    "classical bound",
    "scheme",
    "mean, ulp",
    "allowed",
    "caught by the mean",
)


def markdown(record: Mapping[str, Any]) -> str:
    """Return the report, a function of the record alone."""
    return "\n".join([*_false_alarm_lines(record), "", *_catch_lines(record), ""])


def _false_alarm_lines(record: Mapping[str, Any]) -> list[str]:
    rows = record["false_alarms"]
    proved = [row for row in rows if row["covered_by_proof"]]
    further = [row for row in rows if not row["covered_by_proof"]]
    tests = sum(row["seeds"] for row in proved)
    others = sum(row["seeds"] for row in further)
    clusters = rows[0]["clusters"]
    hoeffding = 4 * math.sqrt(math.log(2 * OUTPUTS_TESTED / FALSE_ALARM) / (2 * clusters))
    lines = [
        "# Rounding: false alarms, and what each layer catches",
        "",
        "Written by `python reports/rounding.py`; the raw figures are in `rounding.json`.",
        "Kernels are simulated on the exact products of official inputs.",
        "",
        "## False alarms of the mean test",
        "",
        f"{tests:,} tests of honest kernels, each on {clusters} clusters:",
        f"**{sum(row['alarms'] for row in proved)} alarms**.",
        "A kernel whose mean lies between those of the schemes is 0 tau beyond them; an alarm is",
        "more than 1 tau. Hoeffding's inequality for the same comparison would need a tau of",
        f"{hoeffding:.3f} ulp.",
        "",
        f"{others:,} tests of kernels that store the products of some heads only, which the",
        "schemes (none, all) do not include and the proof does not cover:",
        f"**{sum(row['alarms'] for row in further)} alarms**.",
        "",
        f"| {' | '.join(FALSE_ALARM_COLUMNS)} |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        beyond = row["beyond_schemes_over_tau"]
        lines.append(
            f"| {row['place']} | {row['dtype']} | {row['kernel']} | {row['seeds']:,} |"
            f" {row['alarms']} | {row['median_tau']:.3f} | {beyond['0.99']:.2f} |"
            f" {beyond['1']:.2f} |"
        )
    return lines


def _catch_lines(record: Mapping[str, Any]) -> list[str]:
    first = record["catches"][0]["runs"]
    lines = [
        "## What each layer catches",
        "",
        f"{len(first)} seeds each, {first[0]['clusters']:,} clusters.",
        "",
        "- *Interval*: elements outside `stored_intermediates`; one is enough to reject a kernel.",
        "- *Classical bound*: elements outside `bounded_error`, for comparison.",
        "- *Scheme*: its name, or the share of elements that disagree with the nearest one. To",
        "  have no name is no fault, as mixtures are honest.",
        "- *Mean*: of the first seed, with what it may be, and in how many runs it was caught. It",
        "  is judged only where no scheme explains the kernel.",
        "",
        f"| {' | '.join(CATCH_COLUMNS)} |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    for row in record["catches"]:
        runs = row["runs"]
        elements = sum(run["elements"] for run in runs)
        shares = [
            _share(sum(run[key] for run in runs), elements)
            for key in ("outside_interval", "outside_classical_bound", "fewest_disagreements")
        ]
        names = sorted({run["scheme"] or f"none ({shares[2]})" for run in runs})
        caught = sum(run["biased"] is True for run in runs)
        kind = "honest: " if row["honest"] else ""
        lines.append(
            f"| {row['place']} | {row['dtype']} | {kind}{row['kernel']} | {shares[0]} |"
            f" {shares[1]} | {' / '.join(names)} | {runs[0]['mean']:+.3f} |"
            f" {runs[0]['low']:+.3f} to {runs[0]['high']:+.3f} | {caught} of {len(runs)} |"
        )
    return lines


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.3g} %" if count else "0"


def main() -> int:
    """Measure, write, and return 0 if no honest kernel raised an alarm."""
    parser = argparse.ArgumentParser(description="False alarms and catches of the rounding tests.")
    parser.add_argument("--write", metavar="FOLDER", default=str(Path(__file__).parent))
    parser.add_argument("--seeds", type=int, default=2000, help="draws for the false alarms")
    arguments = parser.parse_args()
    with one_thread():
        record: dict[str, Any] = {
            "environment": environment(),
            "outputs_tested": OUTPUTS_TESTED,
            "false_alarm_probability": FALSE_ALARM,
            "false_alarms": list(false_alarms(arguments.seeds)),
            "catches": list(catches()),
        }
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    folder = Path(arguments.write)
    (folder / "rounding.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "rounding.md").write_text(markdown(record), encoding="utf-8")
    alarms = sum(row["alarms"] for row in record["false_alarms"])
    caught = sum(
        run["outside_interval"] > 0 or run["biased"] is True
        for row in record["catches"]
        if row["honest"]
        for run in row["runs"]
    )
    return 0 if alarms == 0 and caught == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
