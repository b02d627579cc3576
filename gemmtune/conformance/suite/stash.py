"""What the parts of the suite leave for each other in pytest's stashes, and how it travels between processes."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from ...architectures import MatrixReport
from ..options import RunOptions
from ..runs.record import Record
from ..runs.run import Run

__all__ = ["FOUND", "OPTIONS", "RUN", "Found", "decoded", "encoded"]


@dataclass(slots=True, kw_only=True)
class Found:
    """What one test found."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines for the report."""
    sanitized: int = 0
    """Runs under compute-sanitizer that computed something."""
    matrix: MatrixReport | None = None


OPTIONS = pytest.StashKey[RunOptions]()
"""In the stash of the config, where anything is to be tested."""
RUN = pytest.StashKey[Run]()
"""In the stash of the config, once the GEMM has been found."""
FOUND = pytest.StashKey[Found]()
"""In the stash of a test."""


def encoded(value: object) -> str:
    """The report as text: reports travel between the processes of pytest-xdist as plain values."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def decoded(text: str) -> Any:
    """What was encoded."""
    return pickle.loads(base64.b64decode(text))
