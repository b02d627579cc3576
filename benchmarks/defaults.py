"""What do layers cost that nobody tuned? Layers of models that the predictor has not seen, in several ways, in CUDA graphs.

    python benchmarks/defaults.py --json defaults.json                    bfloat16, int4 and int8, half a minute each on an H100
    python benchmarks/defaults.py --kinds bfloat16,int4 --tuned --json defaults.json

``torch`` is the layer as it is: with few bits, one kernel dequantizes the weight and torch multiplies. ``bfloat16`` is the layer
with its own weight. ``default`` is the layer after ``optimize`` without inputs: its kernels are predicted or by rule, verified here
and not measured. ``tuned`` is the layer after a default search for these rows. Random numbers, a fresh store. Microseconds, the
median of graphs that run several equal layers one after another, so that no weight stays in a cache. A small kernel runs between
two layers, as in a model, and its time is subtracted. It varies by microseconds from graph to graph, hence the number of layers.
The ways take turns, so that all see the same clocks.
"""

from __future__ import annotations

import collections
import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.tuning.explain import Explanation

MODELS = {
    "mistral-nemo-12b": ((5120, 6144), (4096, 5120), (5120, 28672), (14336, 5120)),
    "falcon3-7b": ((3072, 5120), (3072, 3072), (3072, 46080), (23040, 3072)),
}
"""In- and out-features of the layers of a block, with those of one input as one layer. The predictor's data lacks these models."""
KINDS = ("bfloat16", "int4", "int8")
ROWS = (1, 16, 64, 190, 512, 2048)
CACHES = 4
"""The weights together are at least so many times the L2 cache. An L2 cache keeps some of a weight that is little larger."""
LAYERS = 8
"""So many layers are in a graph at least."""
REPLAYS = 15


