"""One run of the performance gate, from problems to decisions."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .. import settings as settings_module
from ..device import DeviceInfo, detect
from ..errors import GateError, GemmtuneError, ShortMemoryError
from ..problem import Problem
from ..selector.progress import Progress
from ..settings import Settings
from ..store.key import difference, fingerprint
from ..timing.memory import CHECKED, require_memory
from ..tuning.tune import tune
from .baselines import Baseline, Baselines
from .options import PICK, GateOptions
from .result import GateResult, ProblemGate
from .sampling import FreshProcess, Match, Sampling, Series, collect
from .statistics import Decision, Estimate, Judgement, Rule, bounds, judge
from .subjects import TORCH, subject_for


def run_gate(
    problems: Iterable[Problem],
    options: GateOptions | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: bool | Progress = False,
) -> GateResult:
    """Measure problems in fresh processes and judge each (see ``statistics``), under the current settings.

    ``tell`` gets a line for each process. ``progress`` follows the tuning of untuned problems. A problem that cannot be measured
    becomes an entry with the reason. Raises GateError for unusable options, baselines or problems, UnavailableError without the
    device.
    """
    # Check the problems.
    options = options or GateOptions()
    wanted = list(dict.fromkeys(problems))
    device = detect(options.device)
    if not wanted:
        raise GateError("problems: got none, expected at least one")
    for problem in wanted:
        if problem.device_type != device.torch_device.type:
            raise GateError(f"problems: got {problem}, expected problems for {device.torch_device}")
    # Measure and judge.
    settings = settings_module.current()
    baselines = Baselines.of(options.baselines, device)
    gate = _Gate(
        entries=[ProblemGate(problem=problem) for problem in wanted],
        options=options,
        rule=Rule.for_suite(len(wanted), options.limit),
        device=device,
        settings=settings,
        baselines=baselines,
        tell=tell,
        progress=progress,
    )
    gate.run()
    file = str(baselines.path) if options.reference == "baseline" or options.update_baseline else ""
    return GateResult(
        entries=gate.entries, options=options, rule=gate.rule, device=device.name,
        versions=versions(device, settings), baselines_file=file,
    )  # fmt: skip


def problems_without_names(options: GateOptions) -> list[Problem]:
    """Return the problems of existing baselines, if these are the reference, else ``default_problems``.

    Raises GateError if the file of baselines cannot be used, UnavailableError without the device.
    """
    device = detect(options.device)
    if options.reference != "baseline":
        return default_problems(device.torch_device.type)
    baselines = Baselines.of(options.baselines, device)
    timing = settings_module.current().timing
    try:
        known = [Problem.from_json(b.key) for b in baselines.entries.values() if b.timing == timing]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GateError(f"baselines: {baselines.path}: got a key that is no problem of this version: {error}") from error
    return known or default_problems(device.torch_device.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gate:
    """One run. Its entries fill while it goes on."""

    entries: list[ProblemGate]
    options: GateOptions
    rule: Rule
    device: DeviceInfo
    settings: Settings
    baselines: Baselines
    tell: Callable[[str], None]
    progress: bool | Progress

    def run(self) -> None:
        """Compare the candidate with torch in the same process and, if requested, the ratio with the baseline's."""
        for entry in self.entries if self.options.reference == "baseline" else ():
            # An entry without a baseline is judged as missing now, unless baselines are being written.
            entry.baseline = self.baselines.get(entry.problem, self.settings.timing)
            if entry.baseline is None and not self.options.update_baseline:
                entry.missing = True
                reason = f"no baseline in {self.baselines.path}; make it with --update-baseline"
                entry.judgement = Judgement(decision=Decision.INCONCLUSIVE, bounds=None, reason=reason)
        pending = [entry for entry in self.entries if not entry.missing and self._fits(entry)]
        tuned = [entry.problem for entry in pending if not entry.problem.empty and 0 not in entry.problem.summed]
        if self.options.candidate == PICK and tuned and self.settings.tune != "never":
            # Tune all at once, so that kernels compile in the background while the first ones are measured.
            tune(tuned, settings=self.settings, progress=self.progress, device=str(self.device.torch_device))
        # Find the choices to compare.
        matches: list[Match] = []
        ready: list[ProblemGate] = []
        for entry in pending:
            try:
                candidate, reference = (
                    subject_for(name, entry.problem, self.device, self.settings) for name in (self.options.candidate, TORCH)
                )
            except GemmtuneError as error:
                entry.series.failure = str(error)
                continue
            entry.candidate, entry.reference = candidate.name, reference.name
            if (before := entry.baseline) is not None:  # differences explain a change without a fault of the kernels
                now, pick = versions(self.device, self.settings), f"another pick than the baseline's, which was {before.pick}"
                entry.notes += [pick] * (before.pick != entry.candidate)
                entry.notes += [f"since the baseline, {line}" for line in difference(before.versions, now)]
            matches.append(Match(problem=entry.problem, candidate=candidate, reference=reference))
            ready.append(entry)
        # Measure them.
        self._collect(ready, matches)
        if self.options.update_baseline:
            self._update_baselines(ready)

    def _fits(self, entry: ProblemGate) -> bool:
        """Return True if the operands fit into memory; else note the reason."""
        try:
            require_memory(str(entry.problem), CHECKED * entry.problem.bytes, self.device)
        except ShortMemoryError as error:
            entry.series.failure = str(error).removeprefix(f"{entry.problem}: ")
        return not entry.series.failure

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

    def _update_baselines(self, entries: Sequence[ProblemGate]) -> None:
        """Write the measured ratios, except those too noisy for a comparison."""
        for entry in entries:
            if entry.judgement is None:
                continue
            estimate = Estimate.of([sample.log_ratio for sample in entry.series.samples])
            if bounds(estimate, self.rule.level).margin > math.log(self.rule.visible / self.rule.limit):
                entry.notes.append("too noisy for a baseline, so none was written: measure on an idle machine")
                continue
            entry.written = True
            self.baselines.put(
                Baseline(
                    problem=str(entry.problem),
                    key=entry.problem.to_json(),
                    timing=self.settings.timing,
                    pick=entry.candidate,
                    log_ratio=round(estimate.mean, 6),
                    spread=round(estimate.spread, 6),
                    processes=estimate.count,
                    versions=versions(self.device, self.settings),
                )
            )
        if any(entry.written for entry in entries):
            self.baselines.write()


