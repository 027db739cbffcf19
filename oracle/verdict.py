"""The verdict: a status with evidence, to and from JSON.

The precedence of statuses (:data:`STATUSES`) is part of the contract: a verification has the
status of its gravest case, and a case the first that applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

STATUSES: tuple[str, ...] = (
    "judge_error",
    "bad_candidate",
    "crashed",
    "timed_out",
    "out_of_memory",
    "call_violation",
    "wrong_shape",
    "wrong_dtype",
    "wrong_device",
    "wrong_layout",
    "wrong_values",
    "below_contract",
    "nothing_compared",
    "passed",
    "empty_ok",
    "not_run",
)
"""Statuses, gravest first. ``empty_ok`` and ``not_run`` are statuses of cases only."""

EXIT_STATUS: Mapping[str, int] = {
    "passed": 0,
    "nothing_compared": 2,
    "bad_candidate": 2,
    "judge_error": 3,
}
"""Exit status of the command line for a status; all others exit with 1."""

GRADES: tuple[str, ...] = (
    "exact",
    "correctly_rounded",
    "single_rounding",
    "stored_intermediates",
    "bounded_error",
)
"""Numeric contracts, the tightest first. A grade is the tightest contract that is met."""


class VerificationFailed(AssertionError):
    """Raised by :meth:`Verdict.raise_for_failure`; the text is the verdict's summary."""


@dataclass(frozen=True)
class Element:
    """One output element as evidence.

    Attributes:
        index: its index in the output.
        got: the value returned, as shortest text that reads back exactly, or inf, -inf, nan.
        got_bits: its bit pattern in hexadecimal.
        expected: the correctly rounded value, written alike.
        expected_bits: its bit pattern in hexadecimal.
        exact: the exact value before rounding, to 17 digits; empty where bits were compared.
        error_ulp: (got - exact) in units in the last place of the expected value; None where
            one of them is not finite.
        low: the smallest value the contract accepts; empty where bits were compared.
        high: the largest value the contract accepts.
    """

    index: tuple[int, ...]
    got: str
    got_bits: str
    expected: str
    expected_bits: str
    exact: str = ""
    error_ulp: float | None = None
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class MeanTest:
    """The mean rounding error of a kernel beside that of the schemes on the same data, in ulp.

    Attributes:
        mean: the kernel's mean score T(Z).
        low: the lowest mean that is no alarm, tau included.
        high: the highest one.
        tau: what a mean may lie beyond those of the schemes by chance.
        clusters: over how many independent clusters the means are taken.
    """

    mean: float
    low: float
    high: float
    tau: float
    clusters: int

    @property
    def alarm(self) -> bool:
        """Whether the mean is outside its bounds."""
        return not self.low <= self.mean <= self.high


@dataclass(frozen=True)
class Diagnosis:
    """What is known about the fault of a candidate.

    Attributes:
        name: the variant that explains it, several joined by " + " where outputs have different
            faults; empty where no variant does.
        description: what the variants do, a sentence each; empty without a name.
        evidence: one to three sentences: how well the variant fits, and where the wrong elements
            are.
    """

    name: str
    description: str
    evidence: str

    def sentence(self) -> str:
        """Say it in one paragraph."""
        named = (
            f"matches: {self.name}. {self.description}" if self.name else "matches no known fault"
        )
        return f"{named.rstrip('.')}. {self.evidence}".strip()


@dataclass(frozen=True)
class RegionResult:
    """How one region of one output compared.

    Attributes:
        output: the output's name.
        region: the region's name.
        meaning: ``copied``, ``zeroed`` or ``computed``.
        elements: how many elements the region has.
        within: how many lie in the interval of the contract asked for; all are required.
        identical: how many equal the correctly rounded answer: bits for copied and zeroed
            elements, numbers for computed ones, where the sign of a zero is free.
        certified: how many elements' correctly rounded answer is proved.
        grade: the tightest contract all elements meet; None if they meet none.
        worst_error_ulp: the largest finite error in ulp among computed elements that differ from
            the correctly rounded answer; None where there is none.
        out_of_domain: how many elements lie outside the domain of the contract asked for.
        first_wrong: the first element, in index order, outside its interval.
        scheme: of computed elements within the contract, the rounding scheme that explains all of
            them, in plain words; empty where none does, or it was not looked for.
        mean: where no scheme explains independent random elements, their mean rounding error
            beside those of the schemes.
    """

    output: str
    region: str
    meaning: str
    elements: int
    within: int
    identical: int
    certified: int
    grade: str | None
    worst_error_ulp: float | None = None
    out_of_domain: int = 0
    first_wrong: Element | None = None
    scheme: str = ""
    mean: MeanTest | None = None

    @property
    def passed(self) -> bool:
        """Whether all elements are allowed, and their mean error is one honest kernels have."""
        return self.within == self.elements and not self.biased

    @property
    def biased(self) -> bool:
        """Whether the elements are allowed one by one, but not their mean error."""
        return self.within == self.elements and self.mean is not None and self.mean.alarm


