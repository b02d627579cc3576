"""The roofline plot of a report as SVG: each problem by its operations per byte and its rate, under the limits of its machine."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..timing.limits import BANDWIDTH
from .entries import Entry
from .sources import Limits

WIDTH, HEIGHT, MARGIN = 760, 380, 56
SERIES = 7
"""Colours of the style sheet. Further backends share the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A logarithmic axis from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return the powers of ten within the axis, every second one where there are many, with 2 and 5 where there are few."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [10.0**power for power in powers if self.low <= 10.0**power <= self.high]
        if len(found) < 2:
            return [digit * 10.0**power for power in powers for digit in (1, 2, 5) if self.low <= digit * 10.0**power <= self.high]
        return found[:: 1 + len(found) // 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A problem in the plot."""

    entry: Entry
    row_id: str
    intensity: float
    """Operations per byte."""
    tflops: float


def points_of(entries: Sequence[Entry], row_ids: Sequence[str]) -> list[Point]:
    """Return the points of the entries that have a time and a problem with work."""
    found = []
    for entry, row_id in zip(entries, row_ids, strict=True):
        work = entry.work()
        if work is not None and entry.time_us:
            found.append(Point(entry=entry, row_id=row_id, intensity=work[1] / work[0], tflops=work[1] / entry.time_us / 1e6))
    return found


def roofs(limits: Limits) -> list[tuple[str, float, float]]:
    """Return (dtype, bandwidth in 1e12 bytes/s, rate in Tflop/s) of each machine's measured limits."""
    found = []
    for values in limits.values():
        bandwidth = values.get(BANDWIDTH)
        for name, rate in values.items():
            if name.endswith("_gflops") and bandwidth:
                found.append((name.removesuffix("_gflops"), bandwidth / 1e3, rate / 1e3))
    return sorted(set(found))


def colours(entries: Iterable[Entry]) -> Mapping[str, int]:
    """Return the number of the colour of each backend, the most frequent first."""
    counts = Counter(entry.backend for entry in entries)
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: min(number, SERIES - 1) for number, name in enumerate(ordered)}


def legend(series: Mapping[str, int]) -> Markup:
    """Return the list of backends with their colours."""
    items = (Markup('<li><i style="background:var(--series-{})"></i>{}</li>').format(n, name) for name, n in series.items())
    return Markup("<ul class=legend>{}</ul>").format(Markup("").join(items))


def roofline(points: Sequence[Point], limits: Limits, series: Mapping[str, int]) -> Markup:
    """Return the plot. A point links to the row of its problem."""
    tops = roofs(limits)
    x_values = [point.intensity for point in points]
    y_values = [point.tflops for point in points] + [rate for _, _, rate in tops]
    x = Scale(low=min(x_values) / 1.5, high=max(x_values) * 1.5, start=MARGIN, end=WIDTH - 12)
    y = Scale(low=min(y_values) / 1.5, high=max(y_values) * 1.5, start=HEIGHT - 44, end=12)
    parts = [
        grid(x, y, "operations per byte", "Tflop/s"),
        *(_roof(x, y, *top) for top in tops),
        *(_dot(x, y, point, series) for point in points),
    ]
    plot = '<div class=plot><svg viewBox="0 0 {} {}" role=img aria-label="Rate by operations per byte">\n{}\n</svg></div>'
    return Markup(plot).format(WIDTH, HEIGHT, Markup("\n").join(parts))


def grid(x: Scale, y: Scale, x_name: str, y_name: str) -> Markup:
    """Return lines at the ticks of both axes, with their names."""
    lines = [
        Markup(
            '<line class=grid x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text x="{0}" y="{3}" class=middle>{4:g}</text>'
        ).format(x(tick), y.start, y.end, y.start + 16, tick)
        for tick in x.ticks()
    ] + [
        Markup(
            '<line class=grid x1="{0}" x2="{1}" y1="{2}" y2="{2}"/><text x="{3}" y="{4}" class=end>{5:g}</text>'
        ).format(x.start, x.end, y(tick), x.start - 6, y(tick) + 4, tick)
        for tick in y.ticks()
    ]  # fmt: skip
    names = Markup('<text x="{}" y="{}" class=middle>{}</text><text x="{}" y="{}">{}</text>').format(
        (x.start + x.end) / 2, HEIGHT - 8, x_name, x.start + 6, y.end + 18, y_name
    )
    return Markup("\n").join([*lines, names])


def _roof(x: Scale, y: Scale, dtype: str, bandwidth: float, rate: float) -> Markup:
    corner = min(max(rate / bandwidth, x.low), x.high)
    start = max(x.low, y.low / bandwidth)
    line = f"M{x(start)} {y(max(start * bandwidth, y.low))}L{x(corner)} {y(min(corner * bandwidth, rate))}"
    end = f"L{x.end} {y(rate)}" if rate / bandwidth < x.high else ""
    return Markup('<path class=roof d="{}"/><text x="{}" y="{}" class=end>{}</text>').format(
        line + end, x.end - 4, y(rate) - 5, dtype
    )  # fmt: skip


def _dot(x: Scale, y: Scale, point: Point, series: Mapping[str, int]) -> Markup:
    entry = point.entry
    title = f"{entry.text}: {entry.name}, {entry.time_us:.1f} µs, {point.tflops:.3g} Tflop/s"
    link = '<a href="#{}" tabindex=-1><circle cx="{}" cy="{}" r=4 fill="var(--series-{})"><title>{}</title></circle></a>'
    return Markup(link).format(point.row_id, x(point.intensity), y(point.tflops), series[entry.backend], title)
