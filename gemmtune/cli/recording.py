"""``gemmtune record``, and the problems of the file that it writes."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from ..errors import InvalidProblemError
from ..integration.record import record as recording
from ..integration.recording import Recording
from ..interrupts import raising
from ..problem import Problem
from ..selector.text_table import counted
from .files import STDOUT
from .output import INTERRUPTED, note, write_json


def record(file: str, program: Sequence[str], json_file: str | None) -> int:
    """Run a Python program, write the products that it computed, and return its exit status."""
    module, arguments = _parsed(program)
    if not module and not os.path.isfile(arguments[0]):
        raise click.UsageError(f"record: got {arguments[0]}, which is not a file, expected a Python script, or -m and a module")
    status, process = 0, os.getpid()
    unwritten: OSError | None = None
    try:
        with recording(file) as found:
            status = _status_of(module, arguments)
    except OSError as error:  # of the file: the program's own errors are in its status
        unwritten = error
    if os.getpid() != process:  # a fork of the program that has reached its end
        return status
    if unwritten is not None:
        note(f"error: --output: cannot write {file}: {unwritten.strerror}")
    elif json_file != STDOUT:
        calls = sum(found.counts.values())
        counts = f"{counted(len(found.counts), 'problem')} in {counted(calls, 'call')}"
        message = f"{counts} written to {file}; gemmtune tune --recorded {file} tunes them"
        note(message if calls else f"no GEMMs were recorded: {file} is not written")
    write_json(json_file, found.to_json())
    return status or int(unwritten is not None)


def _status_of(module: bool, arguments: list[str]) -> int:
    """Run the program and return its exit status. What it raises is printed as python prints it."""
    try:
        with raising(_exit), _command_line(arguments, module):
            if module:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            note(str(end.code))
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:  # noqa: BLE001 - any exception of the program is reported as python reports it
        return _report(error)
    return 0


_RUNNERS = (__name__, "runpy", "importlib._bootstrap", "importlib._bootstrap_external")
"""Modules that find and run the program."""


def _report(error: BaseException) -> int:
    """Print the exception as ``python`` does, without the frames that ran the program, and return the exit status."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _RUNNERS:
        trace = trace.tb_next
    if trace is None and isinstance(error, ImportError):
        note(f"{sys.executable}: {error}")  # nothing of the program has run, because runpy found no such module
    else:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def recorded_problems(file: str, device_type: str) -> list[Problem]:
    """Return the problems of a recorded file, for devices of a type.

    Raises click.UsageError for a file without problems or of another program, and click.ClickException if it cannot be read.
    """
    try:
        problems = Recording.read(file).problems(device_type)
    except InvalidProblemError as error:
        raise click.UsageError(f"--recorded: {error}") from error
    except OSError as error:
        raise click.ClickException(f"--recorded: cannot read {file}: {error.strerror}") from error
    if not problems:
        raise click.UsageError(f"--recorded: {file} has no problems: the recorded program computed no GEMMs")
    return problems


def _parsed(program: Sequence[str]) -> tuple[bool, list[str]]:
    """Return True for a module, and the module or script with its arguments. Raises click.UsageError for another program."""
    first, rest = program[0], list(program[1:])
    if Path(first).name.startswith("python"):
        if rest[:1] == ["-m"] and len(rest) > 1:
            return True, rest[1:]
        if rest and not rest[0].startswith("-"):
            return False, rest
    elif Path(first).suffix == ".py":
        return False, [first, *rest]
    raise click.UsageError(
        f"record: got {' '.join(program)!r}, expected a script, or python with a script or -m and a module; use gemmtune.record() "
        "within other programs"
    )


def _exit(number: int) -> SystemExit:
    """Return the exit of a program that a signal ends, so that recorded products are written."""
    return SystemExit(128 + number)


@contextmanager
def _command_line(arguments: list[str], module: bool) -> Iterator[None]:
    """Set the program's ``sys.argv`` and its first folder to import from."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = list(arguments)
    sys.path.insert(0, "" if module else str(Path(arguments[0]).absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