@dataclass(frozen=True)
class CaseResult:
    """What became of one case.

    Attributes:
        name: the case's name.
        group: its suite's id or ``"probes"``.
        sizes: sizes of the free axes.
        exposes: what a probe is made to expose.
        status: one of :data:`STATUSES`.
        violation: for ``call_violation``, which rule was broken.
        detail: one or two sentences on what is wrong; empty when passed.
        grade: the tightest contract met by every element; None unless passed.
        elements: how many output elements were compared.
        certified: how many of them have a proved correctly rounded answer.
        regions: the comparison by output and region.
        remarks: what is worth knowing and not judged.
        output_text: what the candidate printed, shortened.
        seconds: wall time of the whole case.
        call_seconds: wall time of the candidate's first call, as its process measured it.
    """

    name: str
    group: str
    sizes: Mapping[str, int]
    exposes: str
    status: str
    violation: str = ""
    detail: str = ""
    grade: str | None = None
    elements: int = 0
    certified: int = 0
    regions: tuple[RegionResult, ...] = ()
    remarks: tuple[str, ...] = ()
    output_text: str = ""
    seconds: float = 0.0
    call_seconds: float | None = None

    @property
    def first_wrong(self) -> tuple[RegionResult, Element] | None:
        """The first wrong element and its region, in output order; None where all are right."""
        for region in self.regions:
            if region.first_wrong is not None:
                return min(
                    (
                        (other, other.first_wrong)
                        for other in self.regions
                        if other.output == region.output and other.first_wrong is not None
                    ),
                    key=lambda pair: pair[1].index,
                )
        return None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification.

    Attributes:
        operator: the operator's id.
        candidate: the candidate as it was named.
        status: the gravest status of its cases, see :data:`STATUSES`.
        violation: for ``call_violation``, which rule was broken first.
        detail: one or two sentences on the first failure; empty when passed.
        grade: the tightest contract that every element of every case meets; None unless passed.
        contract: the contract asked for.
        domain: the domain of the cases.
        style: the calling style.
        device: the device the candidate ran on.
        seed: the seed of the inputs.
        cases: every case asked for, in the order judged.
        remarks: what is worth knowing about the run as a whole.
        environment: the machine and the versions.
        diagnosis: which fault it is, where wrong values were diagnosed.
        claim: in the general domain, under which claims the candidate meets the contract though it
            fails without them, as a sentence; empty where there are none.
        reproduce: the command that repeats the first failure, or the whole run when it passed.
        seconds: wall time.
        interrupted: whether the run was stopped before all cases were judged.
        schema_version: of this record.
    """

    operator: str
    candidate: str
    status: str
    violation: str
    detail: str
    grade: str | None
    contract: str
    domain: str
    style: str
    device: str
    seed: int
    cases: tuple[CaseResult, ...]
    remarks: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    claim: str = ""
    reproduce: str = ""
    seconds: float = 0.0
    interrupted: bool = False
    schema_version: int = SCHEMA_VERSION

    @property
    def passed(self) -> bool:
        """Whether the candidate meets the contract on everything that was asked for."""
        return self.status == "passed" and not self.interrupted

    @property
    def exit_status(self) -> int:
        """The command line's exit status for this verdict."""
        return 130 if self.interrupted else EXIT_STATUS.get(self.status, 1)

    @property
    def elements(self) -> int:
        """How many output elements were compared."""
        return sum(case.elements for case in self.cases)

    @property
    def certified(self) -> int:
        """How many of them have a proved correctly rounded answer."""
        return sum(case.certified for case in self.cases)

    @property
    def rounding(self) -> dict[str, str]:
        """The rounding scheme behind each computed output, by name, where one explains all cases.

        An output that is correctly rounded in some cases, or needs nothing but one rounding, may
        still store products: these cases say nothing where others say more.
        """
        found: dict[str, list[set[str]]] = {}
        plain: dict[str, str] = {}
        for case in self.cases:
            for region in case.regions:
                if region.grade == "correctly_rounded":
                    plain.setdefault(region.output, region.scheme)
                elif region.grade == "single_rounding":
                    plain[region.output] = region.scheme
                elif region.meaning == "computed":
                    found.setdefault(region.output, []).append(set(region.scheme.split(" or ")))
        common = {output: set.intersection(*names) for output, names in found.items()}
        told = {output: " or ".join(sorted(names)) for output, names in common.items()}
        return {output: name for output, name in (plain | told).items() if name}

    @property
    def first_failure(self) -> CaseResult | None:
        """The first case, in the order judged, of the verdict's status; None when passed."""
        if self.status in ("passed", "nothing_compared"):
            return None
        return next((case for case in self.cases if case.status == self.status), None)

    def raise_for_failure(self) -> None:
        """Do nothing when passed.

        Raises:
            VerificationFailed: with the summary of what failed.
        """
        if not self.passed:
            raise VerificationFailed(self.summary())

    def summary(self) -> str:
        """Say the outcome in a few plain lines."""
        kind = f" ({self.violation})" if self.violation else ""
        head = f"{self.operator}: {self.candidate}: {self.status}{kind} on {self.device}"
        if self.passed:
            return (
                f"{head}, grade {self.grade}, {self.elements} elements in {len(self.cases)} cases"
            )
        lines = [head]
        if self.interrupted:
            lines.append("interrupted before all cases were judged")
        if self.detail:
            lines.append(self.detail)
        if self.diagnosis is not None:
            lines.append(self.diagnosis.sentence())
        if self.claim:
            lines.append(self.claim)
        if self.reproduce:
            lines.append(f"reproduce: {self.reproduce}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data fit for JSON: no NaN, no infinity, no tuples.

        Beside the fields there are ``passed`` and the totals ``elements`` and ``certified``.
        """
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: if the record has another schema version.
        """
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"this verdict has schema version {data.get('schema_version')!r}; this release"
                f" reads version {SCHEMA_VERSION}"
            )
        fields = {key: value for key, value in data.items() if key not in _DERIVED}
        fields["cases"] = tuple(_case_from_dict(case) for case in data["cases"])
        fields["remarks"] = tuple(data["remarks"])
        if data["diagnosis"] is not None:
            fields["diagnosis"] = Diagnosis(**data["diagnosis"])
        return cls(**fields)


