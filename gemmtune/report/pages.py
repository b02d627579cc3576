"""The report of one store or result, or of two side by side, as a page of HTML."""

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from ..errors import InvalidProblemError, StoreError
from ..page import Cell, Table, code, page, section, tiles
from ..selector.segments import INVARIANT, TABLE
from ..selector.segments import Table as Segments
from ..store.row import Ranged
from .entries import Entry, Pair, pairs_of
from .facts import by_backend, by_reason, machines_apart, natural, sides, totals
from .names import class_text
from .roofline import SERIES, colours, legend, points_of, roofline, roofs
from .sources import Source, before_and_after

COLUMNS = (
    "problem", "verdict", "machine", "op", "dtype", "µs", "torch µs", "× torch", "of limit", "pick", "backend", "busy",
    "tuned in s", "measured",
)  # fmt: skip
MINOR = ("machine", "op", "dtype", "backend", "torch µs", "busy", "tuned in s", "measured")
MOST_BAR = 2.0
"""Speed over torch at which a bar fills its cell."""
MOST_REASONS = 40


def report(sources: Sequence[Source], *more: Markup) -> str:
    """Return the page, with ``more`` sections at its end. Of two sources the second is shown, and compared with the first."""
    shown = sources[-1]
    entries = sorted(shown.entries, key=lambda entry: natural(entry.text))
    row_ids = [f"p{number}" for number in range(len(entries))]
    parts = [
        Markup("").join(Markup("<p class=soft>{}</p>").format(text) for text in shown.machines),
        tiles(totals(entries)),
        *([_comparison(sources[0], shown)] if len(sources) > 1 else []),
        *_plot(shown, entries, row_ids),
        section("Problems", _problems(entries, row_ids).html),
        *_ranges(shown.tables),
        _backends(entries),
        *_reasons(entries),
        *more,
    ]
    return page("gemmtune: " + " and ".join(source.name for source in sources), *parts)


def _number(value: float | None, form: str, share: float | None = None, mark: str = "") -> Cell:
    """Return the cell of a number, or a dash."""
    if value is None:
        return Cell(text="–", mark="soft", number=-1.0)
    return Cell(text=form.format(value), number=value, share=share, mark=mark)


def _problems(entries: Sequence[Entry], row_ids: Sequence[str]) -> Table:
    rows, apart = [], machines_apart(entries)
    for entry in entries:
        words, speedup = entry.text.split(), entry.speedup
        mark = "bad" if speedup is not None and round(speedup, 2) < 1 else ""
        rows.append(
            (
                Cell(text=entry.text),
                Cell(text=entry.verdict, mark="bad" if entry.verdict.startswith("REGRESSED") else ""),
                Cell(text=apart.get(entry.machine, "")),
                Cell(text=words[0]),
                Cell(text=words[2] if len(words) > 2 else ""),
                _number(entry.time_us, "{:.1f}"),
                _number(entry.torch_us, "{:.1f}"),
                _number(speedup, "{:.2f}", share=(speedup or 0) / MOST_BAR, mark=mark),
                _number(entry.share, "~" * entry.limit_rough + "{:.0%}", share=entry.share or 0),
                Cell(text=code(entry.name or "none")),
                Cell(text=entry.backend),
                Cell(text="yes" if entry.disturbed else ""),
                _number(entry.seconds, "{:.1f}"),
                Cell(text=entry.measured_at[:16].replace("T", " ")),
            )
        )
    kept = [i for i, column in enumerate(COLUMNS) if not rows or any(str(row[i].text).strip("–") for row in rows)]
    columns = [COLUMNS[i] for i in kept]
    return Table(
        name="problems",
        columns=columns,
        rows=[[row[i] for i in kept] for row in rows],
        filters=[name for name in ("machine", "op", "dtype", "backend") if name in columns],
        minor=[name for name in MINOR if name in columns],
        row_ids=row_ids,
        details=[_detail(entry) for entry in entries],
    )


def _detail(entry: Entry) -> Markup:
    """Return the next best choices and the failures of a problem."""
    lines = [Markup("{} {:.1f} µs").format(code(name), time_us) for name, time_us in entry.others]
    if entry.disturbed:
        lines.append(Markup("measured on a busy machine: {}").format(entry.disturbed))
    lines += [Markup("{} choices {}: {}").format(count, status, reason) for status, reason, count in by_reason([entry])]
    return Markup("<br>").join(lines)


def _plot(source: Source, entries: Sequence[Entry], row_ids: Sequence[str]) -> list[Markup]:
    points = points_of(entries, row_ids)
    if not points:
        return []
    series = colours(point.entry for point in points)
    limits = " Dashed lines are the limits that were measured." if roofs(source.limits) else ""
    about = Markup("<p class=soft>A point is a problem; it links to its row.{}</p>").format(limits)
    return [section("Rate and limits", about, roofline(points, source.limits, series), legend(series))]


