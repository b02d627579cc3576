"""A run of the suite: finds the GEMM, enumerates the cases, and judges each once."""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from ... import settings
from ...device import detect
from ...errors import ConformanceError, SubjectError
from ...timing.memory import require_memory
from ..bench.outcome import CaseStatus, Record
from ..cases.case import Case
from ..cases.sampling import sample_order
from ..cases.scope import Level, Scope
from ..options import RunOptions
from ..properties.property import Property
from ..properties.table import PROPERTIES, property_named
from .files import CaseList, cases_to_repeat
from .isolation import Ground, InProcessRunner, IsolatedRunner, Runner, WalledRunner

COSTS = {CaseStatus.CRASHED: 1, CaseStatus.TIMED_OUT: 5}
"""Cost of a bad case. A crash costs a worker process, and a hang the time limit of a case as well."""
MOST_COSTS = 20
"""Cost at which the remaining cases of a property are not run."""
MOST_COSTS_OF_ALL = 100
"""Cost at which no further case of the run is run."""
EXAMINED = 3
"""Failing cases that are diagnosed for each property, and for each operation and dtype. Others are only counted."""
PATIENCE = 20
"""Refused cases for each executed one above which no other case takes the place of a refused one."""
DRAWN = {Level.SMOKE: 12, Level.FULL: 60, Level.EXHAUSTIVE: 500}
OURS = ("backend:", "own:", "gemmtune.")
"""Beginnings of the names of our own GEMMs, which deceive nobody."""
PAST_TIME = "not run: the time was over"
LEAST_EXECUTED = {Level.SMOKE: 40, Level.FULL: 80, Level.EXHAUSTIVE: 160}
"""Minimum executed cases if the options select a whole level. A smaller number means that the enumeration went wrong."""


def find_ground(options: RunOptions) -> tuple[Ground, Runner]:
    """Return the GEMM's description and the runner for its cases. Raises SubjectError, TraitsError or UnavailableError."""
    wanted = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.partition(":")[0] not in ("cpu", "cuda"):
        raise ConformanceError(f"device: got {wanted!r}, expected cpu, cuda or cuda:N")
    device = wanted if wanted == "cpu" else str(detect(wanted).torch_device)
    runner = runner_for(options, device)
    try:
        ground = runner.describe()
        if options.device is None and device != "cpu" and ground.traits.devices == ("cpu",):
            runner.close()
            device = "cpu"
            runner = runner_for(options, device)
            ground = runner.describe()
        traits, name, kind = ground.traits, ground.name, ground.device_type
        if kind not in traits.devices:
            raise SubjectError(
                f"{name}: got device {kind}, expected one that it declares: {', '.join(traits.devices)}; choose it with --device"
            )
        if ground.sm and traits.sms is not None and ground.sm not in traits.sms:
            sms = ", ".join(map(str, traits.sms))
            raise SubjectError(f"{name}: got {ground.device_name}, SM {ground.sm}, expected one of its declared SMs: {sms}")
        if options.sanitize:
            _check_sanitizer(device)
    except BaseException:
        runner.close()
        raise
    return ground, runner


def runner_for(options: RunOptions, device: str) -> Runner:
    """Return the runner for the cases of a run on ``device``."""
    if options.in_process:
        return InProcessRunner(options.spec, device)
    if options.trusted or options.spec.target.startswith(OURS):
        return IsolatedRunner(options.spec, device, timeout_s=options.timeout)
    return WalledRunner(options.spec, device, timeout_s=options.timeout)


def _check_sanitizer(device: str) -> None:
    if device == "cpu":
        raise ConformanceError("sanitize: got device cpu, expected a CUDA device: compute-sanitizer checks only GPU code")


