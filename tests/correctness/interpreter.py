"""A process whose Triton interprets: Triton decides at its import, and the process of the tests is to compile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

__all__ = ["Run", "interpreting_process"]

Run = Callable[..., Any]
"""``run(function, *args, **kwargs)``: the result of an importable function, called in that process."""


@contextlib.contextmanager
def interpreting_process() -> Iterator[Run]:
    """Start the process, and end it."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(torch.zeros, 1).result()
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