@click.command()
@click.option("--json", "out", help="Write everything to this file.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Kinds of weights, separated by commas.")
@click.option("--models", default=",".join(MODELS), show_default=True, help="Models, separated by commas.")
@click.option("--tuned", is_flag=True, help="Compare with a search for the same rows, 10 seconds a weight.")
def main(out: str | None, kinds: str, models: str, tuned: bool) -> None:
    """Measure layers that nobody tuned."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no GPU here, and default tables are for GPUs")
    device = detect("cuda")
    report: dict[str, Any] = {"environment": describe_environment(device), "rows": [], "optimize_s": []}
    with tempfile.TemporaryDirectory() as folder, settings.patch(store_path=f"{folder}/store.sqlite", tune="never"):
        for model in models.split(","):
            for kind in kinds.split(","):
                seconds = {"first": optimize_s(MODELS[model], kind), "compiled": optimize_s(MODELS[model], kind)}
                report["optimize_s"].append({"model": model, "kind": kind} | seconds)
                click.echo(report["optimize_s"][-1])
                for size in MODELS[model]:
                    report["rows"] += rows_of(model, size, kind, device.l2_bytes, tuned=tuned)
                    report["summary"] = summary(report["rows"])
                    if out:
                        Path(out).write_text(json.dumps(report, indent=1) + "\n")
    click.echo(json.dumps(report["summary"], indent=1))


def layers_of(size: tuple[int, int], kind: Any, count: int = 1) -> list[nn.Module]:
    """Return equal layers of a kind."""
    layer = nn.Linear(*size, bias=False, device="cuda", dtype=torch.bfloat16)
    model = nn.Sequential(layer) if kind == "bfloat16" else gemmtune.quantize_(nn.Sequential(layer), kind)
    return [model[0], *(copy.deepcopy(model[0]) for _ in range(count - 1))]


def optimize_s(sizes: Sequence[tuple[int, int]], kind: str) -> float:
    """Return the seconds that ``optimize`` takes for the layers of a block, without a stored table.

    The first time processes start and kernels compile; then only the choice and the verification are left.
    """
    model = nn.Sequential(*(layer for size in sizes for layer in layers_of(size, kind)))
    with tempfile.TemporaryDirectory() as folder, settings.patch(store_path=f"{folder}/store.sqlite"):
        begun = time.perf_counter()
        gemmtune.optimize(model, progress=False)
        return round(time.perf_counter() - begun, 2)


def rows_of(model: str, size: tuple[int, int], kind: str, l2_bytes: int, *, tuned: bool) -> list[dict[str, Any]]:
    """Return a record for each number of rows, with the time of each way."""
    plain = layers_of(size, "bfloat16")[0]
    layers = layers_of(size, kind, copies(layers_of(size, kind)[0], l2_bytes))
    inputs = [torch.randn(rows, size[0], device="cuda", dtype=torch.bfloat16) for rows in ROWS]
    spacer = torch.zeros(32, device="cuda")
    graphs = {"torch": [captured(layers, x, spacer) for x in inputs]}
    if kind != "bfloat16":
        dense = [plain, *(copy.deepcopy(plain) for _ in range(copies(plain, l2_bytes) - 1))]
        graphs["bfloat16"] = [captured(dense, x, spacer) for x in inputs]
    gemmtune.optimize(nn.Sequential(*layers), progress=False)
    graphs["default"] = [captured(layers, x, spacer) for x in inputs]
    picks = [shown(layers[0], rows) for rows in ROWS]
    names = {"choice": [f"{x.pick} ({x.origin})" for x in picks]}
    if tuned:
        with settings.patch(timing="spaced", tune="on_miss"):
            gemmtune.tune([x.problem for x in picks if x.problem], progress=False)
        forget_plans()
        graphs["tuned"] = [captured(layers, x, spacer) for x in inputs]
        names["tuned_choice"] = [str(shown(layers[0], rows).pick) for rows in ROWS]
    found = []
    for place, rows in enumerate(ROWS):
        record: dict[str, Any] = {"model": model, "in": size[0], "out": size[1], "kind": kind, "rows": rows}
        record |= {name: values[place] for name, values in names.items()}
        found.append(record | in_turns({way: ready[place] for way, ready in graphs.items()}))
        click.echo("  ".join(f"{name} {value}" for name, value in found[-1].items()))
    return found


def copies(layer: Any, l2_bytes: int) -> int:
    """Return how many equal layers a graph has."""
    return int(max(LAYERS, CACHES * l2_bytes // layer.weight.nbytes))


def shown(layer: Any, rows: int) -> Explanation:
    """Return the choice of the layer, its origin and the problem."""
    x, weight = torch.empty(rows, layer.in_features, device="cuda", dtype=torch.bfloat16), layer.weight
    with settings.patch(timing="spaced"):
        if isinstance(weight, gemmtune.QuantizedWeight):
            given = {"scale_b": weight.scales, "zero_b": weight.zero_points, "encoding": weight.encoding}
            return gemmtune.explain(
                "mixed_mm", x, weight.tensor, **{key: value for key, value in given.items() if value is not None}
            )
        return gemmtune.explain("mm", x, weight.detach().t())


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph of layers with a small kernel after each, and one of the small kernels alone."""

    graph: torch.cuda.CUDAGraph
    empty: torch.cuda.CUDAGraph
    layers: int

    def us(self) -> float:
        """Return the time of one layer now."""
        return (_replay_us(self.graph) - _replay_us(self.empty)) / self.layers


def captured(layers: Sequence[nn.Module], x: torch.Tensor, spacer: torch.Tensor) -> Captured:
    """Capture the layers with an input. The graphs write to the spacer."""
    return Captured(_graph(layers, x, spacer), _graph([nn.Identity()] * len(layers), x, spacer), len(layers))


def in_turns(ways: Mapping[str, Captured]) -> dict[str, float]:
    """Return the median time of a layer by way. The ways alternate."""
    rounds = [{way: ready.us() for way, ready in ways.items()} for _ in range(REPLAYS)]
    return {way: round(statistics.median(x[way] for x in rounds), 2) for way in ways}


@torch.no_grad()
def _graph(layers: Sequence[nn.Module], x: torch.Tensor, spacer: torch.Tensor) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for layer in layers:
            layer(x)
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                layer(x)
                spacer.add_(1)
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the geometric mean and the least of the speed of ``default`` over each other way, by kind and rows."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        groups[row["kind"], row["rows"]].append(row)
    found = []
    for (kind, count), members in groups.items():
        record: dict[str, Any] = {"kind": kind, "rows": count}
        for way in ("torch", "bfloat16", "tuned"):
            speeds = [row[way] / row["default"] for row in members if way in row]
            if speeds:
                mean = math.exp(statistics.mean(map(math.log, speeds)))
                record |= {f"over {way}": round(mean, 3), f"least over {way}": round(min(speeds), 3)}
        found.append(record)
    return found


if __name__ == "__main__":
    main()
