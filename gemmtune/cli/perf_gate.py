"""``gemmtune perf-gate``: fail when a GEMM is slower than it may be.

Exit status: 0 nothing is slower, 1 a regression or a required baseline that is missing, 2 it could not be measured.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from .. import settings
from ..errors import GemmtuneError
from ..perf_gate.baselines import FOLDER
from ..perf_gate.gate import problems_without_names, run_gate
from ..perf_gate.options import ANCHORS, LEAST_PROCESSES, PROCESSES, GateOptions
from ..perf_gate.report import renderables, warnings
from ..perf_gate.result import GateResult
from ..perf_gate.subjects import PICK
from ..problem import Problem
from ..selector.progress import Silent, progress_for
from ..settings import Timing
from .options import device_of, problem_options, search_options, settings_changes, spec_of
from .output import STDOUT, json_option, note, show, write_json
from .shapes import Spec, problem_of_word, problems_of_file

__all__ = ["perf_gate"]


class CouldNotRun(click.ClickException):
    """An error that says nothing of the speed of anything."""

    exit_code = 2


@click.command("perf-gate")
@click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
@click.option("--shapes", "shapes_file", metavar="FILE", help="A JSON file with a list of shapes.")
@problem_options
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; cuda when there is one and nothing is given.")
@search_options
@click.option("--timing", type=click.Choice(typing.get_args(Timing)), help="graph: kernel time alone; eager: with the host's cost.")
@click.option(
    "--candidate",
    metavar="NAME",
    default=PICK,
    show_default=True,
    help="What is judged: gemmtune's pick, a choice such as cpp:…, or a function as package.module:function.",
)
@click.option("--anchor", type=click.Choice(ANCHORS), help="torch, or the stored ratio to it; torch when not given.")
@click.option("--against", "--gemm-against", metavar="PATH", help="Anchor: the gemmtune in a checkout or site-packages folder.")
@click.option("--baselines", metavar="DIR", default=FOLDER, show_default=True, help="The folder of stored ratios.")
@click.option(
    "--require-baseline",
    "--gemm-require-baseline",
    is_flag=True,
    help="Fail without a baseline; implies --anchor baseline.",
)
@click.option("--update-baseline", is_flag=True, help="Write what is measured as the new baselines.")
@click.option(
    "--processes",
    type=click.IntRange(min=LEAST_PROCESSES),
    default=PROCESSES,
    show_default=True,
    help="Fresh processes in a batch.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def perf_gate(
    shapes: tuple[str, ...],
    shapes_file: str | None,
    backends: str | None,
    search: str | None,
    timing: str | None,
    quiet: bool,
    json_file: str | None,
    **options: Any,
) -> None:
    """Judge whether a SHAPE takes longer, by more than 2%, than by torch, than its baseline, or than by another commit.

    A SHAPE is MxNxK, or BxMxNxK for a batch. Without any, those of the baselines are taken where these are the anchor, else a small
    set. Exit status: 0 nothing is slower, 1 a regression or a required baseline that is missing, 2 it could not be measured.

    \b
    gemmtune perf-gate 512x512x512 --dtype float32
    gemmtune perf-gate --shapes models.json --update-baseline
    gemmtune perf-gate --require-baseline
    gemmtune perf-gate 512x512x512 --against path/to/another/checkout
    """  # fmt: skip
    try:
        asked = _options(options)
        info = device_of(asked.device)
        with settings.patch(**settings_changes(backends=backends, search=search, timing=timing)):
            spec = spec_of(info.torch_device.type, options)
            problems = _problems(shapes, shapes_file, spec) or _unnamed(asked, options)
            result = _run(problems, asked, quiet=quiet)
    except GemmtuneError as error:
        raise CouldNotRun(str(error)) from error
    if json_file != STDOUT:
        show(renderables(result))
    write_json(json_file, result.to_json())
    for line in warnings(result):
        note(f"warning: {line}")
    if result.exit_status:
        raise click.exceptions.Exit(result.exit_status)


def _options(options: dict[str, Any]) -> GateOptions:
    """Takes what belongs to the gate out of the command's options; those of the problems stay."""
    names = ("device", "candidate", "anchor", "against", "baselines", "require_baseline", "update_baseline", "processes")
    given = {name: options.pop(name) for name in names}
    given["anchor"] = given["anchor"] or ("baseline" if given["require_baseline"] else "torch")
    return GateOptions(**given)


def _problems(shapes: tuple[str, ...], shapes_file: str | None, spec: Spec) -> list[Problem]:
    problems = [problem_of_word(text, spec) for text in shapes]
    if shapes_file is not None:
        found, skipped = problems_of_file(shapes_file, spec)
        for entry in skipped:
            note(str(entry))
        if not found:
            raise click.UsageError(f"--shapes: every entry of {shapes_file} was skipped: nothing to judge")
        problems += found
    return problems


def _unnamed(asked: GateOptions, problem_options: Iterable[str]) -> list[Problem]:
    context = click.get_current_context()
    for name in problem_options:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name.replace('_', '-')}: got no shapes that it could be for, expected MxNxK, BxMxNxK or --shapes FILE"
            )
    return problems_without_names(asked)


def _run(problems: list[Problem], options: GateOptions, *, quiet: bool) -> GateResult:
    progress = Silent() if quiet else progress_for()
    try:
        return run_gate(problems, options, tell=(lambda _: None) if quiet else note, progress=progress)
    finally:
        progress.close()
