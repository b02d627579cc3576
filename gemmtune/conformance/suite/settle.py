"""How a test ends, by what it found."""

from __future__ import annotations

import pytest

from ..options import RunOptions
from ..runs.record import Record
from ..runs.reproduction import command, pytest_command

__all__ = ["CaseFailed", "settle"]


class CaseFailed(AssertionError):
    """A case failed. The text is all that there is to see: the stack of the suite says nothing of the GEMM."""


def settle(options: RunOptions, records: list[Record]) -> None:
    """End a test as its records say: as a failure, an expected failure, or a skip where nothing was executed."""
    for record in records:
        if record.failed or record.surprise:
            raise CaseFailed(_failure_text(options, record))
    for record in records:
        if record.known_failure:
            pytest.xfail(f"{record.case.id}: {record.known}")
    if not records:
        pytest.skip("no case is drawn: none is within what is declared, or enumerated ones have failed")
    if not any(record.executed for record in records):
        first = records[0]
        pytest.skip(f"refused: {first.outcome.reason}" if first.outcome is not None else first.reason)


def _failure_text(options: RunOptions, record: Record) -> str:
    if record.surprise or record.outcome is None:
        return f"{record.case.id} is listed as known to fail ({record.known}), but passes: remove the line"
    lines = [f"{record.case.id}: {record.outcome.verdict}" + (f", choice {record.outcome.choice}" if record.outcome.choice else "")]
    for failure in record.outcome.failures:
        lines.append(f"  {failure.property_name}: {failure.message}")
        lines += [f"    looks like: {failure.diagnosis}"] if failure.diagnosis else []
    again = (make(options, [record.case.id], sanitize=record.sanitized) for make in (command, pytest_command))
    return "\n".join([*lines, *(f"  again: {line}" for line in again)])
