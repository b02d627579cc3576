"""Is the ranking right? Tune shapes whose operands are near the size of the cache, then run the best contenders as a model does.

    python benchmarks/ranking.py --device cuda --backends aten,cublaslt,triton,cuda --json ranking.json
    python benchmarks/ranking.py --device cpu --shapes 4 --seconds 2

A model multiplies the same few rows by one weight after the other. Each contender does so for a whole model, whose weights overflow
the cache several times, and the contenders take turns for seconds, at the clocks that the device sustains. This shares no code with
the tuner's own timing. No pick may be more than 2% behind the best of its shape.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment

import gemmtune
from gemmtune import Problem, settings
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, detect
from gemmtune.problem.flags import precision_scope
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.result import ProblemResult
from gemmtune.store.store import open_store
from gemmtune.timing.rotation import cache_bytes
from gemmtune.timing.timer import collection_paused, median_margin

ROWS = (1, 8, 16, 32, 64, 128, 200, 256, 512)
ASPECTS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""N over K."""
SMALLEST, LARGEST = 1 / 8, 4.0
"""The operands' bytes, as multiples of the cache."""
MODEL_CACHES = 6.0
"""The weights of the model, likewise."""
MOST_LAYERS = 96
BEHIND = 0.02
LEAST_ROUNDS = 10


Begin = Callable[[], Callable[[], float]]
"""Begins a run of the model; what it returns waits for its end and gives the time of a layer in µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a pick fares beside the best of its shape, as a model uses them: times of one product in µs, by the names of the choices,
    and by how much the pick is behind, with half the 95% interval of that."""

    times_us: Mapping[str, float]
    best: str
    behind: float
    margin: float
    rounds: int


def shapes(device: DeviceInfo, count: int, seed: int) -> list[Problem]:
    """Products whose operands have from an eighth to four times the bytes of the cache, evenly on a logarithmic scale."""
    chance = random.Random(seed)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = []
    for i in range(count):
        share = SMALLEST * (LARGEST / SMALLEST) ** ((i + 0.5) / count)
        elements = share * cache_bytes(device) / dtype.itemsize
        m, aspect = chance.choice(ROWS), chance.choice(ASPECTS)
        # elements = M·K + K·N + M·N with N = aspect·K
        half = m * (1 + aspect) / (2 * aspect)
        k = max(64, round((math.sqrt(half * half + elements / aspect) - half) / 64) * 64)
        n = max(64, round(aspect * k / 64) * 64)
        found.append(Problem.mm(m, n, k, dtype=dtype, device_type=device.torch_device.type))
    return found


def contenders(result: ProblemResult, device: DeviceInfo, most: int) -> list[Choice]:
    """The pick, torch's own operation, and whatever else the tuner found fastest."""
    candidates = candidates_for(result.problem, device, settings.current()).stored(open_store(settings.current()))
    by_name = {choice.name: choice for choice in candidates.choices.values()}
    ranked = [o.name for o in result.outcomes if o.finalist]
    names = [result.pick, *(o.name for o in result.outcomes if o.baseline), *ranked]
    return [by_name[name] for name in dict.fromkeys(names) if name in by_name][:most]


def used(choices: Sequence[Choice], problem: Problem, device: DeviceInfo, seconds: float) -> Verdict:
    """Run a model by each choice in turn, the pick first, and compare."""
    models = {choice.name: model for choice, model in zip(choices, _models(choices, problem, device), strict=True)}
    names, times = list(models), {name: list[float]() for name in models}
    with collection_paused(), torch.no_grad(), precision_scope(problem):
        for number in itertools.count():
            # All are begun before the first is waited for: a GPU that idles in between changes its clocks.
            begun = [(name, models[name]()) for name in (names if number % 2 == 0 else names[::-1])]
            for name, finished_us in begun:
                times[name].append(finished_us())
            if number == 0:  # the first calls load code, allocate and warm the device up
                times = {name: [] for name in models}
                deadline = time.perf_counter() + seconds
            elif number > LEAST_ROUNDS and time.perf_counter() >= deadline:
                break
    pick = times[names[0]]
    ratios = {name: median_margin([math.log(p / t) for p, t in zip(pick, times[name], strict=True)]) for name in names}
    best = max(names, key=lambda name: ratios[name][0])
    return Verdict(
        times_us={name: statistics.median(times[name]) for name in names},
        best=best,
        behind=math.expm1(ratios[best][0]),
        margin=ratios[best][1],
        rounds=len(pick),
    )


