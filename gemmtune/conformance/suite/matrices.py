"""A pytest session that is asked for architecture matrices instead of a GEMM."""

from __future__ import annotations

import pytest

from ...architectures import MatrixReport
from ...errors import ConformanceError
from ..option_table import STDOUT
from ..options import RunOptions
from ..runs.files import json_text, write
from ..runs.matrices import exit_status
from .stash import Found, decoded

__all__ = ["MatrixSession"]


class MatrixSession:
    """The plugin object of such a session: gathers the reports, here or in the workers of pytest-xdist, and prints them."""

    def __init__(self, config: pytest.Config, options: RunOptions) -> None:
        self._options = options
        self._is_worker = hasattr(config, "workerinput")
        self._reports: list[MatrixReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the matrix."""
        found: Found = decoded(report.gemm_found) if hasattr(report, "gemm_found") else Found()
        if found.matrix is not None:
            self._reports.append(found.matrix)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The reports."""
        terminalreporter.section("architectures")
        for report in self._reports:
            terminalreporter.write_line(report.text())

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the JSON file, and decide on the exit status."""
        if self._is_worker or session.config.option.collectonly:
            return
        try:
            if self._options.json not in (None, STDOUT):
                write("json", str(self._options.json), json_text([report.as_json() for report in self._reports]))
        except ConformanceError as error:
            pytest.exit(str(error), returncode=2)
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or not any(r.executed for r in self._reports):
            session.exitstatus = exit_status(self._reports)
