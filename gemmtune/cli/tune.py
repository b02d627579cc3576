"""``gemmtune tune``: measure shapes and show the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.text import Text

from .. import settings
from ..errors import NoValidChoicesError
from ..integration.measured import in_models
from ..problem import Problem
from ..selector.range_result import RangeResult
from ..selector.result import Outcome, remedy_for
from ..selector.table import summary_line
from ..selector.tuning_result import TuningResult
from ..tuning.tune import tune as run_tuning
from .asked import device_of, refuse_if_disabled, settings_changes
from .output import STDOUT, is_quiet, write_json
from .printing import Results, show, watched
from .recording import recorded_problems
from .shapes import parse_rows, range_of_word, some_problems_of
from .spec import Spec


def tune(
    *,
    shapes: tuple[str, ...],
    shapes_file: str | None,
    recorded: str | None,
    m_range: str | None,
    batch_invariant: bool,
    device: str | None,
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
    info = device_of(device)
    changes = settings_changes(options) | {"tune": "force" if force or settings.current().tune == "force" else "on_miss"}
    changes |= _busy_change(wait_quiet, accept_busy)
    problems, ranges = _problems_and_ranges(
        Spec(device_type=info.torch_device.type, **options), shapes, shapes_file, recorded, m_range
    )
    if batch_invariant and not ranges:
        raise click.UsageError("--batch-invariant: got no range of M, expected one, for instance 1..8192x6144x4096 or --m 1..8192")
    if budget_s is not None and ranges:
        raise click.UsageError("--budget: got a range of M too, expected single shapes: a table needs all its measurements")
    if recorded is not None and changes.get("timing") is None:
        changes["timing"] = in_models(settings.current(), info).timing
    if json_file != STDOUT and not is_quiet():
        show([f"device: {info.name} ({info.arch})"])
    with settings.patch(**changes) as chosen, watched(kept=f"measurements are kept in {chosen.store_file}") as progress:
        place = str(info.torch_device)
        listener = progress if json_file == STDOUT else Results(progress, rows or None)
        result = run_tuning(problems, settings=chosen, progress=listener, device=place, again=again, budget_s=budget_s)
        tables = [
            found
            for problem, m in ranges
            for found in run_tuning(
                problem, m=m, settings=chosen, progress=progress, device=place, batch_invariant=batch_invariant, again=again
            )
        ]
    if json_file != STDOUT:
        if len(result) > 1 and not is_quiet():
            show([Text(summary_line(result), style="bold")])
        show([Text(_line(table) if is_quiet() else str(table)) for table in tables])
    write_json(json_file, [*result.to_json(), *(table.to_json() for table in tables)])
    _refuse_without_choices(result, chosen)


def _busy_change(wait_quiet: bool, accept_busy: bool) -> dict[str, Any]:
    """Return the change of settings for a busy machine."""
    if wait_quiet and accept_busy:
        raise click.UsageError("--wait-quiet: got --accept-busy too, expected one of them")
    return {"busy": "wait"} if wait_quiet else {"busy": "accept"} if accept_busy else {}


def _refuse_without_choices(result: TuningResult, chosen: settings.Settings) -> None:
    """Raise NoValidChoicesError for a problem without a pick."""
    for problem in result:
        if problem.pick is None and not problem.problem.empty:
            left_out = [(o.name, o.status.value, o.reason) for o in (*problem.outcomes, *map(Outcome.of_refusal, problem.refusals))]
            raise NoValidChoicesError(str(problem.problem), left_out, remedy_for(problem.outcomes, chosen))


def _problems_and_ranges(
    spec: Spec, shapes: Sequence[str], shapes_file: str | None, recorded: str | None, m_range: str | None
) -> tuple[list[Problem], list[tuple[Problem, range]]]:
    """Return the problems to tune, and the problems whose M represents a range."""
    problems = recorded_problems(recorded, spec.device_type) if recorded is not None else []
    found = {word: range_of_word(word, spec) for word in shapes}
    ranges = [one for one in found.values() if one is not None]
    single = tuple(word for word, one in found.items() if one is None)
    if single or shapes_file is not None or (recorded is None and not ranges):
        problems += some_problems_of(single, shapes_file, spec)
    if m_range is None:
        return problems, ranges
    wanted = parse_rows(m_range)
    return [], [(problem, wanted) for problem in (*(problem for problem, _ in ranges), *problems)]


def _line(found: RangeResult) -> str:
    """Return the line of a range with ``--quiet``."""
    return f"{found.rows_class}: {len(found.table.segments)} segments of M = {found.table.lo}..{found.table.hi}"
