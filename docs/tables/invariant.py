"""Tables of ``benchmarks/results``: batch-invariant products, as ``benchmarks/invariant.py`` measures them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from . import table
from .measured import RESULTS, results

HEAD = ["GPU", "weight N×K, dtype", "values of M", "× torch", "lowest", "× the ordinary table", "× one config"]
NOTHING = "No results are in `benchmarks/results` yet.\n"


def costs() -> str:
    """Return the geometric means over M for each weight, and of how many Ms the bits were compared."""
    rows: list[list[str]] = []
    compared: list[str] = []
    for path in sorted(RESULTS.glob("*/invariant*.json")):
        content = results(path.parent.name, path.stem)
        gpu = path.parent.name
        for name in dict.fromkeys((row["weight"], row["dtype"]) for row in content["times"]):
            rows.append([gpu, f"{name[0].replace('x', '×')}, {name[1]}", *_means([x for x in content["times"] if _of(x) == name])])
        if content["bits"]:
            checked, differing = (sum(x[field] for x in content["bits"]) for field in ("checked", "differing"))
            compared.append(
                f"{gpu}: {differing} of {checked} batches had a row with different bits, over {len(content['bits'])} weights."
            )
    return table(HEAD, rows) + "".join(f"\n{line}\n" for line in compared) if rows else NOTHING


def _of(row: dict[str, Any]) -> tuple[str, str]:
    return row["weight"], row["dtype"]


def _means(rows: list[dict[str, Any]]) -> list[str]:
    cells = [str(len(rows))]
    for field, worst in (("over_torch", True), ("over_free", False), ("over_peer", False)):
        ratios = [row[field] for row in rows if field in row]
        cells.append(f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else "")
        cells += [f"{min(ratios):.2f}" if ratios else ""] if worst else []
    return cells


MAKERS: dict[str, Callable[[], str]] = {"invariant-costs": costs}
