"""Searches replayed on GEMMs of which every legal choice was measured."""

from __future__ import annotations

from collections.abc import Callable

from gemmtune.report.known import Known
from gemmtune.report.replay import replay
from gemmtune.report.sources import read
from gemmtune.settings import Settings

from . import DOCS, table

FILE = DOCS.parent / "benchmarks/replay/nvidia-h100-exhaustive.json.gz"


def exhaustive() -> str:
    """Return, for each GEMM, the fastest of all choices and the regret of today's searches."""
    heads = [f"{search} search: {number}" for search in ("quick", "default") for number in ("choices measured", "regret %")]
    rows = [[f"`{x.problem}`", str(len(x.rows)), f"`{x.outcomes[0].name}`", *_regrets(x)] for x in read(FILE).known]
    return table(["GEMM", "choices", "the fastest of them", *heads], rows)


def _regrets(known: Known) -> list[str]:
    curves = replay([known], ("quick", "default"), Settings(), ("tuning",)).curves
    return [cell for curve in curves for cell in (str(curve.budgets[-1]), f"{100 * curve.at(curve.budgets[-1])[-1]:.1f}")]


MAKERS: dict[str, Callable[[], str]] = {"exhaustive": exhaustive}
