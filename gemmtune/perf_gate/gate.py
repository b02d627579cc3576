"""A performance gate from the question to the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .. import settings as settings_module
from ..choice import Choice
from ..device import DeviceInfo, detect
from ..dispatch.tuning import tune
from ..errors import GateError, GemmtuneError
from ..problem import Problem
from ..problem.rebuild import rebuilt
from ..selector.progress import Progress
from ..settings import Settings
from .baselines import Baselines
from .collect import Series, collect
from .options import PICK, GateOptions
from .problems import default_problems
from .processes import FreshProcess
from .recall import find_baselines, note_differences, update_baselines, versions
from .result import GateResult, ProblemGate
from .sampling import Match, Sampling
from .statistics import Judgement, Rule, judge
from .subjects import TORCH, subject_for

__all__ = ["problems_without_names", "run_gate"]


def run_gate(
    problems: Iterable[Problem],
    options: GateOptions | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: bool | Progress = False,
) -> GateResult:
    """Measure problems in fresh processes and judge each (see ``statistics``), under the settings in force.

    ``tell`` is given a line for each process; ``progress`` listens to the tuning of problems that were never tuned. A problem that
    cannot be measured is an entry with its reason.

    Raises:
        GateError: options or a file of baselines that cannot be used; no problems; problems for another device type.
        UnavailableError: the device is not here.
    """
    options = options or GateOptions()
    wanted = list(dict.fromkeys(problems))
    device = detect(options.device)
    _check(wanted, device)
    settings = settings_module.current()
    gate = _Gate(
        entries=[ProblemGate(problem=problem) for problem in wanted],
        options=options,
        rule=Rule.for_suite(len(wanted)),
        device=device,
        settings=settings,
        tell=tell,
        progress=progress,
    )
    baselines = Baselines.of(options.baselines, device)
    gate.run(baselines)
    file = str(baselines.path) if options.anchor == "baseline" or options.update_baseline else ""
    return GateResult(
        entries=gate.entries, options=options, rule=gate.rule, device=device.name,
        versions=versions(device, settings), baselines_file=file,
    )  # fmt: skip


def problems_without_names(options: GateOptions) -> list[Problem]:
    """The problems of a gate for which none are named: those of the baselines where these are the anchor and there are any, else
    ``default_problems``.

    Raises:
        GateError: the file of baselines cannot be used.
        UnavailableError: the device is not here.
    """
    device = detect(options.device)
    if options.anchor != "baseline":
        return default_problems(device.torch_device.type)
    baselines = Baselines.of(options.baselines, device)
    timing = settings_module.current().timing
    try:
        known = [rebuilt(b.key) for b in baselines.entries.values() if b.timing == timing]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GateError(f"baselines: {baselines.path}: got a key that is no problem of this version: {error}") from error
    return known or default_problems(device.torch_device.type)


def _check(problems: Sequence[Problem], device: DeviceInfo) -> None:
    if not problems:
        raise GateError("problems: got none, expected at least one")
    for problem in problems:
        if problem.device_type != device.torch_device.type:
            raise GateError(f"problems: got {problem}, expected problems for {device.torch_device}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gate:
    """One run: its entries are filled as it goes on."""

    entries: list[ProblemGate]
    options: GateOptions
    rule: Rule
    device: DeviceInfo
    settings: Settings
    tell: Callable[[str], None]
    progress: bool | Progress

    def run(self, baselines: Baselines) -> None:
        """Compare the candidate with torch in the same process, and that ratio with the baseline's if asked."""
        if self.options.anchor == "baseline":
            find_baselines(self.entries, baselines, self.settings, needed=not self.options.update_baseline)
        playing = [entry for entry in self.entries if not entry.missing]
        if self.options.candidate == PICK:
            self._tune(playing)
        matches: list[Match] = []
        ready: list[ProblemGate] = []
        for entry in playing:
            try:
                candidate, anchor = (self._subject(name, entry) for name in (self.options.candidate, TORCH))
            except GemmtuneError as error:
                entry.series.failure = str(error)
                continue
            entry.candidate, entry.anchor = candidate.name, anchor.name
            matches.append(Match(problem=entry.problem, candidate=candidate, anchor=anchor))
            ready.append(entry)
        note_differences(ready, self.device, self.settings)
        self._collect(ready, matches)
        if self.options.update_baseline:
            update_baselines(ready, baselines, self.device, self.settings, self.rule)

    def _subject(self, name: str, entry: ProblemGate) -> Choice:
        return subject_for(name, entry.problem, self.device, self.settings)

    def _tune(self, entries: Sequence[ProblemGate]) -> None:
        """All at once, so that they compile in the background while the first ones are measured."""
        problems = [entry.problem for entry in entries if not entry.problem.empty and 0 not in entry.problem.summed]
        if problems and self.settings.tune != "never":
            tune(problems, settings=self.settings, progress=self.progress, device=str(self.device.torch_device))

    def _collect(self, entries: Sequence[ProblemGate], matches: Sequence[Match]) -> None:
        process = FreshProcess(device=self.device, settings=self.settings, sampling=Sampling.of(self.device.type))

        def judged(index: int, series: Series) -> Judgement:
            baseline = entries[index].baseline
            return judge(series.values, self.rule, baseline.estimate if baseline else None)

        whole = self.options.update_baseline
        collected = collect(matches, process, judged, processes=self.options.processes, whole=whole, tell=self.tell)
        for index, (entry, series) in enumerate(zip(entries, collected, strict=True)):
            entry.series = series
            entry.judgement = None if series.failure else judged(index, series)
