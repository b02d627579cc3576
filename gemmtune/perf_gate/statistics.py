"""The rule of a gate: values from fresh processes are compared with a limit, and two batches must agree.

A value is the log ratio of candidate to reference in one process. Above 0 the candidate is slower. Within a process, medians remove
outliers. The remaining noise differs between processes (addresses of memory, clocks at which a GPU settles). Processes are
therefore the unit of the statistics. Take a batch of P processes with mean m and standard deviation s. By Student's t at level α,
the true log ratio is

    above the **lower** bound  m − t(1−α, P−1)·s/√P    and below the **upper** bound  m + t(1−α, P−1)·s/√P.

REGRESSED     the lower bounds of two independent batches both exceed log 1.02
IMPROVED      the upper bounds of two independent batches both fall below −log 1.02
PASS          a slow-down of 5% is excluded: the upper bound of all values is below log 1.05
INCONCLUSIVE  none of these: too much noise to exclude 5%, or the batches disagree

Each decision needs a narrow interval, whichever way it falls: the margin of all values is at most log 1.05, or for REGRESSED and
IMPROVED half of the measured change. A wider one is INCONCLUSIVE. Few values of a busy machine are no sample of Student's t.

**False alarms in a suite.** The worst acceptable candidate is slower by exactly the limit. Its probability of REGRESSED is at most
α². Over N problems the alarms add up to at most N·α², even if problems depend on each other. α = min(0.01, √(0.005/N))
therefore keeps them below 0.5% for a suite of any size. A candidate as fast as its reference is far below that.

**With a baseline** the tested value is m minus the baseline's mean, whose error is part of the bound (Welch). Both batches share
that error, so the α² above becomes α for a candidate that is slower by exactly the limit. A candidate that is not slower is
protected by its distance to the limit: see benchmarks/gate_operating_point.py.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .options import LIMIT

SUITE_ALARMS = 0.005
LARGEST_LEVEL = 0.01
VISIBLE = 2.5
"""Slow-down that PASS excludes, as a multiple of the one that is allowed."""
HALVINGS = 60
"""Bisection steps for an angle, more than the precision of float64."""


class Decision(StrEnum):
    """Decision of a gate on one problem, or on all: the first in this order that any problem has."""

    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"
    IMPROVED = "IMPROVED"
    PASS = "PASS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Parameters of the rule. ``level`` is α for one bound of one batch. ``limit`` and ``visible`` are ratios of time above 1."""

    level: float = LARGEST_LEVEL
    limit: float = 1.02
    visible: float = 1.05

    @classmethod
    def for_suite(cls, problems: int, percent: float = LIMIT) -> "Rule":
        """Return the rule that keeps false alarms below 0.5% in a suite of that many problems, slower by ``percent`` at most."""
        level = min(LARGEST_LEVEL, math.sqrt(SUITE_ALARMS / max(problems, 1)))
        return cls(level=level, limit=1 + percent / 100, visible=1 + VISIBLE * percent / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean and standard deviation of the values of ``count`` processes."""

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Return the estimate from two or more values."""
        return cls(mean=statistics.fmean(values), spread=statistics.stdev(values), count=len(values))

    @property
    def variance(self) -> float:
        """Variance of the mean."""
        return self.spread**2 / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Log ratio and half the width of its interval."""

    log_ratio: float
    margin: float

    @property
    def lower(self) -> float:
        """One-sided lower bound: the true value is above it, except with the probability of the level."""
        return self.log_ratio - self.margin

    @property
    def upper(self) -> float:
        """One-sided upper bound: the true value is below it, except with the probability of the level."""
        return self.log_ratio + self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A decision, the bounds from all values, and a reason if the bounds do not explain the decision."""

    decision: Decision
    bounds: Bounds | None
    reason: str = ""


def bounds(now: Estimate, level: float, before: Estimate | None = None) -> Bounds:
    """Return the bounds of one estimate, or of the difference of two."""
    variances = [(e.variance, e.count) for e in (now, before) if e is not None]
    variance = sum(v for v, _ in variances)
    log_ratio = now.mean - (before.mean if before is not None else 0.0)
    if variance == 0:
        return Bounds(log_ratio=log_ratio, margin=0.0)
    freedom = variance**2 / sum(v**2 / (count - 1) for v, count in variances)
    # Round down, so that a handful of quantiles serve all problems.
    return Bounds(log_ratio=log_ratio, margin=student_quantile(1 - level, math.floor(freedom + 1e-9)) * math.sqrt(variance))


def judge(batches: Sequence[Sequence[float]], rule: Rule, baseline: Estimate | None = None) -> Judgement:
    """Return the decision on one or two batches of two or more processes. One alone is never REGRESSED or IMPROVED."""
    limit, visible = math.log(rule.limit), math.log(rule.visible)
    each = [bounds(Estimate.of(values), rule.level, baseline) for values in batches]
    whole = bounds(Estimate.of([v for values in batches for v in values]), rule.level, baseline)
    slower, faster = [b.lower > limit for b in each], [b.upper < -limit for b in each]
    reason = ""
    if len(each) > 1 and (all(slower) or all(faster)):
        decision = Decision.REGRESSED if all(slower) else Decision.IMPROVED
    elif any(slower):
        decision = Decision.INCONCLUSIVE
        reason = "the batches disagree" if len(each) > 1 else "slower in one batch, which a second one must confirm"
    elif len(each) == 1 and any(faster):
        decision = Decision.INCONCLUSIVE
        reason = "faster in one batch, which a second one must confirm"
    elif whole.upper < visible:
        decision = Decision.PASS
    else:
        decision = Decision.INCONCLUSIVE
        reason = f"noise of ±{100 * whole.margin:.1f}% cannot exclude a slow-down of {100 * (rule.visible - 1):.0f}%, nor prove one"
    widest = visible if decision is Decision.PASS else max(visible, abs(whole.log_ratio) / 2)
    if decision is not Decision.INCONCLUSIVE and whole.margin > widest:
        decision, most = Decision.INCONCLUSIVE, 100 * widest
        reason = f"noise of ±{100 * whole.margin:.1f}% is above the ±{most:.1f}% that a decision allows; measure on an idle machine"
    return Judgement(decision=decision, bounds=whole, reason=reason)


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return the t with P(T ≤ t) = ``probability`` ≥ 0.5 by bisection of a finite sum (Abramowitz and Stegun, 26.7.3, 26.7.4)."""
    if not 0.5 <= probability < 1 or not freedom >= 1:
        raise ValueError(f"student_quantile: got {probability} and {freedom}, expected 0.5 ≤ probability < 1 and freedom ≥ 1")

    def between(angle: float) -> float:
        """Return P(−t ≤ T ≤ t)."""
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
