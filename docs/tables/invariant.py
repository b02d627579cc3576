"""Tables of ``benchmarks/results``: batch-invariant products and models, by ``benchmarks/invariant.py`` and ``model.py``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from . import table
from .measured import RESULTS, results

HEAD = ["GPU", "weight N×K, dtype", "values of M", "× torch", "× torch, lowest", "× the ordinary table", "× one config"]
MODEL_HEAD = ["GPU", "model", "step", "ordinary, ms", "batch-invariant, ms", "× ordinary"]
ORDINARY, INVARIANT = "optimize+compile", "invariant+compile"
NOTHING = "No results are in `benchmarks/results` yet.\n"


def costs() -> str:
    """Return the geometric means over M for each weight, and of how many Ms the bits were compared."""
    rows = [
        [gpu, f"{name[0].replace('x', '×')}, {name[1]}", *_means(points)]
        for gpu, by_weight in _by_gpu("times").items()
        for name, points in by_weight.items()
    ]
    compared: list[str] = []
    for gpu, by_weight in _by_gpu("bits").items():
        counts = [x for points in by_weight.values() for x in points]
        checked, differing = (sum(x[field] for x in counts) for field in ("checked", "differing"))
        compared.append(f"{gpu}: {differing} of {checked} batches had a row with different bits, over {len(counts)} weights.")
    return table(HEAD, rows) + "".join(f"\n{line}\n" for line in compared) if rows else NOTHING


def models() -> str:
    """Return the times of steps of compiled models with batch-invariant and with ordinary tables."""
    rows = []
    for gpu, content in _files():
        for step in content.get("scenarios", ()):
            ms = {way: step["ways"].get(way, {}).get("ms") for way in (ORDINARY, INVARIANT)}
            if all(ms.values()):
                name = f"{content['options']['model']}, {content['options']['layers']} layers"
                ratio = f"{ms[ORDINARY] / ms[INVARIANT]:.2f}"
                rows.append([gpu, name, step["name"], f"{ms[ORDINARY]:.3f}", f"{ms[INVARIANT]:.3f}", ratio])
    return table(MODEL_HEAD, rows) if rows else NOTHING


def _files() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each GPU and a content, in the order of measurement."""
    found = [(path.parent.name, results(path.parent.name, path.stem)) for path in sorted(RESULTS.glob("*/invariant*.json"))]
    yield from sorted(found, key=lambda item: (item[0], item[1]["environment"]["measured_at"]))


def _by_gpu(part: str) -> dict[str, dict[tuple[str, str], list[dict[str, Any]]]]:
    """Return the rows of a part by GPU, and by weight and dtype. The latest file with a weight counts."""
    found: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for gpu, content in _files():
        latest: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in content.get(part, ()):
            latest.setdefault((row["weight"], row["dtype"]), []).append(row)
        if latest:
            found[gpu] = found.get(gpu, {}) | latest
    return found


def _means(rows: list[dict[str, Any]]) -> list[str]:
    cells = [str(len(rows))]
    for field, worst in (("over_torch", True), ("over_free", False), ("over_peer", False)):
        ratios = [row[field] for row in rows if field in row]
        cells.append(f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else "")
        cells += [f"{min(ratios):.2f}" if ratios else ""] if worst else []
    return cells


MAKERS: dict[str, Callable[[], str]] = {"invariant-costs": costs, "invariant-models": models}
