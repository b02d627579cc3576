"""The tests of a run: its cases, further drawn ones, a few under compute-sanitizer; or gemmtune's kernels by architecture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..bench.outcome import Outcome, Record, Verdict
from ..cases.case import Case
from ..properties.property import Property
from ..runs.matrices import matrix
from ..runs.run import Run
from ..runs.sanitize import sanitize
from .drawing import explore
from .stash import FOUND, OPTIONS, Found, settle


def test_property(gemm_case: Case, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """The GEMM has the property in this case."""
    gemm_settle([gemm_run.judge(gemm_case)])


def test_drawn(gemm_drawn: Property, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """The GEMM has the property in cases nobody thought of, which hypothesis draws."""
    gemm_settle(explore(gemm_run, gemm_drawn))


def test_sanitizer(gemm_sanitized: tuple[Case, ...], gemm_run: Run, request: pytest.FixtureRequest) -> None:
    """No kernel reads or writes outside of its memory, races, or reads what nobody wrote."""
    report = sanitize(gemm_run.options.spec, gemm_sanitized, gemm_run.ground.device)
    records = [
        Record(
            case=(case := finding.case or gemm_sanitized[0]),
            outcome=Outcome(case=case, verdict=Verdict.FAILED, failures=(finding.failure,)),
            known=gemm_run.xfails.reason(case.id),
            sanitized=True,
        )
        for finding in report.findings
    ]
    request.node.stash[FOUND] = Found(records=records, notes=report.text().splitlines()[:1], sanitized=report.executed)
    if records:
        settle(gemm_run.options, records)
    elif not report.executed:
        pytest.skip("compute-sanitizer: no case computed anything")


def test_architecture(gemm_sm: str, request: pytest.FixtureRequest) -> None:
    """Every kernel compiles, keeps to its architecture's resources, uses its instructions, and gives right results."""
    must_run = request.config.getoption("markexpr") == "gpu"
    report = matrix(request.config.stash[OPTIONS], gemm_sm, must_run=must_run)
    request.node.stash[FOUND] = Found(matrix=report)
    if report.failures:
        pytest.fail("\n".join(report.failures), pytrace=False)
