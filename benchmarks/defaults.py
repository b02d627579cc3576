"""What do weights of few bits cost where nobody tuned? Layers in three ways, for every number of rows, in CUDA graphs.

    python benchmarks/defaults.py --json defaults.json

``bfloat16`` is the layer with its own weight. ``pass`` dequantizes the weight in one kernel, and torch multiplies: a quantized
layer without ``optimize``. ``rule`` is that layer after ``optimize``, whose table by rule (``gemmtune/selector/defaults.py``) is
verified here and not measured. Random numbers, a fresh store. Microseconds, the median of graphs that run several equal layers
one after another, so that no weight stays in a cache.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect

SIZES = ((4096, 12288), (12288, 4096), (4096, 4096), (2048, 6144))
"""In- and out-features."""
KINDS = ("int4", "int8")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 190, 256, 384, 512, 800, 1024, 2048, 4096)
CACHES = 2
"""The weights together are so many times the L2 cache."""
REPLAYS = 21


@click.command()
@click.option("--json", "out", help="Write everything to this file.")
def main(out: str | None) -> None:
    """Measure layers with weights of few bits that nobody tuned."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no GPU here, and the rule is for GPUs")
    device = detect("cuda")
    report: dict[str, Any] = {"environment": describe_environment(device), "rows": [], "optimize_s": []}
    with tempfile.TemporaryDirectory() as folder, settings.patch(store_path=f"{folder}/store.sqlite", tune="never"):
        for size in SIZES:
            for kind in KINDS:
                report["rows"] += _rows(size, kind, device.l2_bytes, report["optimize_s"])
    if out:
        Path(out).write_text(json.dumps(report, indent=1) + "\n")


def _rows(size: tuple[int, int], kind: Any, l2_bytes: int, seconds: list[float]) -> list[dict[str, Any]]:
    layer = nn.Linear(*size, bias=False, device="cuda", dtype=torch.bfloat16)
    few = gemmtune.quantize_(nn.Sequential(copy.deepcopy(layer)), kind)[0]
    count = 1 + CACHES * l2_bytes // few.weight.nbytes
    ways = {"bfloat16": [layer], "pass": [few], "rule": [copy.deepcopy(few)]}
    ways = {way: [*layers, *(copy.deepcopy(layers[0]) for _ in range(count - 1))] for way, layers in ways.items()}
    inputs = [torch.randn(rows, size[0], device="cuda", dtype=torch.bfloat16) for rows in ROWS]
    times = {way: [_graph_us(ways[way], x) for x in inputs] for way in ("bfloat16", "pass")}  # before there is a table
    begun = time.perf_counter()
    gemmtune.optimize(nn.Sequential(*ways["rule"]), progress=False)
    seconds.append(round(time.perf_counter() - begun, 2))
    times["rule"] = [_graph_us(ways["rule"], x) for x in inputs]
    found = []
    for place, rows in enumerate(ROWS):
        found.append({"size": size, "kind": kind, "rows": rows} | {way: round(us[place], 2) for way, us in times.items()})
        click.echo("  ".join(f"{name} {value}" for name, value in found[-1].items()))
    return found


@torch.no_grad()
def _graph_us(layers: Sequence[nn.Module], x: torch.Tensor) -> float:
    """Return the median time of one layer, of graphs of all of them."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for layer in layers:
            layer(x)
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                layer(x)
    samples = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(layers))
    return statistics.median(samples)


if __name__ == "__main__":
    main()