_DERIVED = ("passed", "elements", "certified")
"""What a record says beside the fields of the verdict."""


def gravest(statuses: list[str]) -> str:
    """Return the gravest status, or ``nothing_compared`` where nothing was judged."""
    judged = [status for status in statuses if status not in ("empty_ok", "not_run")]
    return min(judged, key=STATUSES.index) if judged else "nothing_compared"


def loosest(grades: list[str | None]) -> str | None:
    """Return the loosest grade; None if the list is empty or one of them is None."""
    if not grades or any(grade is None for grade in grades):
        return None
    return max((grade for grade in grades if grade is not None), key=GRADES.index)


def _case_from_dict(data: Mapping[str, Any]) -> CaseResult:
    regions = tuple(_region_from_dict(region) for region in data["regions"])
    return CaseResult(**{**data, "regions": regions, "remarks": tuple(data["remarks"])})


def _region_from_dict(data: Mapping[str, Any]) -> RegionResult:
    first = data["first_wrong"]
    element = None if first is None else Element(**{**first, "index": tuple(first["index"])})
    mean = None if data["mean"] is None else MeanTest(**data["mean"])
    return RegionResult(**{**data, "first_wrong": element, "mean": mean})


def _plain(value: Any) -> Any:
    """Turn tuples and mappings into lists and dicts, and numbers JSON lacks into text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
