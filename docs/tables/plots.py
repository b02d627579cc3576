"""Plots of ``benchmarks/results`` as SVG files beside the pages, drawn by matplotlib.

A file has the digest of what it shows, so that ``--check`` finds a stale one without drawing it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import DOCS, models
from .measured import ABOUT, device, references, runs

FOLDER = DOCS / "plots"
INK = "#7a7f87"
"""Color of text and axes, readable on light and on dark pages."""
COLORS = ("#3f7fbf", "#d2691e", "#3a9a5c")
TICKS = (0.5, 1, 2, 4, 8, 16, 64, 256)
Points = list[tuple[str, str, list[float]]]
"""Rows of a plot: label, series, values."""


def shapes_over_torch() -> Points:
    """Return each file's ratios of torch's time to gemmtune's, by device."""
    found = []
    for _, name, content in runs():
        ratios = [
            row["regimes"]["graph"]["references"]["torch"]["ratio"] for row in content["shapes"] if "torch" in references(row)
        ]
        if ratios:
            found.append((ABOUT[name], device(content), ratios))
    return found


def steps_over_compile() -> Points:
    """Return each model step's ratios of torch.compile's time to that of other ways."""
    found = []
    for _, content in models.files():
        for scenario in content["scenarios"]:
            base = (scenario["ways"].get("compile") or {}).get("ms")
            model = scenario.get("model") or content["options"]["model"]
            for way, row in scenario["ways"].items():
                if base and row.get("ms") and way in ("optimize+compile", "int4+compile", "max-autotune"):
                    found.append((f"{model}, {scenario['name']}", way, [base / row["ms"]]))
    return found


PLOTS: dict[str, tuple[Callable[[], Points], str]] = {
    "shapes": (shapes_over_torch, "times torch's speed: one dot per shape, the bar is the geometric mean"),
    "models": (steps_over_compile, "times torch.compile's speed: one dot per measured step"),
}


def stale() -> list[str]:
    """Return the names of the plots whose file is missing or shows other numbers."""
    return [name for name in PLOTS if _digest(name) != _digest_in(FOLDER / f"{name}.svg")]


def draw(name: str) -> None:
    """Draw a plot into its file. Needs matplotlib, which the extra ``docs`` has."""
    import matplotlib as mpl  # noqa: PLC0415 - the check needs no matplotlib
    from matplotlib.figure import Figure  # noqa: PLC0415

    points, axis = PLOTS[name][0](), PLOTS[name][1]
    labels, series = (list(dict.fromkeys(row[i] for row in points)) for i in (0, 1))
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "text.color": INK, "font.size": 9}):
        figure = Figure(figsize=(9, 0.24 * len(labels) + 1.2), layout="constrained")
        axes: Any = figure.add_subplot()
        for which, color in zip(series, COLORS, strict=False):
            own = [(len(labels) - labels.index(label), values) for label, of, values in points if of == which]
            flat = [(value, at) for at, values in own for value in values]
            axes.plot(*zip(*flat, strict=True), "o", color=color, alpha=0.55, markersize=4, markeredgewidth=0, label=which)
            for at, values in own if name == "shapes" else ():
                axes.plot([_geomean(values)], [at], "|", color=color, markersize=12, markeredgewidth=2)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        values = [value for *_, each in points for value in each]
        axes.set_xlim(min(*values, 0.8) * 0.9, max(values) * 1.1)
        axes.set_yticks(range(len(labels), 0, -1), labels)
        axes.set_xlabel(axis, color=INK)
        axes.tick_params(colors=INK)
        axes.grid(axis="x", color=INK, alpha=0.25)
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")
        for side in axes.spines.values():
            side.set_visible(False)
        FOLDER.mkdir(exist_ok=True)
        figure.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None, "Description": _digest(name)})


def _geomean(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def _digest(name: str) -> str:
    content = json.dumps([PLOTS[name][0](), Path(__file__).read_text(encoding="utf-8")])
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def _digest_in(path: Path) -> str:
    found = re.search(r"sha256:[0-9a-f]{64}", path.read_text(encoding="utf-8")) if path.exists() else None
    return found[0] if found else ""
