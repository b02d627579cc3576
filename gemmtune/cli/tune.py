"""``gemmtune tune``: measure shapes and show what was found."""

from __future__ import annotations

from typing import Any

import click

from .. import settings
from ..dispatch.tuning import tune as run_tuning
from ..errors import NoValidChoicesError
from ..selector.result import Outcome
from ..selector.table import pick_line, renderables
from .asked import device_of, settings_changes
from .output import STDOUT, write_json
from .printing import show, watched
from .recording import recorded_problems
from .shapes import some_problems_of
from .spec import Spec


def tune(
    *,
    shapes: tuple[str, ...],
    shapes_file: str | None,
    recorded: str | None,
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
    kind = info.torch_device.type
    problems = recorded_problems(recorded, kind) if recorded is not None else []
    if shapes or shapes_file is not None or recorded is None:
        problems += some_problems_of(shapes, shapes_file, Spec(device_type=kind, **options))
    with (
        settings.patch(**changes) as chosen,
        watched(quiet=quiet, kept=f"what was measured is kept in {chosen.store_file}") as progress,
    ):
        result = run_tuning(problems, settings=chosen, progress=progress, device=str(info.torch_device))
    if json_file != STDOUT and quiet:
        for problem in result:
            click.echo(f"{problem.problem}: {pick_line(problem)}")
    elif json_file != STDOUT:
        show([f"device: {info.name} ({info.arch})", *renderables(result, max_rows=rows or None)])
    write_json(json_file, result.to_json())
    for problem in result:
        if problem.pick is None and not problem.problem.empty:
            left_out = [(o.name, o.status.value, o.reason) for o in (*problem.outcomes, *map(Outcome.of_refusal, problem.refusals))]
            raise NoValidChoicesError(str(problem.problem), left_out)
