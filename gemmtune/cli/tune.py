"""``gemmtune tune``: measure shapes and show what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from .. import settings
from ..device import DeviceInfo
from ..dispatch.tuning import tune as run_tuning
from ..errors import NoValidChoicesError
from ..problem import Problem
from ..selector.progress import Silent, progress_for
from ..selector.table import pick_line, renderables
from ..selector.tuning_result import TuningResult
from ..settings import Settings
from .asked import device_of, settings_changes, spec_of
from .output import INTERRUPTED, STDOUT, note, write_json
from .printing import show
from .shapes import problems_of

__all__ = ["tune"]


def tune(
    *,
    shapes: tuple[str, ...],
    shapes_file: str | None,
    device: str | None,
    force: bool,
    rows: int,
    quiet: bool,
    json_file: str | None,
    **options: Any,
) -> None:
    """Find the fastest right choice for each shape and remember it. ``options`` are those for settings and for problems."""
    info = device_of(device)
    changes = settings_changes(options) | {"tune": "force" if force else "on_miss"}
    problems = problems_of(shapes, shapes_file, spec_of(info.torch_device.type, options))
    with settings.patch(**changes) as chosen:
        result = _tuned(problems, info, chosen, quiet=quiet)
    _print(result, info, rows=rows or None, quiet=quiet, to_stdout=json_file != STDOUT)
    write_json(json_file, result.to_json())
    _raise_if_nothing_valid(result)


def _tuned(problems: Sequence[Problem], info: DeviceInfo, chosen: Settings, *, quiet: bool) -> TuningResult:
    """Tune with a progress bar, unless it is to be quiet."""
    progress = Silent() if quiet else progress_for()
    try:
        return run_tuning(problems, settings=chosen, progress=progress, device=str(info.torch_device))
    except KeyboardInterrupt:
        progress.close()
        note(f"interrupted: what was measured is kept in {chosen.store_file}")
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        progress.close()


def _print(result: TuningResult, info: DeviceInfo, *, rows: int | None, quiet: bool, to_stdout: bool) -> None:
    if not to_stdout:
        return
    if quiet:
        for problem in result:
            click.echo(f"{problem.problem}: {pick_line(problem)}")
        return
    show([f"device: {info.name} ({info.arch})", *renderables(result, max_rows=rows)])


def _raise_if_nothing_valid(result: TuningResult) -> None:
    for problem in result:
        if problem.pick is None and not problem.problem.empty:
            left_out = [(o.name, o.status.value, o.reason) for o in problem.outcomes]
            left_out += [(r.name, "refused", r.reason) for r in problem.refusals]
            raise NoValidChoicesError(str(problem.problem), left_out)
