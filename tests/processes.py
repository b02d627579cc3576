"""Separate processes for tests: forks of a process that has imported torch, like all workers of the tests."""

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
"""Function ``run(function, *args, **kwargs)`` that calls an importable function in the process and returns its result."""
TIMEOUT_S = 280.0
"""Time limit of a call, shorter than that of a test."""


def _packed(value: object) -> bytes:
    """Return ``value`` as bytes. pickle alone cannot write tensors of every dtype."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _call(job: bytes) -> bytes:
    """Run a job in the process. An exception gets the traceback as a note."""
    try:
        function, args, kwargs = _unpacked(job)
        return _packed(function(*args, **kwargs))
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


@contextlib.contextmanager
def process(**environment: str) -> Iterator[Run]:
    """Start a process with these environment variables in the current folder. End it afterwards."""
    with mock.patch.dict(os.environ, environment):
        worker = Worker()
    try:
        yield lambda function, *args, **kwargs: _unpacked(
            worker.call(_call, _packed((function, args, kwargs)), timeout_s=TIMEOUT_S)
        )
    finally:
        worker.close()


def printed(function: Callable[..., object], *args: object) -> tuple[object, str, str]:
    """Return what a function, run in a process, returns or exits with, and its standard output and error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            result = function(*args)
        except SystemExit as ended:
            result = ended.code
    return result, out.getvalue(), err.getvalue()


def program(text: str, *arguments: str) -> None:
    """Run a program with arguments, in a process."""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
