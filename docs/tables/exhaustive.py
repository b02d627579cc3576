"""Searches replayed on GEMMs of which every legal choice was measured."""

from __future__ import annotations

from collections.abc import Callable

from gemmtune.report.known import Known
from gemmtune.report.replay import replay
from gemmtune.report.sources import read
from gemmtune.settings import Settings

from . import DOCS, table

MOST_ROWS_OF_GEMV = 4
"""Rows up to which the data have other kernels than today's."""
FILE = DOCS.parent / "benchmarks/replay/nvidia-h100-exhaustive.json.gz"


def exhaustive() -> str:
    """Return, for each GEMM, the pick among all choices and the regret of today's default search."""
    heads = ["GEMM", "choices", "the pick among all", "choices that a default search measured", "its regret %"]
    known = [x for x in read(FILE).known if x.problem is not None and x.problem.m > MOST_ROWS_OF_GEMV]
    return table(heads, [[f"`{x.problem}`", str(len(x.rows)), f"`{x.outcomes[0].name}`", *_regret(x)] for x in known])


def _regret(known: Known) -> tuple[str, str]:
    [curve] = replay([known], ("default",), Settings(), ("tuning",)).curves
    return str(curve.budgets[-1]), f"{100 * curve.at(curve.budgets[-1])[-1]:.1f}"


MAKERS: dict[str, Callable[[], str]] = {"exhaustive": exhaustive}
