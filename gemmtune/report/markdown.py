"""The report as Markdown, short enough for a comment on a pull request."""

from collections.abc import Iterable, Mapping, Sequence

from ..foreign import visible
from .entries import Entry, Pair, pairs_of
from .facts import by_backend, machines_apart, sides, totals
from .sources import Source, before_and_after

MOST_ROWS = 20


def report(sources: Sequence[Source]) -> str:
    """Return the text. Of two sources the second is the later."""
    shown = sources[-1]
    lines = ["# gemmtune: " + _cell(" and ".join(source.name for source in sources)), ""]
    lines += [", ".join(f"**{value}** {name}" for value, name in totals(shown.entries)), ""]
    if len(sources) > 1:
        lines += [_cell(before_and_after(sources[0], shown)), ""]
        slower, faster, changed = sides(pairs_of(sources[0].entries, shown.entries))
        lines += [f"**{len(slower)}** slower, **{len(faster)}** faster, **{len(changed)}** with another pick in equal time.", ""]
        for name, pairs in (("Slower", slower), ("Faster", faster), ("Another pick", changed)):
            lines += _pairs(name, pairs)
    lines += [f"- {_cell(x.text)}: {_cell(x.verdict)}" for x in shown.entries if x.verdict]
    if any(entry.name for entry in shown.entries):
        lines += ["", "| backend | picks | × torch |", "| --- | ---: | ---: |"]
        lines += [
            f"| {_cell(name)} | {count} | {_figure(mean)}{few and f' ({few})'} |"
            for name, count, mean, few in by_backend(shown.entries)
        ]
    lines += _slowest(shown.entries)
    return "\n".join(lines) + "\n"


def _pairs(name: str, pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return []
    rows, apart = [], machines_apart(pair.either for pair in pairs)
    for pair in pairs[:MOST_ROWS]:
        times = (side.time_us if side else None for side in (pair.before, pair.after))
        names = (side.name if side else None for side in (pair.before, pair.after))
        cells = (_named(pair.either, apart), *(_figure(us, 1) for us in times), _figure(pair.ratio), *map(_code, names))
        rows.append(f"| {' | '.join(cells)} |")
    head = ["| problem | µs before | µs after | ratio | pick before | pick after |", "| --- | ---: | ---: | ---: | --- | --- |"]
    more = [f"{len(pairs) - MOST_ROWS} more.", ""] if len(pairs) > MOST_ROWS else []
    return [f"<details><summary>{name}: {len(pairs)}</summary>", "", *head, *rows, "", *more, "</details>", ""]


def _slowest(entries: Iterable[Entry]) -> list[str]:
    """Return the problems with the least gain over torch."""
    entries = tuple(entries)
    apart = machines_apart(entries)
    ordered = sorted((entry for entry in entries if entry.speedup), key=lambda entry: entry.speedup or 0.0)
    head = [
        "",
        "<details><summary>The least gains</summary>",
        "",
        "| problem | pick | µs | × torch |",
        "| --- | --- | ---: | ---: |",
    ]
    rows = [
        f"| {_named(x, apart)} | {_code(x.name)} | {_figure(x.time_us, 1)} | {_figure(x.speedup)} |" for x in ordered[:MOST_ROWS]
    ]
    return [*head, *rows, "", "</details>"] if rows else []


def _named(entry: Entry, apart: Mapping[str, str]) -> str:
    where = apart.get(entry.machine)
    return _cell(entry.text + (f" ({where})" if where else ""))


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _code(name: str | None) -> str:
    return f"`{_cell(name or 'none')}`"


def _cell(text: str) -> str:
    """Return a text that stays within its cell and begins no markup."""
    text = visible(text)
    for character in "\\`|<>":
        text = text.replace(character, "\\" + character if character != "`" else "'")
    return " ".join(text.split())
