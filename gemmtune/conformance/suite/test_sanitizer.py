"""A few cases under compute-sanitizer."""

from __future__ import annotations

import pytest

from ..bench.outcome import Outcome, Verdict
from ..cases.case import Case
from ..runs.record import Record
from ..runs.run import Run
from ..runs.sanitize import sanitize
from .settle import settle
from .stash import FOUND, Found


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