def versions(device: DeviceInfo, settings: Settings) -> dict[str, str]:
    """Return the machine's fingerprint without the long list of instruction sets."""
    return {name: value for name, value in fingerprint(device, settings.timing).items() if name != "isa"}


def default_problems(device_type: str) -> list[Problem]:
    """Return the problems of a gate without named ones: one for each regime of kernels, a minute in total."""
    if device_type == "cpu":
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        sizes = [(f32, 256, 512, 512), (f32, 16, 1024, 1024), (f32, 129, 257, 383), (f16, 128, 256, 512), (bf16, 256, 512, 512)]
        return [
            *(Problem.mm(m, n, k, dtype=dtype, device_type="cpu") for dtype, m, n, k in sizes),
            Problem.addmm(128, 384, 512, dtype=f32, device_type="cpu"),
            Problem.bmm(8, 64, 128, 96, dtype=f32, layout="nn", device_type="cpu"),
        ]
    large = [(1, 4096, 4096), (32, 6144, 4096), (384, 4096, 4096), (3072, 4096, 4096), (256, 256, 32768), (999, 1001, 1000)]
    return [
        *(Problem.mm(m, n, k, dtype=torch.bfloat16, device_type=device_type) for m, n, k in large),
        Problem.mm(2048, 2048, 2048, dtype=torch.float16, layout="nn", device_type=device_type),
        Problem.mm(1024, 1024, 1024, dtype=torch.float32, device_type=device_type),
        Problem.addmm(1024, 3072, 768, dtype=torch.bfloat16, device_type=device_type),
        Problem.bmm(64, 256, 256, 128, dtype=torch.bfloat16, layout="nn", device_type=device_type),
    ]
