"""``gemmtune conformance``: test anybody's GEMM.

Exit status: 0 it conforms, 1 it does not, 2 it could not be tested.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from .. import settings
from ..cache import cache_dir
from ..conformance.options import OPTIONS, STDOUT, Option, RunOptions
from ..conformance.properties.table import PROPERTIES
from ..conformance.report.as_json import as_json_text
from ..conformance.report.summary import Summary
from ..conformance.report.text import header_lines, renderables
from ..conformance.runs.files import json_text, write
from ..conformance.runs.matrices import exit_status, matrix
from ..conformance.runs.record import Record
from ..conformance.runs.run import Run
from ..errors import GemmtuneError
from ..selector.progress import Progress, progress_for
from .output import INTERRUPTED, show

__all__ = ["conformance"]

UNTESTED = 2
QUIET = ("-qq", "--no-header", "--tb=no", "-rE", "--capture=no", "-p", "no:gemm-terminal", "-p", "no:cacheprovider")
"""What the command prints is its own; pytest says only what it cannot collect. A GEMM that prints does so in another process."""
CLEAN = {
    "PYTEST_ADDOPTS": None,
    "PYTEST_PLUGINS": None,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Of the environment: pytest is not to do what was meant for other tests, and no files are left where the GEMM is."""
_TYPES: dict[str, Any] = {"integer": int, "seconds": float}


class CouldNotTest(click.ClickException):
    """Nothing is known about the GEMM."""

    exit_code = UNTESTED


def _as_click(option: Option) -> Callable[[Any], Any]:
    if option.kind == "flag":
        return click.option(option.spelling, option.name, is_flag=True, help=option.help)
    many = option.kind == "many"
    kind = click.Choice(option.choices) if option.choices and not many else _TYPES.get(option.kind, str)
    return click.option(option.spelling, option.name, type=kind, multiple=many, metavar=option.metavar, help=option.help)


def _all_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        function = _as_click(option)(function)
    return function


@click.command("conformance")
@click.argument("gemm", required=False, metavar="[MODULE:NAME]")
@_all_options
@click.option("-k", "keyword", metavar="EXPRESSION", help="Only cases whose id has this, as pytest's -k.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def conformance(gemm: str | None, keyword: str | None, pytest_arguments: tuple[str, ...], **values: Any) -> None:
    """Test whether a GEMM is right: MODULE:NAME is a function f(a, b), or a module or object with functions named as torch's.

    What it is not declared to take, it may refuse; what it returns has to be right. Each case runs in a worker process, so that a
    crash or a hang is one failure. Exit status, by what ran: 0 it conforms, 1 it does not, 2 it could not be tested.

    \b
    gemmtune conformance mypkg.ops:matmul
    gemmtune conformance mypkg.ops:matmul --device cuda --trait out --trait dtypes=float16,bfloat16 --level full
    gemmtune conformance mypkg.ops:matmul --repro bound:mm-bf16-127x64x33-seed.7 --in-process
    gemmtune conformance mypkg.ops:matmul --html report.html -- -n 2
    gemmtune conformance mypkg.ops:slow_to_compile --max-cases 100 --max-seconds 120
    gemmtune conformance --sm 80
    """  # fmt: skip
    try:
        options = RunOptions.of({"backend": gemm, **values})
    except GemmtuneError as error:
        raise click.UsageError(str(error)) from error
    if not options.active:
        raise click.UsageError("got no GEMM, expected package.module:function, for instance mypkg.ops:matmul")
    try:
        status = _matrices(options) if options.sm else _suite(options, keyword, pytest_arguments)
    except GemmtuneError as error:
        raise CouldNotTest(str(error)) from error
    if status:
        raise click.exceptions.Exit(status)


def _matrices(options: RunOptions) -> int:
    """The exit status of the matrices that ``--sm`` asks for."""
    with _progress() as progress:
        reports = [matrix(options, sm, progress=progress) for sm in options.sm]
    text = json_text([report.as_json() for report in reports])
    if options.json == STDOUT:
        click.echo(text)
        return exit_status(reports)
    show([Text(report.text()) for report in reports])
    if options.json is not None:
        write("json", options.json, text)
    return exit_status(reports)


def _suite(options: RunOptions, keyword: str | None, further: Sequence[str]) -> int:
    """The exit status of the suite, which runs in pytest."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise CouldNotTest(f"this needs {' and '.join(missing)}: pip install 'gemmtune[test]'")
    with _clean():
        run = Run.open(options)
        if options.json != STDOUT:
            show([Text(line) for line in (*header_lines(options, run.ground), "")])
        with _progress() as progress:
            output = CommandOutput(run, progress)
            status = _run_pytest(options, keyword, further, output)
    if output.summary is not None:
        if options.json == STDOUT:
            click.echo(as_json_text(output.summary))
        else:
            show(renderables(output.summary))
    return status if status in (0, 1, INTERRUPTED) else UNTESTED


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    progress = progress_for()
    try:
        yield progress
    finally:
        progress.close()


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """A block in which nothing of the user's pytest applies, and nothing is left in the user's folders."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        with settings.environment(CLEAN | {"HYPOTHESIS_STORAGE_DIRECTORY": str(cache_dir("hypothesis"))}):
            yield
    finally:
        sys.dont_write_bytecode = before


def _run_pytest(options: RunOptions, keyword: str | None, further: Sequence[str], output: CommandOutput) -> int:
    import pytest  # noqa: PLC0415 - an extra, and the other commands do without it

    folder = Path(str(resources.files("gemmtune.conformance.suite")))
    arguments = ["-c", str(folder / "pytest.ini"), f"--rootdir={folder}", *QUIET, *_as_pytest(options)]
    arguments += ["-k", keyword] if keyword else []
    if any(word.startswith(("-n", "--numprocesses")) for word in further):
        arguments += ["-p", "xdist"]
    with contextlib.redirect_stdout(sys.stderr):  # what pytest says is about the work
        return int(pytest.main([*arguments, *further, str(folder)], plugins=[output]))


def _as_pytest(options: RunOptions) -> list[str]:
    given = options.given()
    words = [f"--gemm-backend={options.backend}"]
    for option in OPTIONS:
        if option.name in given:
            value = given[option.name]
            if option.kind == "flag":
                words.append(option.pytest_spelling)
            else:
                words += [f"{option.pytest_spelling}={word}" for word in (value if option.kind == "many" else (value,))]
    return words


class CommandOutput:
    """A pytest plugin that shows the progress and keeps the summary for the command, and keeps pytest's own output silent."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.summary: Summary | None = None
        self._run = run
        self._progress = progress
        self._furthest = 0

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        """No letter and no word for a test."""
        return report.outcome, "", ""

    def pytest_gemm_open(self) -> Run:
        """The run, which is open already: what is wrong with the options is the command's to say."""
        return self._run

    def pytest_gemm_progress(self, records: list[Record], done: int, total: int) -> None:
        """How far it is, with the property that is being tested; several are at once under pytest-xdist, and the last is named."""
        names = [p.name for p in PROPERTIES]
        for record in records:
            self._furthest = max(self._furthest, names.index(record.case.property_name))
        self._progress.stage(names[self._furthest], done, total)

    def pytest_gemm_end(self, summary: Summary) -> None:
        """Keep it."""
        self.summary = summary
