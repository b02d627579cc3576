"""Tables and other output of rich as text. rich takes longer to import than this package, so only printing imports it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

NAMES = "choice"
"""Title of the column with names of choices."""
NATURAL_WIDTH = 10_000
"""Width beyond any table, so that text for pipes and files is not folded."""
MOST_RENDERED = 1000
"""Rows above which a table that fits is written without rich, which takes a millisecond for a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Table in the common style. On a narrow terminal it leaves out ``optional`` columns, the first ones first, until it fits."""

    texts: Sequence[str]
    numbers: Sequence[str] = ()
    last: str
    optional: Sequence[str] = ()
    rows: list[tuple[Sequence[RenderableType], str | None]] = field(default_factory=list)

    def add_row(self, *cells: RenderableType, style: str | None = None) -> None:
        """Add a row. Missing cells at its end are empty."""
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if len(self.rows) > MOST_RENDERED and (lines := self._lines(options.max_width)) is not None:
            yield from lines
            return
        wide = options.update(max_width=NATURAL_WIDTH)
        for count in range(len(self.optional) + 1):
            table = self._made(self.optional[:count], whole=True)
            measured = table.__rich_measure__(console, wide)
            if measured.maximum <= options.max_width:
                break
        yield table if measured.minimum <= options.max_width else self._made(self.optional, whole=False)

    def _lines(self, max_width: int) -> list[RenderableType] | None:
        """Return the lines that rich makes of the table. None if it does not fit, or if a cell is of several lines."""
        from rich.cells import cell_len  # noqa: PLC0415
        from rich.segment import Segment, Segments  # noqa: PLC0415

        titles = (*self.texts, *self.numbers, self.last)
        lines = [titles, *([*map(str, cells), *[""] * (len(titles) - len(cells))] for cells, _ in self.rows)]
        if any("\n" in text for line in lines for text in line):
            return None
        sizes = [[cell_len(text) for text in line] for line in lines]
        widths = [max(column) for column in zip(*sizes, strict=True)]
        for count in range(len(self.optional) + 1):
            shown = [place for place, title in enumerate(titles) if title not in self.optional[:count]]
            if (width := sum(widths[place] + 2 for place in shown) - 2) <= max_width:
                break
        else:
            return None

        def padded(line: Sequence[str], lengths: Sequence[int]) -> str:
            cells = ((line[x], " " * (widths[x] - lengths[x]), titles[x] in self.numbers) for x in shown)
            return "  ".join(gap + text if right else text + gap for text, gap, right in cells) + "\n"

        head, *rest = map(padded, lines, sizes)
        return [Segments([Segment(text) for text in (head, "─" * width + "\n", *rest)])]

    def _made(self, without: Sequence[str], *, whole: bool) -> Table:
        """Return the table without some columns. ``whole`` forbids to fold names."""
        from rich import box  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        titles = (*self.texts, *self.numbers, self.last)
        shown = [place for place, title in enumerate(titles) if title not in without]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for title in (titles[place] for place in shown):
            if title in self.numbers:
                table.add_column(title, justify="right", no_wrap=True)
            else:
                table.add_column(title, overflow="fold", no_wrap=whole and title == NAMES)
        for cells, style in self.rows:
            table.add_row(*(cells[place] for place in shown if place < len(cells)), style=style)
        return table


def plain_text(parts: Iterable[RenderableType], width: int | None = None) -> str:
    """Return the output of a rich console without colours, folded at ``width`` columns (None: never)."""
    from rich.console import Console  # noqa: PLC0415

    text = io.StringIO()
    console = Console(
        file=text, width=width or NATURAL_WIDTH, color_system=None, force_terminal=False, legacy_windows=False, markup=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 choice`` or ``2 choices``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
