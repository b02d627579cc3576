"""Time the tables of all weights of a model: seconds by stage, for each weight and in all, cold and from the store.

    python benchmarks/model_tables.py --rows 1..8192 --json tables.json
    python benchmarks/model_tables.py --kind int4 --rows 1..2048
    python benchmarks/model_tables.py --device cpu --weights 64x96,96x64 --rows 1..32

It makes what ``gemmtune.optimize(model, m=range(1, 8193))`` makes, from an empty store and an empty cache of kernels. The weights
are those of Qwen3-8B: query, key and value, output, gate and up, down, and the head.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment
from rows_counted import Stages, counted
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import DeviceInfo, detect
from gemmtune.integration.measured import in_models, prepare_tuning, tune_tables
from gemmtune.integration.weights import classes_of
from gemmtune.problem import Problem
from gemmtune.problem.rows import RowClass
from gemmtune.selector.segments import rows_of

QWEN3_8B = "4096x4096,1024x4096,12288x4096,4096x12288,151936x4096"
"""N x K of each weight. Key and value are alike, and gate and up."""


class StagesByWeight(Stages):
    """Seconds by weight and stage."""

    def __init__(self) -> None:
        super().__init__()
        self.by_weight: dict[str, dict[str, float]] = {}
        self._weight = "before"

    def _moved(self, stage: str) -> None:
        super()._moved(stage)
        self.by_weight.setdefault(self._weight, {}).update(self.seconds)

    def begin(self, problem: Problem, total_problems: int) -> None:
        """A problem of a weight starts."""
        super().begin(problem, total_problems)
        weight = f"{problem.n}x{problem.k}"
        if weight != self._weight:
            self.seconds, self._weight = {}, weight


@click.command()
@click.option("--weights", default=QWEN3_8B, show_default=True, help="N x K of each weight, with commas between them.")
@click.option("--rows", default="1..8192", show_default=True, help="The values of M.")
@click.option("--kind", type=click.Choice(["bfloat16", "float32", "int4", "int8", "float8"]), default="bfloat16", show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--json", "out", help="Write everything to this file.")
def main(weights: str, rows: str, kind: Any, device: str, out: str | None) -> None:
    """Make the tables of a model's weights."""
    info = detect(device)
    first, _, last = rows.partition("..")
    model = _built([tuple(map(int, text.split("x"))) for text in weights.split(",")], kind, info)
    report: dict[str, Any] = {"environment": describe_environment(info), "rows": rows, "kind": kind, "weights": weights}
    with (
        tempfile.TemporaryDirectory(prefix="gemmtune-tables-") as folder,
        settings.patch(store_path=f"{folder}/store.sqlite", cache_dir=folder),
    ):
        chosen = in_models(settings.current(), info)
        begun = time.perf_counter()
        prepare_tuning(info, chosen)
        tables = dict.fromkeys(classes_of(model), ())
        for name in ("cold", "again"):
            report[name] = _made(tables, info, chosen, range(*_ends(first, last)), begun)
            begun = time.perf_counter()
    if out:
        Path(out).write_text(json.dumps(report, indent=1) + "\n")


def _ends(first: str, last: str) -> tuple[int, int]:
    try:
        found = rows_of((int(first), int(last)))
    except ValueError as error:
        raise click.BadParameter(f"got {first}..{last}, expected numbers of rows such as 1..8192") from error
    return found.start, found.stop


def _built(sizes: list[tuple[int, ...]], kind: Any, info: DeviceInfo) -> nn.Module:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    layers = nn.Sequential(*(nn.Linear(k, n, bias=False, device=info.torch_device, dtype=dtype) for n, k in sizes))
    return layers if kind in ("bfloat16", "float32") else gemmtune.quantize_(layers, kind)


def _made(
    tables: dict[RowClass, tuple[int, ...]], info: DeviceInfo, chosen: settings.Settings, rows: range, begun: float
) -> dict[str, Any]:
    """Make the tables, and return what it took since ``begun``."""
    stages = StagesByWeight()
    with counted() as counts:
        tune_tables(tables, info, chosen, stages, rows)
    seconds = time.perf_counter() - begun
    for weight, found in stages.by_weight.items():
        click.echo(f"{weight:14} {sum(found.values()):6.1f} s  " + "  ".join(f"{name} {x:.1f}" for name, x in found.items()))
    click.echo(f"{len(tables)} weights in {seconds:.1f} s, {dict(counts)}")
    return {"seconds": seconds, "stages_s": stages.by_weight, "counts": dict(counts)}


if __name__ == "__main__":
    main()
