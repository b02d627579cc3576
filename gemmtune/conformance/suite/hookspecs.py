"""Hooks that the plugin calls during a run. The command and the plugin's own terminal output implement them."""

import pytest

from ..bench.outcome import Record
from ..options import RunOptions
from ..report.summary import Summary
from ..runs.run import Run


@pytest.hookspec(firstresult=True)
def pytest_gemm_open(options: RunOptions) -> Run | None:
    """Return the run of these options if the caller has opened it already."""


def pytest_gemm_begin(run: Run) -> None:
    """Called when the GEMM was found. Workers of pytest-xdist call no hook of this file."""


def pytest_gemm_progress(records: list[Record], done: int, total: int) -> None:
    """Called when one more of ``total`` tests is done, with its records."""


def pytest_gemm_end(summary: Summary) -> None:
    """Called at the end, after the reports were written."""