def _check_selected(scope: Scope) -> None:
    """Raise ConformanceError if an option selects nothing that the GEMM declares."""
    all_ops = dataclasses.replace(scope, ops=())
    every = dataclasses.replace(scope, dtypes=(), layouts=())
    dtypes = tuple(dict.fromkeys(dtype for op in scope.tested_ops for dtype in every.tested_dtypes(op)))
    for name, asked, declared in (
        ("op", scope.ops, all_ops.tested_ops), ("dtype", scope.dtypes, dtypes), ("layout", scope.layouts, every.tested_kinds),
    ):  # fmt: skip
        if asked and not set(asked) & set(declared):
            remedy = f"; declare more with --trait {name}s=…"
            raise ConformanceError(
                f"{name}: got {', '.join(asked)}, expected what the GEMM declares: {', '.join(declared)}{remedy}"
            )


class Run:
    """Judge of cases. Unless ``runner`` is given, the first case creates it."""

    def __init__(self, options: RunOptions, ground: Ground, runner: Runner | None = None) -> None:
        self.options = options
        self.ground = ground
        self.scope = Scope(
            traits=ground.traits,
            device_type=ground.device_type,
            level=Level.of(options.level),
            ops=options.op,
            dtypes=options.dtype,
            layouts=options.layout,
        )
        self.skips = CaseList.read(options.skips_file)
        self.xfails = CaseList.read(options.xfails_file)
        self._repeated = cases_to_repeat(options.repro)
        for case in self._repeated:
            property_named(case.property_name)
            require_memory(f"repro: {case.id}", case.least_bytes, detect(ground.device_type))
        if not options.repro:
            _check_selected(self.scope)
        self._begun_s: float | None = None
        self._runner = runner
        self._costs: Counter[str] = Counter()
        self._examined: Counter[str | tuple[str, str]] = Counter()
        self._taken: Counter[bool] = Counter()

    @classmethod
    def open(cls, options: RunOptions) -> "Run":
        """Open the run of the options: load the GEMM and read its files. Raises GemmtuneError if that fails."""
        if options.save_failing is not None:
            try:
                Path(options.save_failing).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConformanceError(
                    f"save_failing: cannot make the folder {options.save_failing!r}: {error.strerror}"
                ) from error
        ground, runner = find_ground(options)
        try:
            return cls(options, ground, runner)
        except BaseException:
            runner.close()
            raise

    # Cases

    def cases(self) -> list[Case]:
        """Return the cases that the options select, property by property, each once."""
        return self._repeated if self.options.repro else list(self._ordered[: self.options.max_cases])

    @functools.cached_property
    def everything(self) -> tuple[Case, ...]:
        """All cases before sampling."""
        return tuple(self._enumerated(self.scope, self.options.properties))

    @functools.cached_property
    def _ordered(self) -> tuple[Case, ...]:
        return tuple(sample_order(self.everything, seed=self.options.seed or 0)) if self.options.sampled else self.everything

    @functools.cached_property
    def _spare(self) -> Mapping[Case, tuple[Case, ...]]:
        """Cases that may take the place of each selected one: an equal part of those of its property that are left.

        Neighbours in sample order differ in operation and dtype.
        """
        most, found = self.options.max_cases, dict[Case, tuple[Case, ...]]()
        if most is None or self.options.repro:
            return found
        left = [case for case in self._ordered[most:] if self.skips.reason(case.id) is None]
        for name in {case.property_name for case in left}:
            chosen, own = ([x for x in cases if x.property_name == name] for cases in (self._ordered[:most], left))
            size = -(-len(own) // max(len(chosen), 1))
            found |= {case: tuple(own[i * size : (i + 1) * size]) for i, case in enumerate(chosen)}
        return found

    def drawn_properties(self) -> tuple[Property, ...]:
        """Return the properties for which further cases are drawn."""
        options = self.options
        if options.repro or (options.max_cases is not None and options.max_examples is None):
            return ()
        asked = (p for p in PROPERTIES if p.drawn and (not options.properties or p.name in options.properties))
        return tuple(p for p in asked if p.needs(self.scope) is None and any(True for _ in p.cases(self.scope)))

    def stale_lines(self, ids: set[str]) -> list[str]:
        """Return a complaint for each line that matches none of ``ids`` and no case of the GEMM at any level."""
        left = [case_list.unmatched(ids) for case_list in (self.skips, self.xfails)]
        if any(case_list.lines for case_list in left):
            widest = dataclasses.replace(self.scope, level=Level.EXHAUSTIVE, ops=(), dtypes=(), layouts=())
            known = [case.id for case in self._enumerated(widest, ())]
            left = [case_list.unmatched(known) for case_list in left]
        return [text for case_list in left for text in case_list.complaints()]

    @property
    def lists_are_strict(self) -> bool:
        """True if a line that matches no case is an error."""
        return self.options.strict_lists or settings.in_continuous_integration()

    @property
    def max_examples(self) -> int:
        """Number of cases drawn for each property."""
        return self.options.max_examples or DRAWN[self.scope.level]

    def least_executed(self, *, narrowed: bool) -> int:
        """Return the minimum number of executed cases: one if anything narrowed the level."""
        if self.options.min_executed is not None:
            return self.options.min_executed
        return 1 if narrowed or self.options.narrowed else LEAST_EXECUTED[self.scope.level]

    @staticmethod
    def _enumerated(scope: Scope, properties: Collection[str]) -> Iterator[Case]:
        seen: set[str] = set()
        for candidate in PROPERTIES:
            if candidate.needs(scope) is not None or (properties and candidate.name not in properties):
                continue
            for case in candidate.cases(scope):
                if (name := case.id) not in seen:
                    seen.add(name)
                    yield case

    # Judging

    def judge(self, case: Case, *, drawn: bool = False) -> Record:
        """Run a case. Skip it if it is listed to be skipped, or if its property has ended."""
        reason = self.skips.reason(case.id) or self.ended(case.property_name)
        if reason is not None:
            return Record(case=case, outcome=None, reason=reason, drawn=drawn)
        if self._runner is None:
            self._runner = runner_for(self.options, self.ground.device)
        sorts = (case.property_name, (case.op, case.dtype))
        outcome = self._runner.run(case, examine=bool(self._repeated) or any(self._examined[sort] < EXAMINED for sort in sorts))
        self._costs[case.property_name] += COSTS.get(outcome.status, 0)
        self._examined.update(sorts if outcome.status is CaseStatus.FAILED else ())
        record = Record(case=case, outcome=outcome, known=self.xfails.reason(case.id), drawn=drawn)
        self._taken[record.executed] += 1
        return record

    def judge_or_replace(self, case: Case, change: Callable[[Case], Case] = lambda case: case) -> list[Record]:
        """Run a case and, as long as the GEMM refuses, others of its property that a sample left out. Return all records.

        Args:
            case: a case of the run.
            change: what is done with each case before it runs.
        """
        records = [self.judge(change(case))]
        for other in self._spare.get(case, ()):
            if not records[-1].refused or not self.replaces_refused or self.ended(other.property_name) is not None:
                break
            records.append(self.judge(change(other)))
        return records

    @property
    def replaces_refused(self) -> bool:
        """True as long as another case for a refused one may be worth its time: the GEMM does not refuse nearly all."""
        return self._taken[False] <= PATIENCE * (self._taken[True] + 1)

    def established(self, property_name: str) -> bool:
        """Return True if cases of the property have failed in this process, so that drawing further ones is of no use."""
        return self._examined[property_name] > 0

    def ended(self, property_name: str) -> str | None:
        """Return the reason for running no more cases of a property, or None: out of time, or too many crashes."""
        now_s, most_s = time.monotonic(), self.options.max_seconds
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        if most_s is not None and now_s > self._begun_s + most_s:
            return f"{PAST_TIME} ({most_s:g} s)"
        if self._costs[property_name] >= MOST_COSTS or self._costs.total() >= MOST_COSTS_OF_ALL:
            return "not run: too many cases have crashed or hung before"
        return None

    def close(self) -> None:
        """End the worker process."""
        if self._runner is not None:
            self._runner.close()
