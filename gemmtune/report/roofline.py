"""The roofline plot of a report as SVG: each problem by its operations per byte and its rate, under the limits of its machine."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..timing.limits import BANDWIDTH
from .entries import Entry
from .sources import Limits

WIDTH, HEIGHT, MARGIN, RIGHT, BOTTOM = 760, 400, 66, 28, 56
FONT = 22
"""Largest size of the text in a plot, that of a narrow screen, in units of the plot."""
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
        """Return the powers of ten within the axis, every second one where there are many, and other digits where there are few."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1,), (1, 2, 5), range(1, 10)):
            found = [digit * 10.0**power for power in powers for digit in digits if self.low <= digit * 10.0**power <= self.high]
            if len(found) > 1:
                break
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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Roof:
    """The limits of one machine for one dtype."""

    bandwidth: float
    """1e12 bytes/s."""
    rate: float
    """Tflop/s."""
    dtype: str

    def at(self, intensity: float) -> float:
        """Return the largest rate for so many operations per byte."""
        return min(intensity * self.bandwidth, self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The names of roofs that end at one place, above the line that ends at ``rate``. ``right`` is the end of the text."""

    names: tuple[str, ...]
    right: float
    rate: float

    @property
    def text(self) -> str:
        """The names, separated by commas."""
        return ", ".join(self.names)


def roofs(limits: Limits) -> list[Roof]:
    """Return the measured limits of each machine and dtype."""
    found = []
    for values in limits.values():
        bandwidth = values.get(BANDWIDTH)
        for name, rate in values.items():
            if name.endswith("_gflops") and bandwidth:
                found.append(Roof(dtype=name.removesuffix("_gflops"), bandwidth=bandwidth / 1e3, rate=rate / 1e3))
    return sorted(set(found))


def axes(
    points: Sequence[Point], tops: Iterable[Roof], x_ends: tuple[float, float], y_ends: tuple[float, float]
) -> tuple[Scale, Scale]:
    """Return the axes of the plot, drawn between these ends."""
    x_values = [point.intensity for point in points]
    x = Scale(low=min(x_values) / 1.5, high=max(x_values) * 1.5, start=x_ends[0], end=x_ends[1])
    y_values = [point.tflops for point in points] + [top.at(x.high) for top in tops]
    return x, Scale(low=min(y_values) / 1.5, high=max(y_values) * 1.5, start=y_ends[0], end=y_ends[1])


def labels(tops: Iterable[Roof], x: Scale, y: Scale, font: float) -> list[Label]:
    """Return labels that do not overlap in letters of this size.

    A label stands at the right end of its line, and left of labels that are near it. Lines that look like one share a label,
    and so do lines that leave no room for another.
    """
    found = list[Label]()
    for top in sorted(tops, key=lambda top: -top.at(x.high)):
        rate, width = top.at(x.high), 0.65 * font * len(top.dtype)
        near = sorted((o for o in found if abs(y(o.rate) - y(rate)) < 1.2 * font), key=lambda o: o.right)
        right = min((o.right - 0.65 * font * (len(o.text) + 1) for o in near), default=x.end - font / 5)
        alike = [o for o in near if abs(y(o.rate) - y(rate)) < font / 2]
        if near and (alike or right - width < x(min(max(top.rate / top.bandwidth, x.low), x.high))):
            shared = alike[0] if alike else near[0]
            names = tuple(dict.fromkeys((*shared.names, top.dtype)))
            found[found.index(shared)] = Label(names=names, right=shared.right, rate=shared.rate)
        else:
            found.append(Label(names=(top.dtype,), right=right, rate=rate))
    return found


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
    x, y = axes(points, tops, (MARGIN, WIDTH - RIGHT), (HEIGHT - BOTTOM, 12))
    parts = [
        grid(x, y, "operations per byte", "Tflop/s"),
        *(_roof(x, y, top) for top in tops),
        *(
            Markup('<text x="{}" y="{}" class=end>{}</text>').format(label.right, y(label.rate) - 5, label.text)
            for label in labels(tops, x, y, FONT)
        ),
        *(_dot(x, y, point, series) for point in points),
    ]
    plot = '<div class=plot><svg viewBox="0 0 {} {}" role=img aria-label="Rate by operations per byte">\n{}\n</svg></div>'
    return Markup(plot).format(WIDTH, HEIGHT, Markup("\n").join(parts))


def grid(x: Scale, y: Scale, x_name: str, y_name: str) -> Markup:
    """Return lines at the ticks of both axes, with their names."""
    lines = [
        Markup(
            '<line class=grid x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text x="{0}" y="{3}" class=middle>{4:g}</text>'
        ).format(x(tick), y.start, y.end, y.start + 20, tick)
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


def _roof(x: Scale, y: Scale, top: Roof) -> Markup:
    corner = min(max(top.rate / top.bandwidth, x.low), x.high)
    places = sorted({max(x.low, min(y.low / top.bandwidth, x.high)), corner, x.high})
    line = "L".join(f"{x(place)} {y(max(top.at(place), y.low))}" for place in places)
    return Markup('<path class=roof d="M{}"/>').format(line)


def _dot(x: Scale, y: Scale, point: Point, series: Mapping[str, int]) -> Markup:
    entry = point.entry
    title = f"{entry.text}: {entry.name}, {entry.time_us:.1f} µs, {point.tflops:.3g} Tflop/s"
    link = '<a href="#{}" tabindex=-1><circle cx="{}" cy="{}" r=4 fill="var(--series-{})"><title>{}</title></circle></a>'
    return Markup(link).format(point.row_id, x(point.intensity), y(point.tflops), series[entry.backend], title)
