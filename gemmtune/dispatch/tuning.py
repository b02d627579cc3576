"""Tuning ahead of the calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import settings as settings_module
from ..device import DeviceInfo, detect
from ..errors import InvalidProblemError
from ..problem import Problem
from ..selector.candidates import candidates_for
from ..selector.machine import ensure_limits
from ..selector.precompile import Compilation
from ..selector.progress import Progress, Silent, progress_for
from ..selector.remote import measuring_kind
from ..selector.result import ProblemResult
from ..selector.select import select
from ..selector.tuning_result import TuningResult
from ..settings import Settings
from ..store.store import Store, open_store
from ..workers.pool import WORKERS
from .plan import forget_plans

__all__ = ["tune"]


def tune(
    problem: Problem | Iterable[Problem],
    *,
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
) -> TuningResult:
    """Find and remember the fastest right choice for one or several problems.

    What the store knows is not measured again, unless the settings say ``tune="force"``. Interrupting keeps what was measured.

    Args:
        problem: one Problem or several; all for the same device type.
        settings: instead of the settings in force.
        progress: True shows progress on standard error, False nothing; or an object of your own.
        device: such as ``cuda:1``; by default the current device of the problems' type.

    Returns:
        A result for each problem, in order. It prints as a table.

    Raises:
        UnavailableError: the device is not here.
        InvalidProblemError: problems for another device type than ``device``, or something that is no Problem.
    """
    problems = [problem] if isinstance(problem, Problem) or not isinstance(problem, Iterable) else list(problem)
    for p in problems:
        if not isinstance(p, Problem):
            raise InvalidProblemError(
                f"tune: expected a Problem or several, got {type(p).__name__}; make one with gemmtune.Problem.mm(m, n, k)"
            )
    if not problems:
        return TuningResult(())
    info = detect(device or problems[0].device_type)
    for p in problems:
        if p.device_type != info.torch_device.type:
            raise InvalidProblemError(f"tune: got a problem for {p.device_type} ({p}), but the device is {info.torch_device}")
    listener = progress if not isinstance(progress, bool) else progress_for() if progress else Silent()
    try:
        with settings_module.use(settings or settings_module.current()) as chosen:
            return TuningResult(tuple(_tuned(problems, info, chosen, open_store(chosen), listener)))
    finally:
        listener.close()
        forget_plans()


def _tuned(
    problems: Sequence[Problem], device: DeviceInfo, settings: Settings, store: Store, progress: Progress
) -> Iterable[ProblemResult]:
    """The results, in order. For a GPU, all problems compile in the background while the first ones are measured."""
    candidates = [candidates_for(p, device, settings) for p in problems]
    missing = [c for each in candidates if not each.problem.empty for c in each.stored(store).missing]
    if missing and settings.tune_in_subprocess:
        WORKERS.prepare(measuring_kind(device), 1)
    # On a CPU, compilers would disturb the measurements: there each problem compiles before it is measured.
    with Compilation(missing if device.type != "cpu" else (), settings) as compilation:
        for problem, each in zip(problems, candidates, strict=True):
            progress.begin(problem, len(problems))
            if not problem.empty:
                ensure_limits(problem, device, settings, store, progress)
            _, result = select(each, store, progress, compilation)
            progress.end(result)
            yield result
