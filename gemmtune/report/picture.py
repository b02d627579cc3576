"""The report as a picture: rates under the limits, and speed over torch, drawn by matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnavailableError
from ..replacing import replacing
from .entries import Entry
from .facts import of_how_many
from .roofline import Point, Roof, axes, colours, labels, points_of, roofs
from .sources import Source

FONT = 8
"""Size of the text within the picture, in points."""
FEW = 10
"""Number of problems below which each one has a tick."""
REMEDY = "a picture needs matplotlib: pip install matplotlib"


def draw(source: Source, file: Path) -> None:
    """Write a PNG. Raises UnavailableError without matplotlib, and OSError if the file cannot be written."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnavailableError(f"got {error}: {REMEDY}") from error
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if points := points_of(source.entries, [""] * len(source.entries)):
        _roofline(left, points, roofs(source.limits))
    left.set(xlabel="operations per byte", ylabel="Tflop/s", title="rate and limits")
    _speeds(right, source.entries)
    figure.suptitle(source.name)
    with replacing(file) as new:
        figure.savefig(new, format="png", dpi=150)


def _roofline(plot: Any, points: Sequence[Point], tops: Sequence[Roof]) -> None:
    """Draw problems and limits, with names beside the lines where they do not overlap."""
    for name, number in colours(point.entry for point in points).items():
        own = [point for point in points if point.entry.backend == name]
        plot.plot([x.intensity for x in own], [x.tflops for x in own], ".", alpha=0.75, color=f"C{number}", label=name)
    box = plot.get_window_extent().width * 72 / plot.figure.dpi, plot.get_window_extent().height * 72 / plot.figure.dpi
    x, y = axes(points, tops, (0, box[0]), (0, box[1]))
    for top in tops:
        places = sorted({x.low, min(max(top.rate / top.bandwidth, x.low), x.high), x.high})
        plot.plot(places, [top.at(place) for place in places], linestyle="--", linewidth=1, color="gray", zorder=1)
    for label in labels(tops, x, y, FONT):
        shift = label.right - x.end, 2
        plot.annotate(
            label.text, (x.high, label.rate), xytext=shift, textcoords="offset points", fontsize=FONT, ha="right", va="bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0}, zorder=1.5,
        )  # fmt: skip
    plot.set(xscale="log", yscale="log", xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, scale in ((plot.xaxis, x), (plot.yaxis, y)):
        axis.set_ticks([], minor=True)
        axis.set_ticks(scale.ticks(), [f"{tick:g}" for tick in scale.ticks()])
    plot.legend(fontsize=FONT)


def _speeds(plot: Any, entries: Sequence[Entry]) -> None:
    """Draw the speeds over torch, the least first."""
    ratios = sorted(entry.speedup for entry in entries if entry.speedup)
    plot.plot(range(1, len(ratios) + 1), ratios, marker=".", linestyle="none")
    plot.axhline(1, color="gray", linewidth=1)
    few = of_how_many(entries)
    title = "speed over torch" + (f", {few} problems" if few else "")
    plot.set(xlabel="problems, by gain", ylabel="times torch's speed", title=title)
    plot.set_xlim(0.5, max(len(ratios), 1) + 0.5)
    if len(ratios) < FEW:
        plot.set_xticks(range(1, len(ratios) + 1))
    else:
        plot.xaxis.get_major_locator().set_params(integer=True)
