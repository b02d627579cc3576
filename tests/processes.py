"""Processes that tests need to themselves: forks of one that has imported torch, like all workers of the tests."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from gemmtune.workers.worker import Worker

__all__ = ["Run", "printed", "process", "program"]

Run = Callable[..., Any]
"""``run(function, *args, **kwargs)``: the result of an importable function, called in the process."""
TIMEOUT_S = 280.0
"""Less than a test may take."""


def _packed(value: object) -> bytes:
    """``value`` as bytes: pickle alone cannot write tensors of every dtype."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _call(job: bytes) -> bytes:
    """In the process: what is raised says where."""
    try:
        function, args, kwargs = _unpacked(job)
        return _packed(function(*args, **kwargs))
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


@contextlib.contextmanager
def process(**environment: str) -> Iterator[Run]:
    """Start a process with these variables and in this folder, and end it."""
    with mock.patch.dict(os.environ, environment):
        worker = Worker()
    try:
        yield lambda function, *args, **kwargs: _unpacked(
            worker.call(_call, _packed((function, args, kwargs)), timeout_s=TIMEOUT_S)
        )
    finally:
        worker.close()


def printed(function: Callable[..., object], *args: object) -> tuple[object, str, str]:
    """To be run in a process: what the function returns, or exits with, and what it writes to standard output and error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            result = function(*args)
        except SystemExit as ended:
            result = ended.code
    return result, out.getvalue(), err.getvalue()


def program(text: str, *arguments: str) -> None:
    """To be run in a process: a program with arguments."""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
