"""Cases that hypothesis draws, for the properties that may be drawn."""

from __future__ import annotations

from collections.abc import Callable

from ..property import Property
from ..record import Record
from ..run import Run
from .drawing import explore


def test_drawn(gemm_drawn: Property, gemm_run: Run, gemm_settle: Callable[[list[Record]], None]) -> None:
    """The GEMM has the property in cases nobody thought of."""
    gemm_settle(explore(gemm_run, gemm_drawn))
