"""Pages of HTML that need no network: one style sheet and one sortable table for every report, light and dark.

Everything that a file may hold is escaped where it enters a page. A page has no external resource.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup, escape

from ..foreign import visible

PAGE = Markup(
    "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
    '<meta name=viewport content="width=device-width, initial-scale=1">\n<title>{title}</title>\n<style>\n{style}</style>\n'
    "</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
)
MOST_UNFOLDED = 40
"""Characters of a text that a cell keeps on one line."""
MOST_SHOWN = 200
"""Rows of a table that a page shows at first. A browser takes seconds to lay out thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A table's cell: the text, the number by which it sorts, and the share of a bar behind it, between 0 and 1."""

    text: str | Markup
    number: float | None = None
    share: float | None = None
    mark: str = ""
    """Name of a class of the style sheet: ``good``, ``bad`` or ``soft``."""

    def html(self, *, minor: bool = False, opens: bool = False) -> Markup:
        """Return the element. With ``opens`` its text is a button that opens the row's details."""
        order = Markup("") if self.number is None else Markup(' data-order="{}"').format(repr(self.number))
        style = Markup("") if self.share is None else Markup(' style="--share:{:.3f}"').format(min(max(self.share, 0.0), 1.0))
        flags = {"number": self.number is not None, "bar": self.share is not None, "minor": minor, self.mark: bool(self.mark)}
        flags["long"] = not isinstance(self.text, Markup) and len(self.text) > MOST_UNFOLDED
        names = " ".join(name for name, holds in flags.items() if holds)
        text = Markup("<button type=button aria-expanded=false>{}</button>").format(self.text) if opens else self.text
        return Markup('<td class="{}"{}{}>{}</td>').format(names, order, style, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that the reader sorts by a click on a column's head, and filters by text and by the values of some columns."""

    name: str
    """An identifier, unique in the page."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    filters: Sequence[str] = ()
    """Columns whose values the reader selects from."""
    minor: Sequence[str] = ()
    """Columns that a narrow screen does not show."""
    row_ids: Sequence[str] = ()
    """Identifiers of the rows, for links into the table."""
    details: Sequence[Markup] = ()
    """What a row shows when it is opened."""

    @property
    def html(self) -> Markup:
        """Return the controls and the table. Rows beyond the first are text, which the script turns into elements when needed."""
        places = {column: number for number, column in enumerate(self.columns)}
        head = Markup("").join(
            Markup('<th scope=col class="{}"><button type=button>{}</button></th>').format(self._class(place, column), column)
            for place, column in enumerate(self.columns)
        )
        rows = self._rows()
        table = Markup("<table class=sortable id={}>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody>\n</table>").format(
            self.name, head, Markup("").join(rows[:MOST_SHOWN])
        )  # fmt: skip
        return Markup("{}\n<div class=scroll tabindex=0 role=region aria-label={}>\n{}\n</div>{}").format(
            self._controls(places), self.name, table, self._rest(rows[MOST_SHOWN:])
        )

    def _rest(self, rows: Sequence[Markup]) -> Markup:
        """Return further rows as text, with buttons to show them. Nothing where there are none."""
        if not rows:
            return Markup("")
        return Markup(
            "\n<p data-table={0}><span>{1} of {2} rows</span>"
            "<button type=button>{1} more</button><button type=button>all</button></p>"
            "\n<script type=text/html data-table={0}>\n{3}</script>"
        ).format(self.name, MOST_SHOWN, len(self.rows), Markup("").join(rows))

    def _class(self, place: int, column: str) -> str:
        numbers = any(row[place].number is not None for row in self.rows)
        return " ".join(["number"] * numbers + ["minor"] * (column in self.minor))

    def _rows(self) -> list[Markup]:
        """Return the element of each row, its details included."""
        parts: list[Markup] = []
        minor = [column in self.minor for column in self.columns]
        for number, cells in enumerate(self.rows):
            row_id = Markup(' id="{}"').format(self.row_ids[number]) if self.row_ids else Markup("")
            detail = self.details[number] if self.details else Markup("")
            shown = Markup("").join(
                cell.html(minor=minor[place], opens=bool(detail) and not place) for place, cell in enumerate(cells)
            )
            below = Markup("<tr class=detail hidden><td colspan={}>{}</td></tr>\n").format(len(cells), detail) if detail else ""
            parts.append(Markup("<tr{}>{}</tr>\n{}").format(row_id, shown, below))
        return parts

    def _controls(self, places: dict[str, int]) -> Markup:
        if not self.filters:
            return Markup("")
        selects = Markup(" ").join(
            Markup('<label>{} <select data-column="{}"><option value="">all</option>{}</select></label>').format(
                column, places[column], Markup("").join(map(_option, sorted({str(row[places[column]].text) for row in self.rows})))
            )
            for column in self.filters
        )
        return Markup(
            '<form class=controls data-table={} role=search><label>find <input type=search size=24></label> {} '
            "<output>{} rows</output></form>"
        ).format(self.name, selects, len(self.rows))  # fmt: skip


def _option(value: str) -> Markup:
    return Markup("<option>{}</option>").format(value)


def code(name: str) -> Markup:
    """Return the name of a choice, which may be folded at its underscores."""
    return Markup("<code>{}</code>").format(Markup("_<wbr>").join(name.split("_")))


def section(title: str, *parts: str | Markup) -> Markup:
    """Return a section with a heading. Parts that are no markup are escaped."""
    return Markup("<section>\n<h2>{}</h2>\n{}\n</section>").format(title, Markup("\n").join(map(escape, parts)))


def tiles(facts: Iterable[tuple[str, str]]) -> Markup:
    """Return the few numbers that a reader looks for first, as pairs of value and name."""
    shown = (Markup("<div class=tile><b>{}</b><span>{}</span></div>").format(value, name) for value, name in facts)
    return Markup("<div class=tiles>{}</div>").format(Markup("").join(shown))


def page(title: str, *parts: Markup) -> str:
    """Return the text of a whole page. Characters that hide text, or turn its direction, are shown as escapes."""
    files = resources.files(__package__)
    style, script = (Markup(files.joinpath(name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return visible(str(PAGE.format(title=title, style=style, script=script, body=Markup("\n").join(parts))))
