"""Values that the parts of the suite exchange in pytest's stashes, and their encoding between processes."""

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from ...architectures import MatrixReport
from ..bench.outcome import Record
from ..options import RunOptions
from ..runs.files import command, pytest_command
from ..runs.run import Run


@dataclass(slots=True, kw_only=True)
class Found:
    """Findings of one test."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines for the report."""
    sanitized: int = 0
    """Case runs under compute-sanitizer that computed something."""
    matrix: MatrixReport | None = None


OPTIONS = pytest.StashKey[RunOptions]()
"""Options, in the stash of the config if there is anything to test."""
RUN = pytest.StashKey[Run]()
"""Run, in the stash of the config once the GEMM has been found."""
FOUND = pytest.StashKey[Found]()
"""Findings, in the stash of a test."""


def encoded(value: object) -> str:
    """Return a value as text. The processes of pytest-xdist exchange plain values only."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def decoded(text: str) -> Any:
    """Return the value of an encoded text."""
    return pickle.loads(base64.b64decode(text))


class CaseFailed(AssertionError):
    """A failed case. Its text is the whole message: the stack trace of the suite has no information about the GEMM."""


def settle(options: RunOptions, records: list[Record]) -> None:
    """End a test according to its records: fail it, xfail it, or skip it if nothing was executed."""
    for record in records:
        if record.failed or record.surprise:
            raise CaseFailed(_failure_text(options, record))
    for record in records:
        if record.known_failure:
            pytest.xfail(f"{record.case.id}: {record.known}")
    if not records:
        pytest.skip("no case was drawn: the declarations allow none, or enumerated cases have failed")
    if not any(record.executed for record in records):
        first = records[0]
        pytest.skip(f"refused: {first.outcome.reason}" if first.outcome is not None else first.reason)


def _failure_text(options: RunOptions, record: Record) -> str:
    if record.surprise or record.outcome is None:
        return f"{record.case.id} is listed as known to fail ({record.known}), but passes: remove the line"
    lines = [f"{record.case.id}: {record.outcome.status}" + (f", choice {record.outcome.choice}" if record.outcome.choice else "")]
    for failure in record.outcome.failures:
        lines.append(f"  {failure.property_name}: {failure.message}")
        lines += [f"    looks like: {failure.diagnosis}"] if failure.diagnosis else []
    again = (make(options, [record.case.id], sanitize=record.sanitized) for make in (command, pytest_command))
    return "\n".join([*lines, *(f"  again: {line}" for line in again)])
