"""Printing of commands: results to standard output, progress to standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from ..foreign import visible
from ..interrupts import raising
from ..problem import Problem
from ..selector.progress import Progress, progress_for
from ..selector.result import ProblemResult
from ..selector.table import pick_line, renderables
from ..selector.text_table import plain_text
from ..settings import Settings
from ..store.store import open_store
from .files import STDOUT
from .output import interruption, is_quiet, note, status_of, write_json


def show(parts: Iterable[RenderableType]) -> None:
    """Print to standard output: colours and folded lines on a terminal, plain unfolded lines in a pipe.

    Control codes in a text, which others may have put into a store, become escapes.
    """
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for part in parts:
            console.print(_Visible(part))
    elif text := plain_text(parts):
        click.echo(visible(text))


def answer(json_file: str | None, data: Any, parts: Iterable[RenderableType]) -> None:
    """Print the result of a command, unless standard output is for JSON, and write it as JSON where that was asked for."""
    if json_file != STDOUT:
        show(parts)
    write_json(json_file, data)


class Results(Progress):
    """Listener that prints each result as soon as it is known, in one line with ``--quiet``, and passes on everything else."""

    def __init__(self, progress: Progress, max_rows: int | None) -> None:
        self.progress = progress
        self._max_rows = max_rows
        self._count = 0

    def begin(self, problem: Problem, total_problems: int) -> None:
        self.progress.begin(problem, total_problems)

    def stage(self, name: str, done: int, total: int) -> None:
        self.progress.stage(name, done, total)

    def end(self, result: ProblemResult) -> None:
        self.progress.close()
        if is_quiet():
            show([Text(f"{result.problem}: {pick_line(result)}")])
        else:
            show([*([Text("")] if self._count else []), *renderables([result], max_rows=self._max_rows)])
        self._count += 1

    def message(self, text: str) -> None:
        self.progress.message(text)

    def close(self) -> None:
        self.progress.close()


class _Visible:
    """Part whose text has escapes instead of control codes. The console adds its own codes later."""

    def __init__(self, part: RenderableType) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._part, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@contextlib.contextmanager
def watched(*, kept: Callable[[], str] | None = None) -> Iterator[Progress]:
    """Show the block's progress unless the command is quiet. ``kept`` says what remains of its work after Ctrl-C or SIGTERM."""
    progress = Progress() if is_quiet() else progress_for()
    try:
        with raising():
            yield progress
    except KeyboardInterrupt as error:
        if kept is None:
            raise
        progress.close()
        note(f"{interruption(error)}: {kept()}")
        raise click.exceptions.Exit(status_of(error)) from None
    finally:
        progress.close()


def kept_in_store(chosen: Settings) -> Callable[[], str]:
    """Return a function that says what the store has of measurements that are made from now on."""
    before = open_store(chosen).digest()

    def said() -> str:
        store = open_store(chosen)
        if store.digest() == before:
            return "nothing was measured yet"
        if not store.writable:
            return f"measurements are lost: {store.trouble}"
        again = "" if chosen.tune == "force" else "; the same command goes on from there"
        return f"measurements are kept in {chosen.store_file}{again}"

    return said
