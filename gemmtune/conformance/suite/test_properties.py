"""Each case of each property."""

from __future__ import annotations

from collections.abc import Callable

from ..cases.case import Case
from ..runs.record import Record
from ..runs.run import Run


def test_property(gemm_case: Case, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """The GEMM has the property in this case."""
    gemm_settle([gemm_run.judge(gemm_case)])
