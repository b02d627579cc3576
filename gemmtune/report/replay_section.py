"""The section of a report about replayed searches: regret by the number of measured choices, as a plot and as a table."""

from markupsafe import Markup

from ..page import Cell, Table, section
from .replay import Curve, Replay, summary
from .roofline import BOTTOM, HEIGHT, MARGIN, RIGHT, SERIES, WIDTH, Scale, grid, legend

LEAST_PERCENT, MOST_PERCENT = 0.1, 1000.0
"""Ends of the axis of regrets. Smaller and larger ones lie on its ends."""
COLUMNS = ("search", "order", "choices", "median %", "95th percentile %", "largest %", "known %")


def replay_section(found: Replay) -> Markup:
    """Return the section."""
    if not found.curves:
        return section("Replay", "No problem has enough measured choices.")
    about = Markup(
        "<p class=soft>Regret is the time of the best choice that a search has found by then over the best stored one, less one. "
        "Lines are 95th percentiles over {} problems with {:g} stored choices each, in the median. A search is compared with "
        "stored choices only.</p>"
    ).format(found.problems, found.measured)
    names = {_name(curve): number % SERIES for number, curve in enumerate(found.curves)}
    rows = [row for curve in found.curves for row in _rows(curve)]
    table = Table(name="replay", columns=COLUMNS, rows=rows, filters=("search", "order"), minor=("known %",))
    return section("Replay", about, _plot(found), legend(names), table.html)


def _name(curve: Curve) -> str:
    return f"{curve.search}, {curve.order} order"


def _rows(curve: Curve) -> list[tuple[Cell, ...]]:
    found = []
    for budget in curve.budgets:
        numbers = [100 * value for value in summary(curve.at(budget)).values()]
        cells = (Cell(text=f"{value:.1f}", number=value) for value in (*numbers, 100 * curve.known))
        found.append((Cell(text=curve.search), Cell(text=curve.order), Cell(text=str(budget), number=budget), *cells))
    return found


def _plot(found: Replay) -> Markup:
    x = Scale(low=1, high=2 * max(curve.budgets[-1] for curve in found.curves), start=MARGIN, end=WIDTH - RIGHT)
    y = Scale(low=LEAST_PERCENT, high=MOST_PERCENT, start=HEIGHT - BOTTOM, end=12)
    lines = (
        Markup('<polyline points="{}" fill=none stroke="var(--series-{})" stroke-width=2><title>{}</title></polyline>').format(
            " ".join(f"{x(budget)},{y(_within(100 * summary(curve.at(budget))['p95']))}" for budget in curve.budgets),
            number % SERIES,
            _name(curve),
        )
        for number, curve in enumerate(found.curves)
    )
    parts = [grid(x, y, "measured choices", "regret %"), *lines]
    plot = '<div class=plot><svg viewBox="0 0 {} {}" role=img aria-label="Regret by measured choices">\n{}\n</svg></div>'
    return Markup(plot).format(WIDTH, HEIGHT, Markup("\n").join(parts))


def _within(percent: float) -> float:
    return min(max(percent, LEAST_PERCENT), MOST_PERCENT)
