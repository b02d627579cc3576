"""Running of commands, and their output: notes to standard error, JSON to a file. ``printing`` prints the text."""

import functools
import importlib
import io
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from ..conformance.option_table import as_typed
from ..errors import GemmtuneError
from ..foreign import visible
from ..interrupts import Terminated, not_lost
from ..replacing import write_text as write_whole
from .files import STDOUT, OutputFile, refuse_overwriting
from .sections import EVERY, SectionedCommand, SharedOption

LOG = logging.getLogger("gemmtune")
LEVEL = "gemmtune.level"
"""Key of a click context's ``meta`` for the least level of messages, as in ``logging``."""
F = TypeVar("F", bound=Callable[..., Any])
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 + SIGINT, as shells report it."""
WRONG_USAGE = 2
"""Exit status of wrong usage, as click has it."""
SUBCOMMAND = "COMMAND [ARGS]..."
"""Metavar of a group of commands, which calls ``help_if_alone``."""
UNTESTED = 2
"""Exit status if the GEMM could not be judged, the same as for wrong usage."""


class CouldNotTest(click.ClickException):
    """Error that says nothing about the GEMM to be judged."""

    exit_code = UNTESTED


def note(text: str) -> None:
    """Print a line for the user on standard error, above a bar of progress there, with control codes as escapes."""
    print(visible(text), file=sys.stderr)


def interruption(error: BaseException | None) -> str:
    """Return what ended a command early."""
    return f"interrupted by {signal.Signals(error.number).name}" if isinstance(error, Terminated) else "interrupted"


def status_of(error: BaseException | None) -> int:
    """Return the exit status of a command that Ctrl-C or a signal ended."""
    return error.status if isinstance(error, Terminated) else INTERRUPTED


def write_json(path: str | None, data: Any, asked_by: str = "--json") -> None:
    """Write ``data`` to ``path`` (``-``: standard output, None: nowhere). Raises what ``write_text`` raises."""
    if path is None:
        return
    text = visible(json.dumps(data, indent=2, ensure_ascii=False, default=str, allow_nan=False), as_json=True)
    write_text(path, text + "\n", asked_by)


def write_text(path: str | Path, text: str, asked_by: str) -> None:
    """Write a file, or standard output for ``-``. Raises click.ClickException, which names the option or command, if it cannot."""
    if path == STDOUT:
        print_json(text.removesuffix("\n"))
        return
    try:
        write_whole(path, text)
    except OSError as error:
        raise click.ClickException(f"{asked_by}: cannot write {path}: {error.strerror}") from error


def print_json(text: str) -> None:
    """Print JSON, or another text for programs, to standard output, reserved or not."""
    click.echo(text, file=_reserved[-1] if _reserved else None)


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Keep standard output in the block for ``print_json``, in UTF-8, apart from what user-supplied modules print when imported."""
    if _reserved:
        yield
        return
    printed = sys.stdout
    printed.flush()
    kept = os.dup(1) if _is_file(printed, 1) and _is_file(sys.stderr, 2) else None
    _reserved.append(printed if kept is None else os.fdopen(kept, "w", encoding="utf-8"))
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


