"""The report as a picture: rates under the limits, and speed over torch, drawn by matplotlib."""

import importlib
from pathlib import Path
from typing import Any

from ..errors import UnavailableError
from ..replacing import replacing
from .roofline import colours, points_of, roofs
from .sources import Source

REMEDY = "a picture needs matplotlib: pip install matplotlib"


def draw(source: Source, file: Path) -> None:
    """Write a PNG. Raises UnavailableError without matplotlib, and OSError if the file cannot be written."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnavailableError(f"got {error}: {REMEDY}") from error
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = points_of(source.entries, [""] * len(source.entries))
    for name, number in colours(point.entry for point in points).items():
        own = [point for point in points if point.entry.backend == name]
        left.plot([x.intensity for x in own], [x.tflops for x in own], ".", alpha=0.75, color=f"C{number}", label=name)
    if points:
        low, high = (f(point.intensity for point in points) for f in (min, max))
        for dtype, bandwidth, rate in roofs(source.limits):
            corner = rate / bandwidth
            xs = [low, *([corner] if low < corner < high else []), high]
            left.plot(xs, [min(x * bandwidth, rate) for x in xs], linestyle="--", linewidth=1, color="gray")
            left.annotate(dtype, (high, min(high * bandwidth, rate)), fontsize=8, ha="right", va="bottom")
        left.legend(fontsize=8)
    left.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Tflop/s", title="rate and limits")
    ratios = sorted(entry.speedup for entry in source.entries if entry.speedup)
    right.plot(ratios, marker=".", linestyle="none")
    right.axhline(1, color="gray", linewidth=1)
    right.set(xlabel="problems, by gain", ylabel="times torch's speed", title="speed over torch")
    figure.suptitle(source.name)
    with replacing(file) as new:
        figure.savefig(new, format="png", dpi=150)
