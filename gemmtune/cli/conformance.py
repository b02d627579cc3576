"""``gemmtune conformance``: test any GEMM. Exit status: 0 it conforms, 1 it does not, 2 it could not be tested."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from .. import settings
from ..cache import cache_dir
from ..conformance.bench.outcome import Record
from ..conformance.option_table import STDOUT
from ..conformance.options import RunOptions
from ..conformance.properties.table import PROPERTIES
from ..conformance.report.as_json import as_json_text
from ..conformance.report.summary import Summary
from ..conformance.report.text import header_lines, renderables
from ..conformance.runs.files import json_text, words_of, write
from ..conformance.runs.matrices import exit_status, matrix
from ..conformance.runs.run import Run
from ..errors import raised_as
from ..selector.progress import Progress
from .output import INTERRUPTED, UNTESTED, CouldNotTest, print_json
from .printing import show, watched

QUIET = ("-qq", "--no-header", "--tb=no", "-rE", "--capture=no", "-p", "no:gemm-terminal", "-p", "no:cacheprovider")
"""Options of pytest that leave the printing to this command: pytest reports only collection errors.

A GEMM that prints does so in another process.
"""
CLEAN = {"PYTEST_ADDOPTS": None, "PYTEST_PLUGINS": None, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment of the suite, without the user's pytest options and without bytecode files next to the GEMM."""


def conformance(*, gemm: str | None, keyword: str | None, pytest_arguments: tuple[str, ...], **values: Any) -> None:
    """Test if a GEMM is correct. ``values`` are the options of ``option_table``."""
    with raised_as(click.UsageError):
        options = RunOptions.of({"backend": gemm, **values})
    if not options.active:
        raise click.UsageError("got no GEMM, expected package.module:function, for instance mypkg.ops:matmul")
    with raised_as(CouldNotTest):
        status = _matrices(options) if options.sm else _suite(options, keyword, pytest_arguments)
    if status:
        raise click.exceptions.Exit(status)


def _matrices(options: RunOptions) -> int:
    """Return the exit status of the matrices that ``--sm`` requests."""
    with watched() as progress:
        reports = [matrix(options, sm, progress=progress) for sm in options.sm]
    text = json_text([report.as_json() for report in reports])
    if options.json == STDOUT:
        print_json(text)
        return exit_status(reports)
    show([Text(report.text()) for report in reports])
    if options.json is not None:
        write("json", options.json, text)
    return exit_status(reports)


def _suite(options: RunOptions, keyword: str | None, further: Sequence[str]) -> int:
    """Return the exit status of the suite, which runs in pytest."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise CouldNotTest(f"this needs {' and '.join(missing)}: pip install 'gemmtune[conformance]'")
    with _clean():
        run = Run.open(options)
        if options.json != STDOUT:
            show([Text(line) for line in (*header_lines(options, run.ground), "")])
        with watched() as progress:
            output = CommandOutput(run, progress)
            status = _run_pytest(options, keyword, further, output)
    if output.summary is not None:
        if options.json == STDOUT:
            print_json(as_json_text(output.summary))
        else:
            show(renderables(output.summary))
    return status if status in (0, 1, INTERRUPTED) else UNTESTED


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Isolate the block from the user's pytest settings, and leave no files in the user's folders."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        with settings.environment(CLEAN | {"HYPOTHESIS_STORAGE_DIRECTORY": str(cache_dir("hypothesis", quietly=True))}):
            yield
    finally:
        sys.dont_write_bytecode = before


def _run_pytest(options: RunOptions, keyword: str | None, further: Sequence[str], output: "CommandOutput") -> int:
    import pytest  # noqa: PLC0415 - an optional dependency that other commands do not need

    folder = Path(str(resources.files("gemmtune.conformance.suite")))
    arguments = ["-c", str(folder / "pytest.ini"), f"--rootdir={folder}", *QUIET, f"--gemm-backend={options.backend}"]
    arguments += words_of(options.given(), pytest=True)
    arguments += ["-k", keyword] if keyword else []
    if any(word.startswith(("-n", "--numprocesses")) for word in further):
        arguments += ["-p", "xdist"]
    with contextlib.redirect_stdout(sys.stderr):  # pytest's output is progress information
        return int(pytest.main([*arguments, *further, str(folder)], plugins=[output]))


class CommandOutput:
    """pytest plugin that shows the progress, keeps the summary for the command, and silences pytest's output."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.summary: Summary | None = None
        self._run = run
        self._progress = progress
        self._furthest = 0

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        """Report nothing for a single test."""
        return report.outcome, "", ""

    def pytest_gemm_open(self) -> Run:
        """Return the open run, because the command reports errors in the options."""
        return self._run

    def pytest_gemm_progress(self, records: list[Record], done: int, total: int) -> None:
        """Show the progress and the tested property, with pytest-xdist the last of several that run at once."""
        names = [p.name for p in PROPERTIES]
        for record in records:
            self._furthest = max(self._furthest, names.index(record.case.property_name))
        self._progress.stage(names[self._furthest], done, total)

    def pytest_gemm_end(self, summary: Summary) -> None:
        self.summary = summary
