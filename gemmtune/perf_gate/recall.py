"""Baselines and the problems of a gate: found, compared with what is here now, replaced."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..device import DeviceInfo
from ..settings import Settings
from ..store.key import difference, fingerprint
from .baselines import Baseline, Baselines
from .result import ProblemGate
from .statistics import Estimate, Judgement, Rule, Verdict, bounds

__all__ = ["find_baselines", "note_differences", "update_baselines", "versions"]


def find_baselines(entries: Iterable[ProblemGate], baselines: Baselines, settings: Settings, *, needed: bool) -> None:
    """Give each entry its baseline. One without is judged at once, as missing, if a baseline is ``needed``."""
    for entry in entries:
        entry.baseline = baselines.get(entry.problem, settings.timing)
        if entry.baseline is None and needed:
            entry.missing = True
            reason = f"no baseline in {baselines.path}; make it with --update-baseline"
            entry.judgement = Judgement(verdict=Verdict.INCONCLUSIVE, bounds=None, reason=reason)


def note_differences(entries: Iterable[ProblemGate], device: DeviceInfo, settings: Settings) -> None:
    """Note what is other than when the baseline was made: reasons for a change that are no fault of the kernels."""
    for entry in entries:
        if entry.baseline is None:
            continue
        if entry.baseline.pick != entry.candidate:
            entry.notes.append(f"another pick than the baseline's, which was {entry.baseline.pick}")
        entry.notes += [f"since the baseline, {line}" for line in difference(entry.baseline.versions, versions(device, settings))]


def update_baselines(
    entries: Iterable[ProblemGate], baselines: Baselines, device: DeviceInfo, settings: Settings, rule: Rule
) -> None:
    """Write the ratios that were measured, but for those that are too noisy to compare anything with.

    Raises:
        GateError: the file cannot be written.
    """
    written = False
    for entry in entries:
        if entry.judgement is None:
            continue
        estimate = Estimate.of([sample.log_ratio for sample in entry.series.samples])
        if bounds(estimate, rule.level).margin > math.log(rule.visible / rule.limit):
            entry.notes.append("too noisy for a baseline, so none was written: measure on an idle machine")
            continue
        written = True
        baselines.put(
            Baseline(
                problem=str(entry.problem),
                key=entry.problem.to_json(),
                timing=settings.timing,
                pick=entry.candidate,
                log_ratio=round(estimate.mean, 6),
                spread=round(estimate.spread, 6),
                processes=estimate.count,
                versions=versions(device, settings),
            )
        )
    if written:
        baselines.write()


def versions(device: DeviceInfo, settings: Settings) -> dict[str, str]:
    """The machine's fingerprint without the long list of instruction sets."""
    return {name: value for name, value in fingerprint(device, settings.timing).items() if name != "isa"}