def _models(choices: Sequence[Choice], problem: Problem, device: DeviceInfo) -> Iterator[Begin]:
    """For each choice a function that begins a run of the model."""
    target = device.torch_device
    weight_bytes = problem.n * problem.k * problem.dtype.itemsize
    layers = min(MOST_LAYERS, math.ceil(MODEL_CACHES * cache_bytes(device) / weight_bytes) + 1)
    rows = torch.randn(problem.m, problem.k, device=target, dtype=problem.dtype)
    weights = [torch.randn(problem.n, problem.k, device=target, dtype=problem.dtype).t() for _ in range(layers)]
    results = [torch.empty(problem.m, problem.n, device=target, dtype=problem.dtype) for _ in range(2)]
    for choice in choices:
        run = choice.build().run

        def layer_by_layer(run: Callable[..., None] = run) -> None:
            for number, weight in enumerate(weights):
                run(results[number % 2], (rows, weight), ())

        yield _timed(layer_by_layer, layers) if device.type == "cpu" else _replayed(layer_by_layer, layers)


def _timed(work: Callable[[], None], layers: int) -> Begin:
    def begin() -> Callable[[], float]:
        begun = time.perf_counter()
        work()
        taken_us = (time.perf_counter() - begun) * 1e6 / layers
        return lambda: taken_us

    return begin


def _replayed(work: Callable[[], None], layers: int) -> Begin:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def finished_us() -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / layers

    def begin() -> Callable[[], float]:
        start.record()
        graph.replay()
        end.record()
        return finished_us

    return begin


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--shapes", "count", type=click.IntRange(min=1), default=30, show_default=True, help="How many products.")
@click.option("--seconds", default=4.0, show_default=True, help="Measuring time for each product, after the tuning.")
@click.option("--backends", help="Comma-separated; the device's own by default.")
@click.option("--most", type=click.IntRange(min=2), default=6, show_default=True, help="Contenders of each product.")
@click.option("--seed", default=1, show_default=True)
@click.option("--store", help="Keep measurements and compiled kernels in this folder, so that tuning may be warm.")
@click.option("--json", "out", help="Write everything to this file, after each product anew.")
def main(device: str, count: int, seconds: float, backends: str | None, most: int, seed: int, **files: str | None) -> None:
    """Rank by the tuner, then by long interleaved runs, and compare the picks."""
    store, out = files["store"], files["out"]
    info = detect(device)
    report: dict[str, Any] = {
        "environment": describe_environment(info),
        "options": {"shapes": count, "seconds": seconds, "backends": backends, "most": most, "seed": seed},
        "cache_bytes": cache_bytes(info),
        "shapes": [],
    }
    with contextlib.ExitStack() as stack:
        folder = str(Path(store or stack.enter_context(tempfile.TemporaryDirectory(prefix="gemmtune-ranking-"))).absolute())
        named = tuple(backends.split(",")) if backends else None
        stack.enter_context(settings.patch(cache_dir=folder, store_path=str(Path(folder) / "store.sqlite"), backends=named))
        begun = time.perf_counter()
        results = gemmtune.tune(shapes(info, count, seed), progress=False, device=device)
        report["tuning_s"] = time.perf_counter() - begun
        click.echo(f"tuned {count} products in {report['tuning_s']:.1f} s")
        for result in results:
            report["shapes"].append(_row(result, info, seconds, most))
            report["summary"] = _summary(report["shapes"])
            if out:
                Path(out).write_text(json.dumps(report, indent=1, default=str) + "\n")
    click.echo(f"{report['summary']}")
    if report["summary"]["behind"]:
        raise click.ClickException(f"picks more than {BEHIND:.0%} behind: {', '.join(report['summary']['behind'])}")


def _row(result: ProblemResult, device: DeviceInfo, seconds: float, most: int) -> dict[str, Any]:
    problem = result.problem
    verdict = used(contenders(result, device, most), problem, device, seconds)
    tuned = {o.name: o.time_us for o in result.outcomes if o.name in verdict.times_us}
    click.echo(
        f"{problem!s:44} {problem.bytes / cache_bytes(device):5.2f} of the cache: {100 * verdict.behind:5.2f}% "
        f"± {100 * verdict.margin:.2f} behind {'itself' if verdict.best == result.pick else verdict.best} ({result.pick})"
    )
    return {
        "problem": str(problem),
        "bytes": problem.bytes,
        "pick": result.pick,
        "best": verdict.best,
        "behind": verdict.behind,
        "margin": verdict.margin,
        "rounds": verdict.rounds,
        "disturbed": result.disturbed,
        "used_us": dict(verdict.times_us),
        "tuned_us": tuned,
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    behind = [row["behind"] for row in rows]
    return {
        "median": statistics.median(behind),
        "most": max(behind),
        "behind": [row["problem"] for row in rows if row["behind"] - row["margin"] > BEHIND],
    }


if __name__ == "__main__":
    main()
