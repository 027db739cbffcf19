"""Which rounding scheme made these values, and the mean test for what no scheme explains.

A *scheme* stores the products of a set J in the output type, keeps the others, adds in float32 (any
order, FMA or not) and rounds once. Its result at an element is enclosed by RN_out of both ends of
``[sum - d32, sum + d32]`` over the chosen products (d32 as in :mod:`oracle.budget`); the scheme is
*decided* there if both are one value. A value outside the enclosure disagrees with the scheme, and
a kernel that nowhere disagrees with J is explained by it. A kernel of scheme J always is.

**The mean test.** With y an element's exact sum, S the sum of the magnitudes of its terms and v a
value, the score is x(v) = clip(sign(y) (v - y) / ulp(RN y), -1, 1) for normal y with S <= 4 |y|,
else 0. Z_c is the mean score of the tested values of cluster c, over all its elements; low_Jc and
high_Jc are those of the ends of scheme J's enclosures; T is the mean over the N clusters. A kernel
that no scheme explains is biased if

    T(Z) < min_J T(low_J) - tau   or   T(Z) > max_J T(high_J) + tau.

(Results tell all of these divided by the share of elements that have a score, 0.49 for 0.49 ulp.)

*Null hypothesis.* Inputs are independent random draws, and clusters share none. For each element
the scheme and the order of its sum are fixed without regard to the data: one scheme everywhere, or
any mixture. For a mixture the elements must be alike in law, each by itself, so that mu_J, the
expected score of scheme J's upper end, is the same for all; with p_J the share of J in a cluster,
averaged over clusters, then sum_c E[Z_c] <= N sum_J p_J mu_J = sum_c sum_J p_J E[high_Jc]. Likewise
for the lower ends. (Kernels that store some of more than two products are of no scheme here. Their
means were between those of none and all, as measured; that is no proof.)

*Bound.* Let W_c = Z_c - sum_J p_J high_Jc >= -2 and X_c = W_c / 2 >= -1, independent,
sum_c E[X_c] <= 0. As (log(1 + t) - t) / t^2 increases in t > -1, exp(l X - psi(l) X^2) <= 1 + l X
for 0 < l < 1 and psi(l) = -log(1 - l) - l (X. Fan, I. Grama, Q. Liu, "Exponential inequalities for
martingales with applications", Electron. J. Probab. 20, 2015, Lemma 4.1). So the expectation of
exp(l sum X_c - psi(l) sum X_c^2) is at most prod(1 + l E[X_c]) <= (1 + l sum E[X_c] / N)^N <= 1
(arithmetic and geometric mean), and by Markov's inequality, with probability 1 - e^-L at least,

    T(Z) - sum_J p_J T(high_J) <= psi(l) / (2 l) * (sum W_c^2) / N + 2 L / (l N).

The shares p are unknown, but sum W_c^2 is convex in p, so at most q N, the greatest sum over c of
(Z_c - high_Jc)^2 or (Z_c - low_Jc)^2 of a scheme; and sum_J p_J T(high_J) <= max_J T(high_J). The
lower side is alike.
tau is the least such bound over K fixed values of l, with L = ln(2 m K / alpha): for all m outputs
tested, both sides and all l together a false alarm has probability alpha = 1e-6 at most.

The two-sided Hoeffding bound 2 sqrt(ln(2m / alpha) / (2N)) is for one mean of values in [-1, 1]
about its expectation. Here a mean is compared with others that vary as well: differences lie in
[-2, 2], and Hoeffding would give 4 sqrt(ln(2m / alpha) / (2N)). The bound above, about
sqrt(2 q L / N) + 2 L / N, uses that a kernel differs from the schemes little (q is 0.3 for one that
truncates), and is below both in practice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .budget import FLOAT32_LIMIT, Magnitudes, gamma, magnitudes
from .rounding import Format, round_float64, ulp
from .verdict import MeanTest

FALSE_ALARM = 1e-6
"""The most probable that an honest kernel is called biased, over all outputs of a case."""

FEWEST_CLUSTERS = 600
"""With fewer clusters the mean is not tested."""

MOST_CLUSTERS = 1 << 16
"""Only the first clusters have their mean tested: tau is far below what matters by then."""

SINGLE_ROUNDING = "one rounding of a float32 sum"
"""The name of the scheme that stores no product."""

EXACT_ROUNDING = "one rounding of the exact sum"
"""What is said of values that are all correctly rounded."""

TOO_FEW_DECIDED = "too few elements decided to tell"
"""The name where no scheme can be ruled out, as in float32, or where there is nothing to see."""

# The values of l: where q N varies by a factor of four, the best one varies by two.
_RATES = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)

# Covers the float64 roundings of a sum and of its ends, which are below d32 * 2^-26.
_OUTWARD = 1 + 2.0**-20

_WORST_CANCELLATION = 4.0

# Elements times terms (or schemes) worked on at once: temporaries stay within a core's cache.
_CHUNK = 1 << 15
_GPU_CHUNK = 1 << 23


@dataclass(frozen=True)
class Agreement:
    """How far a kernel agrees with one scheme.

    Attributes:
        stored: the terms that the scheme stores.
        name: the scheme in plain words.
        elements: elements looked at: of finite terms, and in the domain of the contract
            ``stored_intermediates``. Once a scheme is ruled out, elements beyond those of the mean
            test are not looked at.
        decided: of these, elements where the scheme has one possible value.
        disagreements: of these, elements whose value the scheme cannot give.
    """

    stored: tuple[int, ...]
    name: str
    elements: int
    decided: int
    disagreements: int


@dataclass(frozen=True)
class SchemeResult:
    """What is known about the roundings behind the elements of a region.

    Attributes:
        agreements: one for each scheme, the one that stores nothing first; none before any block.
        mean: the means; None where clusters are not known or fewer than :data:`FEWEST_CLUSTERS`.
    """

    agreements: tuple[Agreement, ...]
    mean: MeanTest | None

    @property
    def explained_by(self) -> tuple[tuple[int, ...], ...]:
        """The stored sets of the schemes that no element disagrees with."""
        return tuple(one.stored for one in self.agreements if not one.disagreements)

    @property
    def name(self) -> str | None:
        """The scheme in plain words; several are joined by "or".

        None if no scheme explains the values, :data:`TOO_FEW_DECIDED` if all do or if those that
        do are decided nowhere.
        """
        possible = [one for one in self.agreements if not one.disagreements]
        if len(possible) == len(self.agreements):
            return TOO_FEW_DECIDED
        if not possible:
            return None
        if not any(one.decided for one in possible):
            return TOO_FEW_DECIDED
        return " or ".join(one.name for one in possible)

    @property
    def biased(self) -> bool | None:
        """Whether the mean is outside its bounds though no scheme explains the values.

        None where that does not apply: the values are explained, or there is no mean. It is
        evidence against a kernel only where the inputs are independent random draws.
        """
        if self.mean is None or self.name is not None:
            return None
        return self.mean.alarm


@dataclass
class _Counts:
    """Running counts of one scheme; see :class:`Agreement`."""

    stored: tuple[int, ...]
    elements: int = 0
    decided: int = 0
    disagreements: int = 0


class SchemeTally:
    """Counts agreement with every scheme, and adds up scores, while blocks of a region go by.

    Memory is a small multiple of a block, and eleven float64 rows of at most
    :data:`MOST_CLUSTERS`.

    Args:
        fmt: the output's format.
    """

    def __init__(self, fmt: Format) -> None:
        self._fmt = fmt
        self._terms = 0
        self._counts: tuple[_Counts, ...] = ()
        self._scores: _ClusterSums | None = _ClusterSums()

    def add(
        self,
        terms: torch.Tensor,
        actual: torch.Tensor,
        finite: torch.Tensor | None = None,
        clusters: torch.Tensor | None = None,
    ) -> None:
        """Look at one block.

        Args:
            terms: float64 ``[count, *block shape]``, the exact terms, zero where not finite.
            actual: the kernel's values, of the format's dtype and the block's shape.
            finite: bool, the block's shape, whether all terms of an element are finite; None when
                they are everywhere.
            clusters: int64, broadcastable to the block's shape: equal numbers from 0 on for
                elements that share an input. None where not known: then no mean is tested.

        Raises:
            ValueError: if blocks have different numbers of terms.
        """
        shape = actual.shape
        self._expect(terms.shape[0])
        if clusters is None:
            self._scores = None
        if self._scores is None:
            clusters = None
        terms, actual = terms.reshape(self._terms, -1), actual.reshape(-1)
        finite = None if finite is None else finite.reshape(-1)
        clusters = None if clusters is None else clusters.broadcast_to(shape).reshape(-1)
        chunk = _GPU_CHUNK if actual.is_cuda else _CHUNK
        step = max(1, chunk // max(self._terms, len(self._counts)))
        for start in range(0, actual.numel(), step):
            part = slice(start, start + step)
            self._add_chunk(
                terms[:, part],
                actual[part],
                None if finite is None else finite[part],
                None if clusters is None else clusters[part],
            )

    def _expect(self, terms: int) -> None:
        if not self._terms:
            self._terms = terms
            self._counts = tuple(_Counts(stored) for stored in stored_sets(terms))
        elif terms != self._terms:
            raise ValueError(
                f"a block has {terms} terms per element, those before it {self._terms}; tally each"
                " region by itself"
            )

    def _add_chunk(
        self,
        terms: torch.Tensor,
        actual: torch.Tensor,
        finite: torch.Tensor | None,
        clusters: torch.Tensor | None,
    ) -> None:
        tested = None if clusters is None else clusters < MOST_CLUSTERS
        scored = tested is not None and bool(tested.any())
        followed = [one for one in self._counts if scored or not one.disagreements]
        if not followed:
            return
        actual = actual.to(torch.float64)
        sizes = magnitudes(terms, self._fmt)
        inside = sizes.stores_finite & (sizes.reach * (1 + gamma(terms.shape[0])) < FLOAT32_LIMIT)
        if finite is not None:
            inside &= finite
        ends = _enclosures(terms, sizes, [one.stored for one in followed], self._fmt)
        agrees = (actual >= ends.low) & (actual <= ends.high)
        decided = (inside & (ends.low == ends.high)).count_nonzero(dim=1).tolist()
        disagreements = (inside & ~agrees).count_nonzero(dim=1).tolist()
        for one, more_decided, more in zip(followed, decided, disagreements, strict=True):
            one.elements += int(inside.count_nonzero())
            one.decided += more_decided
            one.disagreements += more
        if self._scores is not None and tested is not None and clusters is not None and scored:
            score = _Score.of(terms, inside, self._fmt)
            self._scores.add(clusters, tested, score.rows(actual, ends))

    def result(self, outputs_tested: int) -> SchemeResult:
        """Return what was counted.

        Args:
            outputs_tested: how many outputs and regions of the case get a mean test, at least 1;
                the probability of a false alarm is that of all together.
        """
        agreements = tuple(
            Agreement(
                stored=one.stored,
                name=_scheme_name(one.stored, self._terms),
                elements=one.elements,
                decided=one.decided,
                disagreements=one.disagreements,
            )
            for one in self._counts
        )
        mean = None if self._scores is None else self._scores.test(outputs_tested)
        return SchemeResult(agreements, mean)


def rounding_scheme(
    terms: torch.Tensor,
    actual: torch.Tensor,
    fmt: Format,
    *,
    finite: torch.Tensor | None = None,
    clusters: torch.Tensor | None = None,
    outputs_tested: int = 1,
) -> SchemeResult:
    """Name the scheme of a whole tensor at once; arguments as in :class:`SchemeTally`."""
    tally = SchemeTally(fmt)
    tally.add(terms, actual, finite, clusters)
    return tally.result(outputs_tested)


def stored_sets(count: int) -> tuple[tuple[int, ...], ...]:
    """Return the sets of stored terms that are told apart, the empty one first.

    All four for two terms; none and all for any other number.
    """
    if count == 2:
        return ((), (0,), (1,), (0, 1))
    return ((), tuple(range(count)))


def _scheme_name(stored: tuple[int, ...], count: int) -> str:
    if not stored:
        return SINGLE_ROUNDING
    if len(stored) < count:
        return f"{('first', 'second')[stored[0]]} product stored"
    return "both products stored" if count == 2 else "all products stored"


def mean_test(
    tested: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    outputs_tested: int,
    *,
    share: float = 1.0,
) -> MeanTest | None:
    """Compare a kernel's mean score with those of the schemes, as the module's docstring has it.

    Args:
        tested: float64 ``[clusters]``, Z_c, in [-1, 1].
        low: float64 ``[schemes, clusters]``, low_Jc, in [-1, 1].
        high: likewise, high_Jc.
        outputs_tested: m.
        share: what to divide all means by when they are told: the share of elements that have a
            score, so that they are means over those.

    Returns:
        The means and bounds; None with fewer than :data:`FEWEST_CLUSTERS` clusters.
    """
    clusters = tested.numel()
    if clusters < FEWEST_CLUSTERS:
        return None
    squares = torch.maximum((tested - low).square().mean(dim=1), (tested - high).square().mean(1))
    tau = deviation_bound(float(squares.max()), clusters, outputs_tested)
    return MeanTest(
        mean=float(tested.mean()) / share,
        low=(float(low.mean(dim=1).min()) - tau) / share,
        high=(float(high.mean(dim=1).max()) + tau) / share,
        tau=tau / share,
        clusters=clusters,
    )


def deviation_bound(mean_square: float, clusters: int, outputs_tested: int) -> float:
    """Return tau.

    Args:
        mean_square: q, the mean square of the differences between a kernel's clusters and those of
            the scheme farthest from it.
        clusters: N.
        outputs_tested: m.
    """
    exponent = math.log(2 * outputs_tested * len(_RATES) / FALSE_ALARM)
    return min(
        (-math.log1p(-rate) - rate) / (2 * rate) * mean_square + 2 * exponent / (rate * clusters)
        for rate in _RATES
    )


@dataclass(frozen=True)
class _Enclosures:
    """The least and greatest possible results, float64 ``[schemes, elements]``."""

    low: torch.Tensor
    high: torch.Tensor


def _enclosures(
    terms: torch.Tensor, sizes: Magnitudes, sets: Sequence[tuple[int, ...]], fmt: Format
) -> _Enclosures:
    slack = sizes.sum_error * _OUTWARD
    low = _chosen_sums(terms, torch.minimum(sizes.stored, sizes.through), sets) - slack
    low = round_float64(low, fmt).to(torch.float64)
    # Where d32 is zero all partial sums are float32 numbers, so float64 adds without error too,
    # and a term is a float32 number, so it does not matter how it is stored.
    if not bool(slack.any()):
        return _Enclosures(low, low)
    high = _chosen_sums(terms, torch.maximum(sizes.stored, sizes.through), sets) + slack
    return _Enclosures(low, round_float64(high, fmt).to(torch.float64))


def _chosen_sums(
    kept: torch.Tensor, stored: torch.Tensor, sets: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    """Add in float64, for each set, the stored values of its terms and the others as they are."""
    places = range(kept.shape[0])
    sums = []
    for chosen in sets:
        total = torch.zeros_like(kept[0])
        for place in places:
            total += stored[place] if place in chosen else kept[place]
        sums.append(total)
    return torch.stack(sums)


@dataclass(frozen=True)
class _Score:
    """The score of values of one block's elements, increasing or decreasing in the value.

    Attributes:
        exact: y to float64's precision. (Any centre makes a valid test.)
        scale: sign(y) / ulp(RN y), zero where the element has no score.
        weight: 1 where the element has a score, else 0.
    """

    exact: torch.Tensor
    scale: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, terms: torch.Tensor, inside: torch.Tensor, fmt: Format) -> _Score:
        exact = terms.sum(dim=0)
        rounded = round_float64(exact, fmt)
        scored = inside & torch.isfinite(rounded) & (exact.abs() >= 2.0**fmt.min_exponent)
        scored &= terms.abs().sum(dim=0) <= _WORST_CANCELLATION * exact.abs()
        unit = ulp(torch.where(scored, rounded, 1.0), fmt)
        weight = scored.to(torch.float64)
        return cls(exact, exact.sign() * weight / unit, weight)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        scores = ((value - self.exact) * self.scale).clamp_(-1.0, 1.0)
        # No scheme gives a NaN here. One that was given is for the interval to reject.
        return scores.nan_to_num_(nan=0.0)

    def rows(self, actual: torch.Tensor, ends: _Enclosures) -> torch.Tensor:
        """Return what is added up by cluster, float64 ``[rows, elements]``."""
        head = torch.stack((torch.ones_like(actual), self.weight, self(actual)))
        low, high = self(ends.low), self(ends.high)
        return torch.cat((head, torch.minimum(low, high), torch.maximum(low, high)))


class _ClusterSums:
    """Sums by cluster: elements, those with a score, tested scores, low ends, high ends."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, clusters: torch.Tensor, tested: torch.Tensor, rows: torch.Tensor) -> None:
        """Add ``[rows, elements]`` where ``tested``, which is somewhere."""
        if not bool(tested.all()):
            clusters, rows = clusters[tested], rows[:, tested]
        self._grow(int(clusters.max()) + 1, rows).index_add_(1, clusters, rows)

    def _grow(self, size: int, rows: torch.Tensor) -> torch.Tensor:
        """Return sums with room for the clusters, at least doubled whenever there is not."""
        known = 0 if self._sums is None else self._sums.shape[1]
        if self._sums is None or size > known:
            room = min(MOST_CLUSTERS, max(size, 2 * known))
            grown = rows.new_zeros(rows.shape[0], room)
            if self._sums is not None:
                grown[:, :known] = self._sums
            self._sums = grown
        return self._sums

    def test(self, outputs_tested: int) -> MeanTest | None:
        if self._sums is None:
            return None
        seen = self._sums[:, self._sums[0] > 0]
        scored, tested = seen[1:3] / seen[0]
        share = float(scored.mean())
        if not share:
            return None
        low, high = (seen[3:] / seen[0]).chunk(2)
        return mean_test(tested, low, high, outputs_tested, share=share)