def _print_any_character() -> None:
    """Print a question mark for each character that the encoding of standard output lacks, such as a line of a table in Latin-1."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def seal_stdout() -> None:
    """Send all further output to standard error if standard output had JSON: modules may print when the process ends."""
    if _sealed and _is_file(sys.stdout, 1) and _is_file(sys.stderr, 2):
        sys.stdout.flush()
        os.dup2(2, 1)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings within the block as one line each, without the source line that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = _note_warning
        yield


def message_level() -> int:
    """Return the least level of messages that the command prints: INFO, or what ``--quiet`` and ``--verbose`` select."""
    context = click.get_current_context(silent=True)
    return logging.INFO if context is None else int(context.meta.get(LEVEL, logging.INFO))


def is_quiet() -> bool:
    """Return True with ``--quiet``: results and errors are printed, and neither progress nor warnings."""
    return message_level() == logging.ERROR


def _set_level(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[LEVEL] = logging.ERROR if parameter.name == "quiet" else logging.DEBUG


def level_options(function: F) -> F:
    """Add the options of every command that select its messages. The last one given holds."""
    options = (("-q", "--quiet", "Print results and errors only."), ("-v", "--verbose", "Print messages for debugging too."))
    for *names, text in reversed(options):
        more: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _set_level, "help": text}
        function = click.option(*names, cls=SharedOption, section=EVERY, **more)(function)
    return function


def _json_option(function: F) -> F:
    """Add the option for the result as JSON."""
    return click.option(
        "--json",
        "json_file",
        metavar="FILE",
        type=OutputFile(stdout=True),
        cls=SharedOption,
        section=EVERY,
        help="Write the result as JSON to FILE; - is standard output, which then gets nothing else.",
    )(function)


def command(
    work: str, *, group: click.Group | None = None, as_json: bool = True, logs: bool = True, **more: Any
) -> Callable[[Callable[[], None]], click.Command]:
    """Return the decorator of a command, whose help is the function's docstring. ``work`` names what does it (see ``run``).

    Below it stand the command's own options. Those of every command follow, with ``--json`` unless the command has its own.
    """

    def made(function: Callable[[], None]) -> click.Command:
        def callback(**given: Any) -> Any:
            return run(work, given, logs)

        own = getattr(function, "__click_params__", [])
        documented = functools.update_wrapper(callback, function)
        documented.__dict__["__click_params__"] = []
        shared = _json_option(level_options(documented)) if as_json else level_options(documented)
        shared.__dict__["__click_params__"] += own
        return (click.command if group is None else group.command)(cls=SectionedCommand, **more)(shared)

    return made


class _Notes(logging.Handler):
    """Handler that prints records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note("warning: " * (record.levelno >= logging.WARNING) + record.getMessage())


@contextmanager
def log_as_notes() -> Iterator[None]:
    """Print gemmtune's log within the block as notes, from ``message_level`` on."""
    before, handler = LOG.level, _Notes()
    LOG.setLevel(message_level())
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Show a text on a terminal during the block, unless the command is quiet."""
    shown = sys.stderr.isatty() and not is_quiet()
    if shown:
        click.echo(f"{text} …\r", nl=False, err=True)
    try:
        yield
    finally:
        if shown:
            click.echo(" " * (len(text) + 2) + "\r", nl=False, err=True)


def _note_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning unless the command is quiet, as a replacement for ``warnings.showwarning``. It may come from any thread."""
    if not LOG.isEnabledFor(logging.WARNING):
        return
    kind = "" if issubclass(category, (UserWarning, RuntimeWarning)) else f" ({category.__name__})"
    note(f"warning: {message}{kind}")


def run(command: str, given: dict[str, Any], logs: bool = True) -> Any:
    """Run ``module.function`` of this folder, which imports torch as help does not. Without ``logs`` the command's program logs."""
    module, _, name = command.partition(".")
    refuse_overwriting(click.get_current_context())
    with announced("loading torch"), not_lost():
        function = getattr(importlib.import_module(f".{module}", __package__), name)
    to_stdout = STDOUT in (given.get("json_file"), given.get("json"))
    if logs:  # else standard output is the program's
        _print_any_character()
    with log_as_notes() if logs else nullcontext(), reserved_stdout() if to_stdout else nullcontext():
        try:
            return function(**given)
        except (GemmtuneError, click.ClickException) as error:
            raise _typed(error) from error.__cause__


def _typed(error: GemmtuneError | click.ClickException) -> Exception:
    """Return the error with the option that its text begins with as on the command line: ``max_cases: …`` as ``--max-cases: …``."""
    options = [x for x in click.get_current_context().command.params if isinstance(x, click.Option)]
    spellings = {x.name or "": next((name for name in x.opts if name.startswith("--")), x.opts[0]) for x in options}
    before = error.message if isinstance(error, click.ClickException) else str(error)
    text = as_typed(before, spellings)
    if text == before:
        return error
    return type(error)(text) if isinstance(error, click.UsageError | CouldNotTest) else click.ClickException(text)


def help_if_alone(context: click.Context) -> None:
    """Print the help of a group that is called without a command, and exit as wrong usage does."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(WRONG_USAGE)
