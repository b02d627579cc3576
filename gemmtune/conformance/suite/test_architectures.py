"""The kernels of gemmtune, compiled for each architecture that was asked for, and run where a GPU can."""

from __future__ import annotations

import pytest

from ..runs.matrices import matrix
from .stash import FOUND, OPTIONS, Found


def test_architecture(gemm_sm: str, request: pytest.FixtureRequest) -> None:
    """Every kernel compiles, keeps to its architecture's resources, uses its instructions, and gives right results."""
    must_run = request.config.getoption("markexpr") == "gpu"
    report = matrix(request.config.stash[OPTIONS], gemm_sm, must_run=must_run)
    request.node.stash[FOUND] = Found(matrix=report)
    if report.failures:
        pytest.fail("\n".join(report.failures), pytrace=False)
