"""Tuning of problems and ranges of M ahead of calls."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from .. import settings as settings_module
from ..choice import Refusal
from ..device import DeviceInfo, detect
from ..dispatch.asked import asked_rows
from ..dispatch.host import host_us
from ..dispatch.ready import forget_plans
from ..errors import DISABLED, InvalidProblemError
from ..fleet.job import Job, JobResult
from ..fleet.rosters import Devices, run_fleet
from ..problem import Problem
from ..problem.operations import ROLES
from ..problem.rows import RowClass, classes_over
from ..selector.candidates import Candidates, Retry, candidates_for
from ..selector.log import warn_if_busy
from ..selector.machine_limits import MachineLimits
from ..selector.precompile import Compilation
from ..selector.progress import Progress, progress_for
from ..selector.range_result import RangeResult, RangesResult
from ..selector.ranges import tune_rows
from ..selector.remote import prepare_measuring
from ..selector.result import ProblemResult
from ..selector.segments import rows_of
from ..selector.select import select
from ..selector.table import TuningResult
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from ..timing.memory import require_memory_to_tune
from ..warning import warn
from .brought import with_surviving
from .named import Operand, Operation, stated_problem

SETTINGS = {field.name for field in dataclasses.fields(Settings)}
MOST_RECORDED = 16
"""Recorded values of M that a table samples, the smallest ones."""


@overload
def tune(
    what: Problem | Iterable[Problem] | Operation,
    *operands: Operand,
    m: None = None,
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
    devices: Devices | None = None,
    ray: str | None = None,
    again: bool = False,
    budget_s: float | None = None,
    **arguments: Any,
) -> TuningResult: ...


@overload
def tune(
    what: Problem | Iterable[Problem] | Operation,
    *operands: Operand,
    m: range | tuple[int, int],
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
    devices: Devices | None = None,
    ray: str | None = None,
    batch_invariant: bool = False,
    again: bool = False,
    **arguments: Any,
) -> RangesResult: ...


def tune(
    what: Problem | Iterable[Problem] | Operation,
    *operands: Operand,
    m: range | tuple[int, int] | None = None,
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
    devices: Devices | None = None,
    ray: str | None = None,
    batch_invariant: bool = False,
    again: bool = False,
    budget_s: float | None = None,
    **arguments: Any,
) -> TuningResult | RangesResult:
    """Find and store the fastest correct choice for problems, or for a range of M. Stored measurements are not repeated.

        tune("mm", a, b)    tune(gemmtune.mixed_mm, a, weight)    tune(Problem.mm(16, 4096, 4096))    tune([problem, …])

    Args:
        what: Problems for one device type, or an operation with ``operands`` and ``arguments`` of a call, which is not made.
        m: a range of M, as ``range(1, 8193)`` or (1, 8192), for one table of intervals of M that serves every call in the range.
        progress: True prints progress on standard error, False prints none. Or a Progress of your own.
        device, devices, ray: a device such as ``cuda:1``; ``all`` GPUs of this host, numbers such as ``0,1``, or ``cpu``; or the
            address of a Ray cluster, or ``auto`` (needs the extra ``gemmtune[fleet]``).
        batch_invariant, again: choices of one reduction class with ``m``; measure again what was measured on a busy machine.
        budget_s: seconds for all problems, without ``m``. ``ProblemResult.partial`` says what another tuning adds.

    Returns one result for each problem, in order, which prints as a table, or with ``m`` as bars of segments. Raises
    UnavailableError for a missing device, InvalidProblemError for what cannot be tuned, ShortMemoryError for operands that do not
    fit into memory, FleetError for jobs that failed.
    """
    together = devices is not None or ray is not None
    _check_arguments(together, device, m is not None, batch_invariant, budget_s)
    problems, place = _asked(what, operands, arguments)
    info = None if together else _device_for(problems, device or place)
    chosen = with_surviving(settings or settings_module.current())
    chosen = dataclasses.replace(chosen, batch_invariant=batch_invariant or chosen.batch_invariant)
    if chosen.disable:
        warn(f"tune: nothing is tuned, because {DISABLED}")
        return TuningResult(map(_untuned, problems)) if m is None else RangesResult()
    rows, retry = None if m is None else rows_of(m), retry_of(again=again)
    with _listening(progress) as listener, settings_module.use(chosen):
        if info is None:
            return _tuned_together(problems, rows, devices, ray, chosen, listener, retry)
        return _tuned_problems(problems, rows, info, chosen, listener, retry, budget_s)


@contextlib.contextmanager
def _listening(progress: bool | Progress) -> Iterator[Progress]:
    """Yield the listener of a tuning. At the end, close it and let calls find what was tuned."""
    listener = progress if not isinstance(progress, bool) else progress_for() if progress else Progress()
    try:
        yield listener
    finally:
        listener.close()
        forget_plans()


def _check_arguments(together: bool, device: str | None, has_range: bool, batch_invariant: bool, budget_s: float | None) -> None:
    """Raise InvalidProblemError for arguments that a fleet does not take, that need a range of M, or that fit none."""
    if together and (device is not None or budget_s is not None):
        raise InvalidProblemError("tune: got device or budget_s beside devices or ray, expected none: a fleet deals whole jobs")
    if batch_invariant and not has_range:
        raise InvalidProblemError("tune: got batch_invariant without m, expected the numbers of rows too, such as m=range(1, 8193)")
    if budget_s is not None and (has_range or not budget_s > 0):
        expected = "none for a range of M, whose table needs all its measurements" if has_range else "a number of seconds above 0"
        raise InvalidProblemError(f"tune: budget_s: got {budget_s}, expected {expected}")


def _untuned(problem: Problem) -> ProblemResult:
    """Return the result of a problem where the settings disable gemmtune."""
    refused = (Refusal(name="every choice", reason=f"{DISABLED}: torch runs"),)
    return ProblemResult(problem=problem, outcomes=(), refusals=refused, pick=None, limit_us=None, seconds=0.0, source="store")


def _tuned_problems(
    problems: Sequence[Problem],
    rows: range | None,
    device: DeviceInfo,
    settings: Settings,
    progress: Progress,
    retry: Retry,
    budget_s: float | None = None,
) -> TuningResult | RangesResult:
    if rows is None:
        candidates, ends = [], None if budget_s is None else time.monotonic() + budget_s
        for place, p in enumerate(problems):
            progress.stage("list choices", place, len(problems))
            candidates.append(candidates_for(p, device, settings, host_us=host_us(device, settings)))
        return TuningResult(tuple(tuned(candidates, progress, retry=retry, ends=ends)))
    classes = dict.fromkeys(x for p in problems for x in classes_over(p, rows))
    return RangesResult(tuple(_tuned_rows(x, rows, device, settings, progress, retry) for x in classes))


def tune_in_class(rows_class: RowClass, rows: range, settings: Settings, *, agreed: str, progress: bool) -> RangeResult:
    """Make the batch-invariant table of a class of problems as ``tune`` does, of the reduction class ``agreed`` unless it is empty.

    Raises NoValidChoicesError if no choice has that reduction class for all rows.
    """
    device = detect(rows_class.problem.device_type)
    chosen = dataclasses.replace(with_surviving(settings), batch_invariant=True)
    with _listening(progress) as listener, settings_module.use(chosen):
        return _tuned_rows(rows_class, rows, device, chosen, listener, retry_of(again=False), agreed)


def _tuned_rows(
    rows_class: RowClass,
    rows: range,
    device: DeviceInfo,
    settings: Settings,
    progress: Progress,
    retry: Retry,
    agreed: str = "",
) -> RangeResult:
    """Make the table of a class. Recorded values of M are among the samples."""
    recorded = asked_rows(rows_class, fingerprint_text(device, settings.timing), open_store(settings))[:MOST_RECORDED]
    tune = functools.partial(tune_rows, host_us=host_us(device, settings), recorded=recorded, limits=True, retry=retry)
    return tune(rows_class, rows, device, settings, progress, agreed=agreed)


def retry_of(*, again: bool) -> Retry:
    """Return what a tuning measures again of a busy machine."""
    return "disturbed" if again else "failed"


def _tuned_together(
    problems: Sequence[Problem],
    rows: range | None,
    devices: Devices | None,
    ray: str | None,
    settings: Settings,
    progress: Progress,
    retry: Retry,
) -> TuningResult | RangesResult:
    """Tune on several devices. The results are in the order of the problems."""
    jobs = Job.alone(problems) if rows is None else Job.tables(problems, rows)
    found = run_fleet(jobs, functools.partial(run_job, retry=retry), settings, progress, devices=devices, ray=ray)
    found.refuse_failures()
    if rows is None:
        wanted = [Job(problem=problem) for problem in problems]
        return TuningResult(x for job in wanted for x in found.results(job) if isinstance(x, ProblemResult))
    return RangesResult(x for job in jobs for x in found.results(job) if isinstance(x, RangeResult))


def run_job(job: Job, place: str, settings: Settings, retry: Retry) -> JobResult:
    """Tune one job of a fleet on a device, such as ``cuda:1``, and store it. It runs in a process of its own."""
    device, progress = detect(place), Progress()
    with settings_module.use(settings):
        if job.rows is not None:
            return _tuned_rows(job.rows_class, job.rows, device, settings, progress, retry)
        return _tuned_problems([job.problem], None, device, settings, progress, retry)[0]


def _asked(
    what: Problem | Iterable[Problem] | Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]
) -> tuple[list[Problem], str | None]:
    """Return the problems to tune, and the place of the operands if there are any."""
    for name in arguments:
        if name in SETTINGS and name not in ROLES:  # grouped_mm has rows=
            raise InvalidProblemError(f"tune: {name} is a setting; gemmtune.settings.patch({name}=...) sets it for a while")
    if isinstance(what, str) or callable(what):
        problem, place = stated_problem("tune", what, operands, arguments)
        return [problem], str(place)
    if operands or arguments:
        raise InvalidProblemError("tune: got operands beside a Problem, which has their layouts; expected Problems alone")
    problems = [what] if isinstance(what, Problem) or not isinstance(what, Iterable) else list(what)
    for p in problems:
        if not isinstance(p, Problem):
            raise InvalidProblemError(
                f"tune: expected a Problem or several, got {type(p).__name__}; make one with gemmtune.Problem.mm(m, n, k), or give "
                "an operation's name and its tensors"
            )
    return problems, None


def _device_for(problems: Sequence[Problem], name: str | None) -> DeviceInfo:
    """Return the named device, or else that of the problems."""
    device = detect(name or (problems[0].device_type if problems else None))
    for p in problems:
        if p.device_type != device.torch_device.type:
            raise InvalidProblemError(f"tune: got a problem for {p.device_type} ({p}), but the device is {device.torch_device}")
    return device


def tuned(
    candidates: Sequence[Candidates],
    progress: Progress,
    *,
    limits: bool = True,
    retry: Retry = "failed",
    ends: float | None = None,
) -> Iterable[ProblemResult]:
    """Yield the results in order. All problems compile in the background, for a GPU while the first ones are measured.

    Without ``limits``, the limits of the machine are measured only if a time looks impossible. Printed tables need them. Before the
    time ``ends``, each problem has an equal share of the rest, in which a CPU also compiles its kernels.
    """
    if not candidates:
        return
    device, settings = candidates[0].device, candidates[0].settings
    store = open_store(settings)
    missing = [c for each in candidates if not each.problem.empty for c in each.stored(store, retry=retry).missing]
    require_memory_to_tune((c.problem for c in missing), device, settings)
    if missing and settings.tune_in_subprocess:
        prepare_measuring(device, settings)
    machine = MachineLimits(device, settings, store)
    with Compilation(() if ends is not None and device.type == "cpu" else missing, settings) as compilation:
        for place, each in enumerate(candidates):
            progress.begin(each.problem, len(candidates))
            if ends is not None:
                each = each.within((ends - time.monotonic()) / (len(candidates) - place))  # noqa: PLW2901 - with its deadline
            if device.type == "cpu" and not place:  # compilers would disturb the measurements
                compilation.wait_for_all(functools.partial(progress.stage, "compile"))
            if limits and not each.problem.empty and not each.late:
                machine.ensure(each.problem, progress, again=bool(missing))
            _, result = select(each, progress, compilation, retry=retry, limits=machine)
            warn_if_busy(result)
            progress.end(result)
            yield result
