"""``gemmtune tune``: measure shapes and show what was found."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import click

from .. import settings
from ..device import DeviceInfo
from ..dispatch.tuning import tune as run_tuning
from ..errors import NoValidChoicesError
from ..problem import Problem
from ..selector.progress import Silent, progress_for
from ..selector.table import DEFAULT_ROWS, pick_line, renderables
from ..selector.tuning_result import TuningResult
from ..settings import Settings, Timing
from .options import device_of, filter_options, problem_options, search_options, settings_changes, spec_of
from .output import INTERRUPTED, STDOUT, json_option, note, show, write_json
from .shapes import problems_of

__all__ = ["tune"]


@click.command()
@click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
@click.option("--shapes", "shapes_file", metavar="FILE", help="A JSON file with a list of shapes.")
@problem_options
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; cuda when there is one and nothing is given.")
@search_options
@filter_options
@click.option("--timing", type=click.Choice(typing.get_args(Timing)), help="graph: kernel time alone; eager: with the host's cost.")
@click.option("--force", is_flag=True, help="Measure again what the store knows.")
@click.option("--rows", type=click.IntRange(min=0), default=DEFAULT_ROWS, show_default=True, help="Choices shown; 0 shows all.")
@click.option("--quiet", is_flag=True, help="No progress and no tables: one line for each shape.")
@json_option
def tune(
    shapes: tuple[str, ...],
    shapes_file: str | None,
    device: str | None,
    backends: str | None,
    search: str | None,
    choice_allowlist_regex: str | None,
    choice_denylist_regex: str | None,
    timing: str | None,
    force: bool,
    rows: int,
    quiet: bool,
    json_file: str | None,
    **problem: Any,
) -> None:
    """Find the fastest right choice for each SHAPE and remember it.

    A SHAPE is MxNxK, or BxMxNxK for a batch: out[M, N] = a[M, K] @ b[K, N]. What the store already knows is not measured again.

    \b
    gemmtune tune 16x4096x4096 --dtype bfloat16
    gemmtune tune 2048x6144x4096 --bias n --layout nt
    gemmtune tune --shapes models.json --json result.json
    gemmtune tune 16x8192x8192 --op mixed_mm --dtype float16 --scales group_128 --encoding int4
    gemmtune tune 512x512x511 --allow '^aten|_pad' --deny _k
    """
    info = device_of(device)
    problems = problems_of(shapes, shapes_file, spec_of(info.torch_device.type, problem))
    mode = "force" if force else "on_miss"
    changes = settings_changes(
        backends=backends,
        search=search,
        choice_allowlist_regex=choice_allowlist_regex,
        choice_denylist_regex=choice_denylist_regex,
        timing=timing,
        tune=mode,
    )
    with settings.patch(**changes) as chosen:
        result = _tuned(problems, info, chosen, quiet=quiet)
    _print(result, info, rows=rows or None, quiet=quiet, to_stdout=json_file != STDOUT)
    write_json(json_file, result.to_json())
    _raise_if_nothing_valid(result)


def _tuned(problems: Sequence[Problem], info: DeviceInfo, chosen: Settings, *, quiet: bool) -> TuningResult:
    """With a progress bar, unless it is to be quiet."""
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