def _ranges(tables: Iterable[Ranged]) -> list[Markup]:
    """Return the section with a bar of segments for each table over M."""
    bars = []
    for fact in sorted(tables, key=lambda fact: (class_text(fact.key), fact.kind)):
        if fact.kind in (TABLE, INVARIANT):
            name = class_text(fact.key) + ", equal bits for every M" * (fact.kind == INVARIANT)
            try:
                bars.append(_bar(name, Segments.of(fact)))
            except (StoreError, InvalidProblemError) as error:
                bars.append(Markup("<div>{}</div><div class=bad>{}</div>").format(name, str(error)))
    if not bars:
        return []
    about = Markup("<p class=soft>The choice for each number of rows, on a logarithmic scale. A name opens the list.</p>")
    return [section("Tables over M", about, Markup("<div class=ranges>{}</div>").format(Markup("").join(bars)))]


def _bar(name: str, table: Segments) -> Markup:
    """Return the name, which opens the list of segments, and the bar."""
    names = list(dict.fromkeys(x.name for x in table.segments))
    parts = (
        Markup('<span style="flex:{:.3f};background:var(--series-{})" title="{}"></span>').format(
            math.log((x.hi + 1) / x.lo), names.index(x.name) % SERIES, str(x)
        )
        for x in table.segments
    )
    listed = (
        Markup('<li><i style="background:var(--series-{})"></i>{}..{} {}</li>').format(
            names.index(x.name) % SERIES, x.lo, x.hi, code(x.name)
        )
        for x in table.segments
    )
    bar = '<div class=range role=img aria-label="{}">{}</div>'
    return Markup("<details><summary>{}</summary><ul class=legend>{}</ul></details>" + bar).format(
        name, Markup("").join(listed), ", ".join(map(str, table.segments)), Markup("").join(parts)
    )


def _backends(entries: Sequence[Entry]) -> Markup:
    rows = [
        (Cell(text=name), _number(count, "{}"), _number(mean, "{:.2f}" + (few and f" ({few})")))
        for name, count, mean, few in by_backend(entries)
    ]
    return section("Picks by backend", Table(name="backends", columns=("backend", "picks", "× torch"), rows=rows).html)


def _reasons(entries: Sequence[Entry]) -> list[Markup]:
    found = by_reason(entries)
    if not found:
        return []
    rows = [(Cell(text=status), Cell(text=reason), _number(count, "{}")) for status, reason, count in found[:MOST_REASONS]]
    table = Table(name="reasons", columns=("status", "reason", "choices"), rows=rows)
    more = f"{len(found) - MOST_REASONS} rarer reasons are left out." if len(found) > MOST_REASONS else ""
    return [section("Choices that failed or were refused", table.html, Markup("<p class=soft>{}</p>").format(more))]


def _comparison(before: Source, after: Source) -> Markup:
    """Return the section of two files: slower, faster and changed problems beyond noise, and those of one file only."""
    pairs = pairs_of(before.entries, after.entries)
    slower, faster, changed = sides(pairs)
    facts = [(str(len(slower)), "slower"), (str(len(faster)), "faster"), (str(len(changed)), "another pick, equal time")]
    facts += [(str(n), name) for n, name in ((_alone(pairs, 0), "only before"), (_alone(pairs, 1), "only after")) if n]
    rows = [_pair(pair) for pair in (*slower, *faster, *changed)]
    table = Table(
        name="comparison",
        columns=("problem", "is", "µs before", "µs after", "after / before", "pick before", "pick after"),
        rows=rows,
        filters=("is",),
        minor=("µs before", "µs after", "pick before"),
    )
    about = Markup("<p class=soft>{} Differences within the noise are left out.</p>").format(before_and_after(before, after))
    return section("Before and after", about, tiles(facts), table.html if rows else "Nothing differs.")


def _alone(pairs: Iterable[Pair], side: int) -> int:
    return sum((pair.after, pair.before)[side] is None for pair in pairs)


def _pair(pair: Pair) -> tuple[Cell, ...]:
    word, mark = ("slower", "bad") if pair.slower else ("faster", "good") if pair.faster else ("changed", "")
    before, after = pair.before, pair.after
    names = ((entry.name if entry else None) or "none" for entry in (before, after))
    return (
        Cell(text=pair.either.text),
        Cell(text=word, mark=mark),
        _number(before.time_us if before else None, "{:.1f}"),
        _number(after.time_us if after else None, "{:.1f}"),
        _number(pair.ratio, "{:.2f}", mark=mark),
        *(Cell(text=code(name)) for name in names),
    )
