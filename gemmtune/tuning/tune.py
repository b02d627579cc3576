"""Tuning ahead of the calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from .. import settings as settings_module
from ..device import DeviceInfo, detect
from ..dispatch.asked import asked_rows
from ..dispatch.host import host_us
from ..dispatch.ready import forget_plans
from ..errors import InvalidProblemError
from ..problem import Problem
from ..problem.rows import RowClass, classes_over
from ..selector.candidates import Candidates, candidates_for
from ..selector.precompile import Compilation
from ..selector.progress import Progress, progress_for
from ..selector.range_result import RangeResult, RangesResult
from ..selector.ranges import tune_rows
from ..selector.remote import prepare_measuring
from ..selector.result import ProblemResult
from ..selector.segments import rows_of
from ..selector.select import ensure_limits, select
from ..selector.tuning_result import TuningResult
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store, open_store
from .named import Operand, Operation, stated_problem

SETTINGS = {field.name for field in dataclasses.fields(Settings)}
MOST_RECORDED = 16
"""So many of the Ms that calls have asked for are anchors of a table, the smallest ones."""


@overload
def tune(
    what: Problem | Iterable[Problem] | Operation,
    *operands: Operand,
    m: None = None,
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
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
    batch_invariant: bool = False,
    **arguments: Any,
) -> RangesResult: ...


def tune(
    what: Problem | Iterable[Problem] | Operation,
    *operands: Operand,
    m: range | tuple[int, int] | None = None,
    settings: Settings | None = None,
    progress: bool | Progress = True,
    device: str | None = None,
    batch_invariant: bool = False,
    **arguments: Any,
) -> TuningResult | RangesResult:
    """Find and remember the fastest right choice for one or several problems, or for all their numbers of rows.

        tune("mm", a, b)    tune(gemmtune.mixed_mm, a, weight)    tune(Problem.mm(16, 4096, 4096))    tune([problem, …])

    What the store knows is not measured again, unless the settings say ``tune="force"``. Interrupting keeps what was measured.

    Args:
        what: one Problem or several, all for the same device type; or the name of an operation, or the operation itself, for the
            problem of a call with these ``operands`` and ``arguments``, which is not done.
        m: the numbers of rows, as ``range(1, 8193)`` or (1, 8192), for all of which a problem stands: it becomes a table of
            intervals of M, each with its choice, measured at some Ms, proved over the interval, and serving all calls in the range.
        settings: instead of the settings in force.
        progress: True shows progress on standard error, False nothing; or an object of your own.
        device: such as ``cuda:1``; by default that of the operands or the current one.
        batch_invariant: with ``m``, one choice for all these, as the setting of that name asks of calls.

    Returns:
        A result for each problem, in order. It prints as a table; with ``m`` as bars of segments.

    Raises:
        UnavailableError: the device is not here.
        InvalidProblemError: problems for another device type, what is no Problem, or a call that torch alone can do, or nobody.
    """
    problems, info = _asked(what, operands, arguments, device)
    if batch_invariant and m is None:
        raise InvalidProblemError("tune: got batch_invariant without m, expected the numbers of rows too, such as m=range(1, 8193)")
    listener = progress if not isinstance(progress, bool) else progress_for() if progress else Progress()
    chosen = settings or settings_module.current()
    chosen = dataclasses.replace(chosen, batch_invariant=batch_invariant or chosen.batch_invariant)
    try:
        with settings_module.use(chosen):
            return _tuned_problems(problems, None if m is None else rows_of(m), info, chosen, listener)
    finally:
        listener.close()
        forget_plans()


def _tuned_problems(
    problems: Sequence[Problem], rows: range | None, device: DeviceInfo, settings: Settings, progress: Progress
) -> TuningResult | RangesResult:
    store = open_store(settings)
    if rows is None:
        candidates = [candidates_for(p, device, settings, host_us=host_us(device, settings)) for p in problems]
        return TuningResult(tuple(tuned(candidates, store, progress)))
    classes = dict.fromkeys(x for p in problems for x in classes_over(p, rows))
    return RangesResult(tuple(_tuned_rows(x, rows, device, settings, store, progress) for x in classes))


def _tuned_rows(
    rows_class: RowClass, rows: range, device: DeviceInfo, settings: Settings, store: Store, progress: Progress
) -> RangeResult:
    """The table of a class, the Ms that calls have asked for among its anchors."""
    recorded = asked_rows(rows_class, fingerprint_text(device, settings.timing), store)[:MOST_RECORDED]
    host = host_us(device, settings)
    return tune_rows(rows_class, rows, device, settings, store, progress, host_us=host, recorded=recorded, limits=True)


def _asked(
    what: Problem | Iterable[Problem] | Operation, operands: Sequence[Operand], arguments: Mapping[str, Any], device: str | None
) -> tuple[list[Problem], DeviceInfo]:
    """The problems that ``tune`` is asked about, and their device."""
    for name in arguments:
        if name in SETTINGS:
            raise InvalidProblemError(f"tune: {name} is a setting; gemmtune.settings.patch({name}=...) sets it for a while")
    if isinstance(what, str) or callable(what):
        problem, place = stated_problem("tune", what, operands, arguments)
        return [problem], _device_for([problem], device or str(place))
    if operands or arguments:
        raise InvalidProblemError("tune: got operands beside a Problem, which has their layouts; expected Problems alone")
    problems = [what] if isinstance(what, Problem) or not isinstance(what, Iterable) else list(what)
    for p in problems:
        if not isinstance(p, Problem):
            raise InvalidProblemError(
                f"tune: expected a Problem or several, got {type(p).__name__}; make one with gemmtune.Problem.mm(m, n, k), or give "
                "an operation's name and its tensors"
            )
    return problems, _device_for(problems, device)


def _device_for(problems: Sequence[Problem], name: str | None) -> DeviceInfo:
    """The device of that name, or else the one that the problems are for."""
    device = detect(name or (problems[0].device_type if problems else None))
    for p in problems:
        if p.device_type != device.torch_device.type:
            raise InvalidProblemError(f"tune: got a problem for {p.device_type} ({p}), but the device is {device.torch_device}")
    return device


def tuned(candidates: Sequence[Candidates], store: Store, progress: Progress, *, limits: bool = True) -> Iterable[ProblemResult]:
    """The results, in order. All problems compile in the background, for a GPU while the first ones are measured.

    Without ``limits`` those of the machine are not measured: only tables show them.
    """
    missing = [c for each in candidates if not each.problem.empty for c in each.stored(store, reliable=True).missing]
    if not candidates:
        return
    device, settings = candidates[0].device, candidates[0].settings
    if missing and settings.tune_in_subprocess:
        prepare_measuring(device, settings)
    with Compilation(missing, settings) as compilation:
        for place, each in enumerate(candidates):
            progress.begin(each.problem, len(candidates))
            if device.type == "cpu" and not place:  # compilers would disturb the measurements
                compilation.wait_for_all(functools.partial(progress.stage, "compile"))
            if limits and not each.problem.empty:
                ensure_limits(each.problem, device, settings, store, progress)
            _, result = select(each, store, progress, compilation, reliable=True)
            progress.end(result)
            yield result
