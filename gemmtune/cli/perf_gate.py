"""``gemmtune perf-gate``: fail when a GEMM is slower than it may be.

Exit status: 0 nothing is slower, 1 a regression or a required baseline that is missing, 2 it could not be measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from .. import settings
from ..errors import GemmtuneError
from ..perf_gate.gate import problems_without_names, run_gate
from ..perf_gate.options import GateOptions
from ..perf_gate.result import GateResult, renderables, warnings
from ..problem import Problem
from ..selector.progress import Silent, progress_for
from .asked import device_of, settings_changes, spec_of
from .output import STDOUT, note, write_json
from .printing import show
from .shapes import Spec, problem_of_word, problems_of_file

__all__ = ["perf_gate"]


class CouldNotRun(click.ClickException):
    """An error that says nothing of the speed of anything."""

    exit_code = 2


def perf_gate(*, shapes: tuple[str, ...], shapes_file: str | None, quiet: bool, json_file: str | None, **options: Any) -> None:
    """Judge whether a shape takes longer than it may. ``options`` are those for settings, the gate and problems."""
    try:
        asked = _options(options)
        info = device_of(asked.device)
        with settings.patch(**settings_changes(options)):
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
    names = ("device", "candidate", "anchor", "baselines", "require_baseline", "update_baseline", "processes")
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
