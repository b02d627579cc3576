"""Cases that hypothesis draws, for the properties that may be drawn."""

from __future__ import annotations

from collections.abc import Callable

from ..properties.property import Property
from ..runs.record import Record
from ..runs.run import Run
from .drawing import explore


def test_drawn(gemm_drawn: Property, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """The GEMM has the property in cases nobody thought of."""
    gemm_settle(explore(gemm_run, gemm_drawn))
