"""What the commands print to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click
from rich.console import Console, RenderableType

from ..selector.table import plain_text

__all__ = ["show"]


def show(parts: Iterable[RenderableType]) -> None:
    """Print to standard output: with colours on a terminal, folded at its width; in a pipe as plain lines that are never folded."""
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for part in parts:
            console.print(part)
    else:
        click.echo(plain_text(parts))
