"""What the plugin tells while a run goes on. The command and the plugin's own terminal output listen."""

from __future__ import annotations

import pytest

from ..bench.outcome import Record
from ..options import RunOptions
from ..report.summary import Summary
from ..runs.run import Run


@pytest.hookspec(firstresult=True)
def pytest_gemm_open(options: RunOptions) -> Run | None:
    """The run of these options, from who has opened it already."""


def pytest_gemm_begin(run: Run) -> None:
    """The GEMM was found. Not called in the workers of pytest-xdist, as none of these is."""


def pytest_gemm_progress(records: list[Record], done: int, total: int) -> None:
    """One more of ``total`` tests is done, with what it found."""


def pytest_gemm_end(summary: Summary) -> None:
    """Everything is done."""
