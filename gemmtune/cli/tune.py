"""``gemmtune tune``: measure shapes and show the results."""

import functools
from collections.abc import Sequence
from typing import Any

import click
from rich.text import Text

from .. import settings
from ..device import DeviceInfo
from ..errors import StoreError
from ..integration.measured import in_models
from ..problem import Problem
from ..selector.range_result import RangeResult
from ..selector.result import ProblemResult, without_pick
from ..selector.table import TuningResult, renderables, summary_line
from ..settings import Settings
from ..store.store import open_store
from ..tuning.tune import retry_of, run_job
from ..tuning.tune import tune as run_tuning
from .asked import device_of, refuse_if_disabled, settings_changes
from .busy import busy_work, devices_here
from .files import STDOUT
from .fleet import device_type, jobs_of, run_watched, timing_in_models
from .output import is_quiet, note, write_json
from .printing import Results, kept_in_store, show, watched
from .shapes import problems_and_ranges
from .spec import Spec


def tune(
    *,
    shapes: tuple[str, ...],
    shapes_file: str | None,
    recorded: str | None,
    m_range: str | None,
    batch_invariant: bool,
    device: str | None,
    devices: str | None = None,
    ray: str | None = None,
    force: bool,
    again: bool,
    wait_quiet: bool,
    accept_busy: bool,
    budget_s: float | None,
    rows: int,
    json_file: str | None,
    **options: Any,
) -> None:
    """Find the fastest correct choice for each shape and remember it. ``options`` hold those for settings and for problems."""
    refuse_if_disabled()
    if (together := devices is not None or ray is not None) and (device is not None or budget_s is not None):
        raise click.UsageError("--devices and --ray: got --device or --budget too, expected none of them: whole jobs are dealt")
    info = None if together else device_of(device)
    changes = settings_changes(options) | _changes(force, wait_quiet, accept_busy)
    kind = device_type(devices, ray) if info is None else info.torch_device.type
    if again and not (shapes or shapes_file or recorded or m_range):
        more = {"batch_invariant": True} if batch_invariant else {}
        problems, ranges = busy_work(devices_here(devices, ray) if info is None else [info], changes | more, options)
        batch_invariant &= bool(ranges)
    else:
        problems, ranges = problems_and_ranges(Spec(device_type=kind, **options), shapes, shapes_file, recorded, m_range)
    _check_ranges(batch_invariant, budget_s, ranges)
    if recorded is not None and changes.get("timing") is None:
        changes["timing"] = timing_in_models(devices, ray, kind) if info is None else in_models(settings.current(), info).timing
    shown = None if json_file == STDOUT else rows
    with settings.patch(**changes, **({"batch_invariant": True} if batch_invariant else {})) as chosen:
        if info is None:
            result, tables = _together(problems, ranges, chosen, devices, ray, shown, again)
        else:
            result, tables = _one_by_one(problems, ranges, chosen, info, shown, again, budget_s)
    if json_file != STDOUT:
        _show_end(result, tables)
    write_json(json_file, [*result.to_json(), *(table.to_json() for table in tables)])
    _require_all(result, chosen)


def _show_end(result: TuningResult, tables: Sequence[RangeResult]) -> None:
    """Print the summary of the single shapes, and the tables."""
    if len(result) > 1 and not is_quiet():
        show([Text(summary_line(result), style="bold")])
    show([Text(_line(table) if is_quiet() else str(table)) for table in tables])


def _check_ranges(batch_invariant: bool, budget_s: float | None, ranges: Sequence[object]) -> None:
    """Raise click.UsageError for options that need a range of M, or that fit none."""
    if batch_invariant and not ranges:
        raise click.UsageError("--batch-invariant: got no range of M, expected one, for instance 1..8192x6144x4096 or --m 1..8192")
    if budget_s is not None and ranges:
        raise click.UsageError("--budget: got a range of M too, expected single shapes: a table needs all its measurements")


def _one_by_one(
    problems: Sequence[Problem],
    ranges: Sequence[tuple[Problem, range]],
    chosen: Settings,
    info: DeviceInfo,
    rows: int | None,
    again: bool,
    budget_s: float | None,
) -> tuple[TuningResult, list[RangeResult]]:
    """Tune on one device. With ``rows``, print so many choices of each result as soon as it is known, all for 0."""
    if rows is not None and not is_quiet():
        show([f"device: {info.name} ({info.arch})"])
    place = str(info.torch_device)
    with watched(kept=kept_in_store(chosen)) as progress:
        listener = progress if rows is None else Results(progress, rows or None)
        result = run_tuning(problems, settings=chosen, progress=listener, device=place, again=again, budget_s=budget_s)
        found = (run_tuning(problem, m=m, settings=chosen, progress=progress, device=place, again=again) for problem, m in ranges)
        return result, [table for each in found for table in each]


def _together(
    problems: Sequence[Problem],
    ranges: Sequence[tuple[Problem, range]],
    chosen: Settings,
    devices: str | None,
    ray: str | None,
    rows: int | None,
    again: bool,
) -> tuple[TuningResult, list[RangeResult]]:
    """Tune on several devices. With ``rows``, print the results. Raises FleetError if jobs failed."""
    jobs = jobs_of(problems, ranges)
    result = run_watched(jobs, functools.partial(run_job, retry=retry_of(again=again)), chosen, devices, ray, keep=True)
    for line in (*result.disagreements, *(f"{name} left: {reason}" for name, reason in result.left.items())):
        note(f"warning: {line}")
    result.refuse_failures()
    found = [one for job in jobs for one in result.results(job)]
    singles = TuningResult(x for x in found if isinstance(x, ProblemResult))
    if rows is not None:
        show(renderables(singles, max_rows=rows or None))
    return singles, [x for x in found if isinstance(x, RangeResult)]


def _changes(force: bool, wait_quiet: bool, accept_busy: bool) -> dict[str, Any]:
    """Return the changes of settings that options without a setting's name ask for."""
    if wait_quiet and accept_busy:
        raise click.UsageError("--wait-quiet: got --accept-busy too, expected one of them")
    busy = {"busy": "wait"} if wait_quiet else {"busy": "accept"} if accept_busy else {}
    return busy | {"tune": "force" if force or settings.current().tune == "force" else "on_miss"}


def _require_all(result: TuningResult, chosen: Settings) -> None:
    """Raise NoValidChoicesError for the first problem without a choice, or StoreError if the results end with this process."""
    for problem in result:
        if problem.pick is None and not problem.problem.empty:
            raise without_pick(problem, chosen)
    if trouble := open_store(chosen).trouble:
        raise StoreError(f"{trouble.removesuffix('.')}. The results are not stored.")


def _line(found: RangeResult) -> str:
    """Return the line of a range with ``--quiet``."""
    return f"{found.rows_class}: {len(found.table.segments)} segments of M = {found.table.lo}..{found.table.hi}"
