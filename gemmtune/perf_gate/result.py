"""What a gate found, as values that convert to JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..problem import Problem
from .baselines import Baseline
from .collect import Series
from .options import GateOptions
from .statistics import Judgement, Rule, Verdict

__all__ = ["GateResult", "ProblemGate"]


@dataclass(slots=True, kw_only=True)
class ProblemGate:
    """What was found of one problem. ``judgement`` is None where it could not be measured; ``series.failure`` says why."""

    problem: Problem
    candidate: str = ""
    """The name of the choice that is judged."""
    anchor: str = ""
    series: Series = field(default_factory=lambda: Series([]))
    judgement: Judgement | None = None
    baseline: Baseline | None = None
    notes: list[str] = field(default_factory=list)
    missing: bool = False
    """A baseline was asked for and there is none."""

    @property
    def candidate_us(self) -> float | None:
        """Median over the processes of the time of a call."""
        return statistics.median(s.candidate_us for s in self.series.samples) if self.series.samples else None

    @property
    def anchor_us(self) -> float | None:
        """The same of the anchor."""
        return statistics.median(s.anchor_us for s in self.series.samples) if self.series.samples else None

    @property
    def ratio(self) -> float | None:
        """The candidate's time over the anchor's: the geometric mean over the processes."""
        values = [s.log_ratio for s in self.series.samples]
        return math.exp(statistics.fmean(values)) if values else None

    @property
    def change(self) -> float | None:
        """What is judged: the ratio, over that of the baseline if that is the anchor."""
        bounds = self.judgement.bounds if self.judgement else None
        return math.exp(bounds.log_ratio) if bounds else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the log ratio of every process."""
        bounds = self.judgement.bounds if self.judgement else None
        return {
            "problem": {"text": str(self.problem)} | self.problem.to_json(),
            "candidate": self.candidate,
            "anchor": self.anchor,
            "verdict": self.judgement.verdict.value if self.judgement else None,
            "reason": self.judgement.reason if self.judgement else self.series.failure,
            "candidate_us": self.candidate_us,
            "anchor_us": self.anchor_us,
            "ratio": self.ratio,
            "judged": {"ratio": self.change, "lower": math.exp(bounds.lower), "upper": math.exp(bounds.upper)} if bounds else None,
            "baseline": {"ratio": self.baseline.ratio, "pick": self.baseline.pick} if self.baseline else None,
            "notes": self.notes,
            "log_ratios": self.series.values,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What was found of a suite."""

    entries: list[ProblemGate]
    options: GateOptions
    rule: Rule
    device: str
    versions: Mapping[str, str]
    baselines_file: str = ""
    """Where baselines were read or written; empty without any."""

    @property
    def verdict(self) -> Verdict:
        """The first of the verdicts' order that any problem has; INCONCLUSIVE counts what could not be measured."""
        found = {e.judgement.verdict if e.judgement else Verdict.INCONCLUSIVE for e in self.entries}
        return next(verdict for verdict in Verdict if verdict in found)

    @property
    def failed(self) -> list[ProblemGate]:
        """Those that could not be measured."""
        return [e for e in self.entries if e.judgement is None]

    @property
    def missing(self) -> list[ProblemGate]:
        """Those without the baseline that was asked for."""
        return [e for e in self.entries if e.missing]

    @property
    def exit_status(self) -> int:
        """1 for a regression or a required baseline that is missing, else 2 where something could not be measured, else 0."""
        if self.verdict is Verdict.REGRESSED or (self.options.require_baseline and self.missing):
            return 1
        return 2 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        """Plain values: what was asked, the rule, every problem."""
        return {
            "verdict": self.verdict.value,
            "anchor": self.options.anchor,
            "candidate": self.options.candidate,
            "device": self.device,
            "versions": dict(self.versions),
            "rule": {
                "limit": self.rule.limit,
                "visible": self.rule.visible,
                "level": self.rule.level,
                "processes": self.options.processes,
            },
            "problems": [entry.to_json() for entry in self.entries],
        }
