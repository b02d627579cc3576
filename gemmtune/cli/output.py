"""Output of commands: progress and notes to standard error, JSON to a file. ``printing`` prints the text."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from ..foreign import visible
from ..interrupts import Terminated

STDOUT = "-"
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 + SIGINT, as shells report it."""


UNTESTED = 2
"""Exit status if the GEMM could not be judged, the same as for wrong usage."""


class CouldNotTest(click.ClickException):
    """Error that says nothing about the GEMM to be judged."""

    exit_code = UNTESTED


def note(text: str) -> None:
    """Print a line for the user on standard error, with control codes as escapes."""
    click.echo(visible(text), err=True)


def interruption(error: BaseException | None) -> str:
    """Return what ended a command early."""
    return f"interrupted by {signal.Signals(error.number).name}" if isinstance(error, Terminated) else "interrupted"


def status_of(error: BaseException | None) -> int:
    """Return the exit status of a command that Ctrl-C or a signal ended."""
    return error.status if isinstance(error, Terminated) else INTERRUPTED


def write_json(path: str | None, data: Any) -> None:
    """Write ``data`` to ``path`` (``-``: standard output, None: nowhere).

    Raises:
        click.ClickException: the file cannot be written.
    """
    if path is None:
        return
    text = visible(json.dumps(data, indent=2, ensure_ascii=False, default=str, allow_nan=False), as_json=True)
    if path == STDOUT:
        print_json(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--json: cannot write {path}: {error.strerror}") from error


def print_json(text: str) -> None:
    """Print a JSON text to standard output, reserved or not."""
    click.echo(text, file=_reserved[-1] if _reserved else None)


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Keep standard output for ``print_json``. All else that is printed within the block goes to standard error.

    User-supplied modules may print when they are imported, from Python or not.
    """
    if _reserved:
        yield
        return
    printed = sys.stdout
    printed.flush()
    kept = os.dup(1) if _is_file(printed, 1) and _is_file(sys.stderr, 2) else None
    _reserved.append(printed if kept is None else os.fdopen(kept, "w", encoding=printed.encoding))
    sys.stdout = sys.stderr
    if kept is not None:
        os.dup2(2, 1)
    try:
        yield
    finally:
        stream = _reserved.pop()
        stream.flush()
        _sealed.append(True)
        sys.stdout = printed
        if kept is not None:
            os.dup2(kept, 1)
            stream.close()


def _is_file(stream: TextIO, number: int) -> bool:
    """Return True if a stream writes to the file of this number, and not into a buffer of a test."""
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


_reserved: list[TextIO] = []
_sealed: list[bool] = []


def seal_stdout() -> None:
    """Send all further output to standard error if standard output had JSON: modules may print when the process ends."""
    if _sealed and _is_file(sys.stdout, 1) and _is_file(sys.stderr, 2):
        sys.stdout.flush()
        os.dup2(2, 1)


def _checked_path(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Reject a path at once that would fail after minutes of measuring."""
    if value is None or value == STDOUT:
        return value
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"got {value!r}, which is a folder; expected a file to write, or - for standard output")
    if not path.parent.is_dir():
        raise click.BadParameter(f"got {value!r}, but the folder {str(path.parent)!r} does not exist; make it, or name another")
    return value


json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_checked_path,
    help="Write the result as JSON to FILE; - is standard output, which then gets nothing else.",
)
"""Option of every command."""


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings within the block as one line each, without the source line that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = _note_warning
        yield


def _note_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning, as a replacement for ``warnings.showwarning``."""
    kind = "" if issubclass(category, (UserWarning, RuntimeWarning)) else f" ({category.__name__})"
    note(f"warning: {message}{kind}")
