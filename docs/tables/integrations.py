"""Tables of ``benchmarks/results/*/integrations.json``: what Inductor's table and the layers for vLLM gain."""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from . import table
from .measured import RESULTS, results

NOT_YET = "Nobody has measured it yet: `benchmarks/integrations.py`.\n"


def inductor() -> str:
    """Return a row for each product, compiled with and without a look-up table."""
    head = [
        "GPU",
        "M×N×K",
        "default µs",
        "max-autotune µs",
        "table µs",
        "max-autotune compile s",
        "table compile s",
        "entries",
        "taken",
    ]
    rows = []
    for gpu, row in _rows("inductor"):
        ways = row["ways"]
        seconds = (f"{row['compile_s'][name]:.1f}" if name in ways else "–" for name in ("max-autotune", "table"))
        rows.append(
            [
                gpu,
                _product(row),
                *(_us(ways, name) for name in ("default", "max-autotune", "table")),
                *seconds,
                str(len(row["entries"])),
                _entry(row["taken"]),
            ]
        )
    return table(*_without_empty(head, rows)) if rows else NOT_YET


def vllm() -> str:
    """Return a row for each layer, by torch and by the class that vLLM runs."""
    head = ["GPU", "M×N×K", "weights", "torch µs", "torch bfloat16 µs", "gemmtune µs", "× torch", "× torch bfloat16"]
    rows = []
    for gpu, row in _rows("vllm"):
        ways = row["ways"]
        first, quantized = next(iter(ways)), "bfloat16" in ways
        dense = "bfloat16" if quantized else first
        ours = ways.get("gemmtune")
        over = f"{ways[dense]['time_us'] / ours['time_us']:.2f}" if ours else "–"
        numbers = [_us(ways, first), _us(ways, dense), _us(ways, "gemmtune"), _ratio(ways, "gemmtune"), over]
        rows.append([gpu, _product(row), "int4" if quantized else "bfloat16", *numbers])
    return table(head, rows) if rows else NOT_YET


def serving() -> str:
    """Return the mean gain over torch in bfloat16 for each kind of weight and number of rows."""
    gains: dict[tuple[str, str, int], list[float]] = {}
    for gpu, row in _rows("vllm"):
        ways, rows = row["ways"], int(_product(row).split("x")[0])
        weights = "int4" if "bfloat16" in ways else "bfloat16"
        ours = ways.get("gemmtune", ways.get("bfloat16", ways[next(iter(ways))]))  # a layer that we do not serve is torch's
        gains.setdefault((gpu, weights, rows), []).append(ways.get("bfloat16", ways[next(iter(ways))])["time_us"] / ours["time_us"])
    rows = [[gpu, weights, str(m), str(len(x)), f"{geometric_mean(x):.2f}"] for (gpu, weights, m), x in sorted(gains.items())]
    return table(["GPU", "weights", "rows", "layers", "× torch bfloat16, geometric mean"], rows) if rows else NOT_YET


def _rows(part: str) -> list[tuple[str, dict[str, Any]]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*/integrations*.json")):
        content = results(path.parent.name, path.stem)
        for row in content[part]:
            key = content["environment"]["device"], row["problem"]
            if key not in found or len(row["ways"]) > len(found[key]["ways"]):  # one measured all ways
                found[key] = row
    ordered = sorted(found.items(), key=lambda x: (x[0][0], [int(size) for size in x[0][1].split()[1].split("x")]))
    return [(gpu, row) for (gpu, _), row in ordered]


def _without_empty(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns in which nothing was measured."""
    kept = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _product(row: dict[str, Any]) -> str:
    return str(row["problem"]).split()[1]


def _us(ways: dict[str, Any], name: str) -> str:
    return f"{ways[name]['time_us']:.1f}" if name in ways else "–"


def _ratio(ways: dict[str, Any], name: str) -> str:
    return f"{ways[name]['ratio']:.2f}" if name in ways else "–"


def _entry(entry: dict[str, Any]) -> str:
    if "BLOCK_M" not in entry:
        return str(entry["template_id"])
    sides = "x".join(str(entry[f"BLOCK_{side}"]) for side in "MNK")
    return f"{entry['template_id']} {sides}, {entry['num_stages']} stages, {entry['num_warps']} warps"


MAKERS: dict[str, Callable[[], str]] = {"measured-inductor": inductor, "measured-vllm": vllm, "measured-serving": serving}
"""Every made part by its name."""
