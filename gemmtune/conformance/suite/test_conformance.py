"""Tests of a run: cases, drawn cases, cases under compute-sanitizer, and gemmtune's kernels for each architecture."""

from collections.abc import Callable

import pytest

from ..bench.outcome import CaseStatus, Outcome, Record
from ..cases.case import Case
from ..properties.property import Property
from ..runs.matrices import matrix
from ..runs.run import Run
from ..runs.sanitize import sanitize
from .drawing import explore
from .stash import FOUND, OPTIONS, Found, settle

pytestmark = pytest.mark.filterwarnings("default")
"""A project that turns warnings into errors does so for its own tests. A warning of torch or of the suite is no fault of a GEMM."""


def test_property(gemm_case: Case, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """Check the property in one enumerated case, or in one that takes its place if the GEMM refuses it."""
    gemm_settle(gemm_run.judge_or_replace(gemm_case))


def test_drawn(gemm_drawn: Property, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """Check the property in cases that hypothesis draws."""
    gemm_settle(explore(gemm_run, gemm_drawn))


def test_sanitizer(gemm_sanitized: tuple[Case, ...], gemm_run: Run, request: pytest.FixtureRequest) -> None:
    """Check that no kernel accesses memory out of bounds, races, or reads unwritten memory."""
    report = sanitize(gemm_run.options.spec, gemm_sanitized, gemm_run.ground.device)
    records = [
        Record(
            case=(case := finding.case or gemm_sanitized[0]),
            outcome=Outcome(case=case, status=CaseStatus.FAILED, failures=(finding.failure,)),
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
    """Check that kernels compile, stay within the architecture's resources, use its instructions and compute right results."""
    must_run = request.config.getoption("markexpr") == "gpu"
    report = matrix(request.config.stash[OPTIONS], gemm_sm, must_run=must_run)
    request.node.stash[FOUND] = Found(matrix=report)
    if report.failures:
        pytest.fail("\n".join(report.failures), pytrace=False)
