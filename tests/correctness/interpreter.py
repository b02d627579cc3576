"""A process whose Triton interprets: Triton decides at its import, and the process of the tests is to compile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from gemmtune.workers.worker import Worker

__all__ = ["Run", "interpreting_process"]

Run = Callable[..., Any]
"""``run(function, *args, **kwargs)``: the result of an importable function, called in that process."""
TIMEOUT_S = 280.0
"""Less than a test may take."""


def _start() -> None:
    """Leave out the check of each sum of integers for an overflow of 32 bits, which takes a third of the time; sizes are small."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _call(function: Callable[..., Any]) -> Any:
    """In the process: what is raised says where."""
    try:
        return function()
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


@contextlib.contextmanager
def interpreting_process() -> Iterator[Run]:
    """Start the process, and end it."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        worker = Worker()
    try:
        worker.call(_start, timeout_s=TIMEOUT_S)
        yield lambda function, *args, **kwargs: worker.call(
            _call, functools.partial(function, *args, **kwargs), timeout_s=TIMEOUT_S
        )
    finally:
        worker.close()
