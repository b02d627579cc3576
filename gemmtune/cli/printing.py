"""Printing of commands: results to standard output, progress to standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from ..foreign import visible
from ..interrupts import raising
from ..selector.progress import Progress, progress_for
from ..selector.table import plain_text
from .output import interruption, note, status_of


def show(parts: Iterable[RenderableType]) -> None:
    """Print to standard output: colours and folded lines on a terminal, plain unfolded lines in a pipe.

    Control codes in a text, which others may have put into a store, become escapes.
    """
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for part in parts:
            console.print(_Visible(part))
    else:
        click.echo(visible(plain_text(parts)))


class _Visible:
    """Part whose text has escapes instead of control codes. The console adds its own codes later."""

    def __init__(self, part: RenderableType) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._part, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@contextlib.contextmanager
def watched(*, quiet: bool = False, kept: str = "") -> Iterator[Progress]:
    """Show the progress of the block unless it is ``quiet``. ``kept`` says what remains of its work after Ctrl-C or SIGTERM."""
    progress = Progress() if quiet else progress_for()
    try:
        with raising():
            yield progress
    except KeyboardInterrupt as error:
        if not kept:
            raise
        progress.close()
        note(f"{interruption(error)}: {kept}")
        raise click.exceptions.Exit(status_of(error)) from None
    finally:
        progress.close()
