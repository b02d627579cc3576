"""A process whose Triton interprets: Triton decides at its import, and the process of the tests is to compile."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator

from processes import Run, process

__all__ = ["interpreting_process"]


def _start() -> None:
    """Leave out the check of each sum of integers for an overflow of 32 bits, which takes a third of the time; sizes are small."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@contextlib.contextmanager
def interpreting_process() -> Iterator[Run]:
    """Start the process, and end it."""
    with process(TRITON_INTERPRET="1") as run:
        run(_start)
        yield run
