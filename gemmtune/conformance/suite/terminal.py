"""A run in pytest's own output: a header, and the verdicts at the end."""

from __future__ import annotations

import pytest

from ...selector.table import plain_text
from ..option_table import STDOUT
from ..report.as_json import as_json_text
from ..report.summary import Summary
from ..report.text import header_lines, renderables
from ..runs.run import Run

__all__ = ["PytestTerminal"]


class PytestTerminal:
    """Prints among what pytest prints. ``-p no:gemm-terminal`` leaves it out."""

    NAME = "gemm-terminal"

    def __init__(self) -> None:
        self._run: Run | None = None
        self._summary: Summary | None = None

    def pytest_gemm_begin(self, run: Run) -> None:
        """Keep the run for the header."""
        self._run = run

    def pytest_report_header(self) -> list[str]:
        """What is tested."""
        return header_lines(self._run.options, self._run.ground) if self._run is not None else []

    def pytest_gemm_end(self, summary: Summary) -> None:
        """Keep the summary until pytest has printed its own."""
        self._summary = summary

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The verdicts."""
        if self._summary is None:
            return
        terminalreporter.section("conformance")
        terminalreporter.write_line(plain_text(renderables(self._summary)))
        if self._summary.run.options.json == STDOUT:
            terminalreporter.write_line(as_json_text(self._summary))
