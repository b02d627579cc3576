"""A run as a pytest session: opens the run, collects findings here or from workers of pytest-xdist, and summarises them."""

import time
from typing import Any

import pytest

from ...architectures import MatrixReport
from ...errors import ConformanceError, GemmtuneError
from ...selector.text_table import plain_text
from ..bench.outcome import Record
from ..option_table import STDOUT
from ..options import RunOptions
from ..report.as_json import as_json_text
from ..report.page import as_html
from ..report.summary import Summary, summarise
from ..report.text import MOST_LINES, header_lines, renderables
from ..runs.files import json_text, save_failing, write
from ..runs.matrices import exit_status
from ..runs.run import Run
from .stash import RUN, Found, decoded, encoded

INTERRUPTED = 130
UNTESTED = 2


class ConformanceSession:
    """Plugin object of a session that tests a GEMM."""

    def __init__(self, config: pytest.Config, options: RunOptions) -> None:
        self._config = config
        self._options = options
        self._workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._records: list[Record] = []
        self._notes: list[str] = []
        self._sanitized = 0
        self._complaints: list[str] = []
        self._interrupted = False
        self._deselected = False
        self._done = self._total = 0
        self._started_s = time.monotonic()

    @property
    def run(self) -> Run | None:
        """The run, or None before the GEMM has been found."""
        return self._config.stash.get(RUN, None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Find the GEMM before pytest-xdist starts its workers. A worker gets the result from the parent."""
        try:
            if self._workerinput is not None:
                run = Run(self._options, decoded(self._workerinput["gemm_ground"]))
            else:
                run = self._config.hook.pytest_gemm_open(options=self._options) or Run.open(self._options)
        except GemmtuneError as error:
            pytest.exit(f"the GEMM could not be tested: {error}", returncode=UNTESTED)
        self._config.stash[RUN] = run
        if self._workerinput is None:
            self._config.hook.pytest_gemm_begin(run=run)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the description of the GEMM to a worker of pytest-xdist."""
        if self.run is not None:
            node.workerinput["gemm_ground"] = encoded(self.run.ground)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests that a worker of pytest-xdist collected."""
        self._total = len(ids)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note that something selects a part of the suite: -k, --lf or another plugin."""
        self._deselected |= any({"gemm_case", "gemm_drawn"} & set(getattr(item, "fixturenames", ())) for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Learn the same from a worker of pytest-xdist that ends."""
        self._deselected |= getattr(node, "workeroutput", {}).get("gemm_deselected", False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._workerinput is not None:
            return
        found: Found = decoded(report.gemm_found) if hasattr(report, "gemm_found") else Found()
        if report.failed and not found.records:  # an error outside of a case
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash is not None else report.longreprtext.strip().rpartition("\n")[2]).splitlines()
            self._complaints.append(f"{report.nodeid.partition('::')[2]}: " + "\n".join(lines[:MOST_LINES]))
        self._records += found.records
        self._notes += found.notes
        self._sanitized += found.sanitized
        if self._options.save_failing is not None:
            for record in found.records:
                if record.failed:
                    save_failing(self._options.save_failing, self._options, record)
        if report.when == "call":
            self._done += 1
            self._config.hook.pytest_gemm_progress(records=found.records, done=self._done, total=self._total)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error if a part of the suite cannot be collected."""
        if report.failed and self._workerinput is None:
            self._complaints.append(f"{report.nodeid or 'the suite'} cannot be collected: {report.longreprtext.strip()}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note an interruption by Ctrl-C. The findings until then are reported."""
        self._interrupted = isinstance(excinfo.value, KeyboardInterrupt)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Summarise, write the reports, and set the exit status."""
        run = self.run
        # Close the run. Only the parent process of a real run reports.
        if run is None:
            return
        run.close()
        if self._workerinput is not None:
            session.config.workeroutput["gemm_deselected"] = self._deselected  # type: ignore[attr-defined]
        if self._workerinput is not None or session.config.option.collectonly:
            return
        if not self._records and not any("gemmtune" in arg for arg in session.config.args):
            self._complaints.append("the suite was not collected: add --pyargs gemmtune.conformance to the arguments of pytest")
        # Summarise.
        option = session.config.option
        narrowed = self._deselected or bool(option.keyword or option.markexpr or any("::" in arg for arg in session.config.args))
        summary = summarise(
            run, self._records, narrowed=narrowed, seconds=time.monotonic() - self._started_s, complaints=self._complaints,
            notes=self._notes, sanitized=self._sanitized,
            interrupted=self._interrupted or bool(session.shouldstop or session.shouldfail),
        )  # fmt: skip
        # Write the reports.
        try:
            if self._options.json not in (None, STDOUT):
                write("json", str(self._options.json), as_json_text(summary))
            if self._options.html is not None:
                write("html", self._options.html, as_html(summary))
        except ConformanceError as error:
            pytest.exit(str(error), returncode=UNTESTED)
        finally:
            self._config.hook.pytest_gemm_end(summary=summary)
        # Set the exit status.
        if self._interrupted:
            session.exitstatus = INTERRUPTED
        elif exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            others_failed = exitstatus == pytest.ExitCode.TESTS_FAILED and not summary.failed and not summary.complaints
            session.exitstatus = 1 if others_failed else summary.exit_status


class PytestTerminal:
    """Terminal output between the lines of pytest. ``-p no:gemm-terminal`` disables it."""

    NAME = "gemm-terminal"

    def __init__(self) -> None:
        self._run: Run | None = None
        self._summary: Summary | None = None

    def pytest_gemm_begin(self, run: Run) -> None:
        self._run = run

    def pytest_report_header(self) -> list[str]:
        return header_lines(self._run.options, self._run.ground) if self._run is not None else []

    def pytest_gemm_end(self, summary: Summary) -> None:
        """Keep the summary until pytest has printed its own."""
        self._summary = summary

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._summary is None:
            return
        terminalreporter.section("conformance")
        terminalreporter.write_line(plain_text(renderables(self._summary)))
        if self._summary.run.options.json == STDOUT:
            terminalreporter.write_line(as_json_text(self._summary))


class MatrixSession:
    """Plugin object of a session of ``--sm``: collects the matrix reports, here or from pytest-xdist, and prints them."""

    def __init__(self, config: pytest.Config, options: RunOptions) -> None:
        self._options = options
        self._is_worker = hasattr(config, "workerinput")
        self._reports: list[MatrixReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: Found = decoded(report.gemm_found) if hasattr(report, "gemm_found") else Found()
        if found.matrix is not None:
            self._reports.append(found.matrix)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("architectures")
        for report in self._reports:
            terminalreporter.write_line(report.text())

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the JSON file and set the exit status."""
        if self._is_worker or session.config.option.collectonly:
            return
        try:
            if self._options.json not in (None, STDOUT):
                write("json", str(self._options.json), json_text([report.as_json() for report in self._reports]))
        except ConformanceError as error:
            pytest.exit(str(error), returncode=2)
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or not any(r.executed for r in self._reports):
            session.exitstatus = exit_status(self._reports)
