"""The rule by which a gate judges: values from fresh processes against a limit, two batches that must agree.

A value is the log ratio of candidate to anchor in one process: above 0 the candidate is slower. Within a process medians shed
outliers; what remains differs from process to process (where memory lies, which clocks a GPU settles at), so processes are what is
counted. A batch of P processes with mean m and standard deviation s says, by Student's t at level α, that the true log ratio is

    above the **lower** bound  m − t(1−α, P−1)·s/√P    and below the **upper** bound  m + t(1−α, P−1)·s/√P.

REGRESSED     the lower bounds of two independent batches both exceed log 1.02
IMPROVED      the upper bounds of two independent batches both fall below −log 1.02
PASS          a slow-down of 5% is excluded: the upper bound of all values is below log 1.05
INCONCLUSIVE  none of these: too much noise to exclude 5%, or the batches disagree

**False alarms in a suite.** A candidate that is slower by the limit itself, the worst of those that are right, is called REGRESSED
with probability α² at most. Over N problems the alarms add up to N·α² at most, whatever the dependence between problems; so
α = min(0.01, √(0.005/N)) keeps them below 0.5% for a suite of any size. A candidate as fast as its anchor is far below that.

**With a baseline** the value in question is m minus the baseline's mean, whose error is part of the bound (Welch): both batches
share that error, so that the α² above becomes α for a candidate that is slower by the limit itself. For one that is not slower the
distance to the limit is what protects: see benchmarks/gate_operating_point.py.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SUITE_ALARMS = 0.005
LARGEST_LEVEL = 0.01
HALVINGS = 60
"""The halvings of an interval of angles: more than a float64 tells apart."""


class Verdict(StrEnum):
    """What a gate says of one problem, or of all (then the first of this order that any has)."""

    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"
    IMPROVED = "IMPROVED"
    PASS = "PASS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``level`` is α of one bound of one batch; ``limit`` and ``visible`` are ratios of time, above 1."""

    level: float = LARGEST_LEVEL
    limit: float = 1.02
    visible: float = 1.05

    @classmethod
    def for_suite(cls, problems: int) -> Rule:
        """The rule with which a suite of that many problems keeps its false alarms below 0.5%."""
        return cls(level=min(LARGEST_LEVEL, math.sqrt(SUITE_ALARMS / max(problems, 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean and standard deviation of the values of ``count`` processes."""

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from two values or more."""
        return cls(mean=statistics.fmean(values), spread=statistics.stdev(values), count=len(values))

    @property
    def variance(self) -> float:
        """The variance of the mean."""
        return self.spread**2 / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The log ratio and half the width of its interval."""

    log_ratio: float
    margin: float

    @property
    def lower(self) -> float:
        """One-sided bound: the truth is above it but for the level."""
        return self.log_ratio - self.margin

    @property
    def upper(self) -> float:
        """One-sided bound: the truth is below it but for the level."""
        return self.log_ratio + self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, the bounds from all values, and the reason of a verdict that is not plain from these."""

    verdict: Verdict
    bounds: Bounds | None
    reason: str = ""


def bounds(now: Estimate, level: float, before: Estimate | None = None) -> Bounds:
    """The bounds of one estimate, or of the difference of two."""
    variances = [(e.variance, e.count) for e in (now, before) if e is not None]
    variance = sum(v for v, _ in variances)
    log_ratio = now.mean - (before.mean if before is not None else 0.0)
    if variance == 0:
        return Bounds(log_ratio=log_ratio, margin=0.0)
    freedom = variance**2 / sum(v**2 / (count - 1) for v, count in variances)
    # Rounded down, so that a handful of quantiles serve all problems.
    return Bounds(log_ratio=log_ratio, margin=student_quantile(1 - level, math.floor(freedom + 1e-9)) * math.sqrt(variance))


def judge(batches: Sequence[Sequence[float]], rule: Rule, baseline: Estimate | None = None) -> Judgement:
    """The verdict on one or two batches of values, each of two processes or more.

    With one batch it is REGRESSED and IMPROVED for none: where that batch alone would say so, the verdict is INCONCLUSIVE and the
    reason asks for the second.
    """
    limit, visible = math.log(rule.limit), math.log(rule.visible)
    each = [bounds(Estimate.of(values), rule.level, baseline) for values in batches]
    whole = bounds(Estimate.of([v for values in batches for v in values]), rule.level, baseline)
    slower, faster = [b.lower > limit for b in each], [b.upper < -limit for b in each]
    reason = ""
    if len(each) > 1 and (all(slower) or all(faster)):
        verdict = Verdict.REGRESSED if all(slower) else Verdict.IMPROVED
    elif any(slower):
        verdict = Verdict.INCONCLUSIVE
        reason = "the batches disagree" if len(each) > 1 else "slower in one batch, which a second one must confirm"
    elif len(each) == 1 and any(faster):
        verdict = Verdict.INCONCLUSIVE
        reason = "faster in one batch, which a second one must confirm"
    elif whole.upper < visible:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.INCONCLUSIVE
        reason = f"noise of ±{100 * whole.margin:.1f}% cannot exclude a slow-down of {100 * (rule.visible - 1):.0f}%, nor prove one"
    return Judgement(verdict=verdict, bounds=whole, reason=reason)


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """The t with P(T ≤ t) = ``probability``, at least 0.5, for ``freedom`` degrees of freedom.

    With t = √freedom · tan θ the probability is a finite sum of powers of cos θ (Abramowitz and Stegun, 26.7.3 and 26.7.4), and an
    angle is found by bisection.
    """
    if not 0.5 <= probability < 1 or not freedom >= 1:
        raise ValueError(f"student_quantile: got {probability} and {freedom}, expected 0.5 ≤ probability < 1 and freedom ≥ 1")

    def between(angle: float) -> float:
        """P(−t ≤ T ≤ t)."""
        total, term = 0.0, math.cos(angle) if freedom % 2 else 1.0
        for power in range(1 + freedom % 2, freedom, 2):
            total += term
            term *= power / (power + 1) * math.cos(angle) ** 2
        return 2 / math.pi * (angle + math.sin(angle) * total) if freedom % 2 else math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if between(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
