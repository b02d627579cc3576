"""A process whose Triton interprets: Triton decides at its import, and the process of the tests is to compile."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

__all__ = ["Run", "interpreting_process"]

Run = Callable[..., Any]
"""``run(function, *args, **kwargs)``: the result of an importable function, called in that process."""


def _start() -> None:
    """Leave out the check of each sum of integers for an overflow of 32 bits, which takes a third of the time; sizes are small."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@contextlib.contextmanager
def interpreting_process() -> Iterator[Run]:
    """Start the process, and end it."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as pool:
        pool.submit(os.getpid).result()
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
