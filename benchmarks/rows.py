"""Serving with another M at every step: what the table of a weight costs to make, what it loses, and what a call costs the host.

    python benchmarks/rows.py --device cuda --dtype bfloat16,int4 --json rows.json
    python benchmarks/rows.py --device cpu --weights 96x64,64x128 --rows 1..64 --dtype float32,int4 --unseen 2 --calls 400

Three parts. ``tuning`` makes a table for each weight, and counts what that takes. ``regret`` draws Ms that were not sampled, tunes
each for itself in a store of its own, and lets the table's choice, that pick and torch take turns. ``trace`` calls the weights with
random Ms: nothing may be tuned or compiled, and the host's time of each call is taken while nobody waits for the GPU. On a CPU that
time has the product in it, which follows M; what the host adds is seen where calls end before their launch (``looking_up``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from calls import gemmtune_call, torch_call
from environment import describe_environment
from host import counted_python, in_python, looking_up
from rows_counted import Stages, counted

import gemmtune
from gemmtune import Problem, settings
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch import ready as plans
from gemmtune.dispatch import strategies
from gemmtune.dispatch.ranges import range_plan_for
from gemmtune.dispatch.ready import forget_plans
from gemmtune.dispatch.strategies import fallback
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.ops import operate as path
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.remote import open_session
from gemmtune.selector.segments import rows_of
from gemmtune.store.store import open_store

LLM = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096"
"""The products of a layer of Llama-3-8B, N x K, and its vocabulary."""
PARTS = ("tuning", "regret", "trace")
TILE = 64
"""Kernels for many rows take them in multiples of so many."""
WAIT_EVERY = 64
"""The GPU is waited for after so many calls of a trace, between two of them: a full queue would make the next call wait."""


@dataclass(kw_only=True)
class Weight:
    """A weight [N, K] of a dtype, or of packed integers with scales of groups."""

    n: int
    k: int
    kind: str
    rows: range
    device: DeviceInfo
    operands: Operands = field(init=False)
    a: torch.Tensor = field(init=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.n}x{self.k}"

    def problem(self, m: int) -> Problem:
        """The product of ``m`` rows."""
        kind = self.device.type if self.device.type == "cpu" else "cuda"
        if self.kind in ("int4", "uint4"):
            dtype = torch.bfloat16 if kind == "cuda" else torch.float32
            return Problem.mixed_mm(
                m, self.n, self.k, dtype=dtype, encoding=self.kind, scales="group_128" if self.k % 128 == 0 else "column",
                zeros=self.kind == "uint4", device_type=kind,
            )  # fmt: skip
        return Problem.mm(m, self.n, self.k, dtype=getattr(torch, self.kind), device_type=kind)

    def load(self) -> None:
        """Make the operands."""
        self.operands = random_operands(self.problem(2), self.device.torch_device, seed=1)
        self.a = torch.randn(self.rows[-1], self.k, device=self.device.torch_device).to(self.problem(2).dtype)

    def tensors(self, m: int) -> tuple[torch.Tensor, ...]:
        """What a call with ``m`` rows is given."""
        return (self.a[:m], *self.operands.tensors[1:])


def tuned(weight: Weight) -> dict[str, Any]:
    """Make the table of a weight."""
    stages = Stages()
    with counted() as counts:
        begun = time.perf_counter()
        (result,) = gemmtune.tune(weight.problem(2), m=weight.rows, progress=stages)
        seconds = time.perf_counter() - begun
    row = {"weight": str(weight), "seconds": round(seconds, 2), "segments": len(result.table.segments)}
    row |= {"anchors": len(result.tuned_results), **counts, "stages_s": stages.seconds, "wrong": dict(result.wrong)}
    click.echo(json.dumps(row))
    click.echo(str(result))
    return row | {"table": result.table.to_json()}


def unseen(weight: Weight, count: int, generator: random.Random) -> list[int]:
    """Ms by a uniform law of their logarithm, none of which was sampled, so that the table says nothing of them but by others.

    Every other one lies one to eight rows above a multiple of 64, where a kernel that was good below has begun a row of tiles.
    """
    known = range_plan_for(weight.problem(2), weight.device, settings.current())
    seen = {m for x in known.table.segments for m in (x.sampled_m, *x.checked)} if known is not None and known.table else set()
    low, high, found = math.log(weight.rows[0]), math.log(weight.rows[-1] + 1), []
    for _ in range(100 * count):
        m = int(math.exp(generator.uniform(low, high)))
        if len(found) % 2 and m > TILE:
            m = m // TILE * TILE + generator.randint(1, 8)
        m = min(m, weight.rows[-1])
        if m not in seen and m not in found and m & (m - 1):
            found.append(m)
        if len(found) == count:
            break
    return found


def regret(weight: Weight, m: int, store: Path, search: str) -> dict[str, Any]:
    """What the table's choice costs more than the pick of an exact tuning, and what it gains over torch."""
    problem, current = weight.problem(m), settings.current()
    known = range_plan_for(problem, weight.device, current)
    found = known.find(problem) if known is not None else "no table"
    ours = fallback(problem, weight.device, current).choice if isinstance(found, str) else found.choice
    begun = time.perf_counter()
    with settings.patch(store_path=str(store), rows="exact", search=search) as exact:
        gemmtune.tune(problem, progress=False)
        picked = candidates_for(problem, weight.device, exact).stored(open_store(exact)).picked
    seconds = time.perf_counter() - begun
    aten = fallback(problem, weight.device, current).choice
    several: dict[str, Choice] = {c.name: c for c in (aten, ours, picked) if c is not None}
    with open_session(problem, weight.device, current) as session:
        times = session.rank(list(several.values())).times
    time_us = {name: ranked.time_us for name, ranked in times.items()}
    best = picked.name if picked is not None and picked.name in time_us else aten.name
    row = {
        "weight": str(weight), "m": m, "choice": ours.name, "exact": best, "us": round(time_us[ours.name], 2),
        "regret": round(time_us[ours.name] / time_us[best] - 1, 4), "of_torch": round(time_us[aten.name] / time_us[ours.name], 3),
        "exact_s": round(seconds, 1),
    }  # fmt: skip
    click.echo(json.dumps(row))
    return row


def sum_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric mean and the worst of the regrets, and of the ratios to torch."""
    if not rows:
        return {}
    mean = math.exp(statistics.fmean(math.log1p(row["regret"]) for row in rows)) - 1
    over_torch = math.exp(statistics.fmean(math.log(row["of_torch"]) for row in rows))
    told = {"points": len(rows), "regret_geomean": round(mean, 4), "regret_worst": max(row["regret"] for row in rows)}
    return told | {"of_torch_geomean": round(over_torch, 3), "of_torch_worst": min(row["of_torch"] for row in rows)}


@contextlib.contextmanager
def watched() -> Iterator[Counter[str]]:
    """Counts the tunings and the compilations within calls."""
    with counted() as counts, contextlib.ExitStack() as stack:
        for name in ("select", "tune_rows"):
            original = getattr(strategies, name)

            def counting(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                counts["tunings"] += 1
                return _original(*args, **kwargs)

            stack.enter_context(mock.patch.object(strategies, name, counting))
        yield counts


def trace(weights: Sequence[Weight], asked: Sequence[tuple[int, int]], how: str) -> dict[str, Any]:
    """The host's time of each call, ``asked`` being places of weights and Ms; and again, when every M is known."""
    device = weights[0].device
    functions = [gemmtune_call(w.problem(2)) if how != "torch" else torch_call(w.problem(2)) for w in weights]
    scalars = [w.operands.scalars for w in weights]
    wait = (lambda: None) if device.type == "cpu" else torch.cuda.synchronize
    forget_plans()
    row: dict[str, Any] = {"trace": how, "calls": len(asked)}
    within = {"python": in_python, "looking up": looking_up}.get(how, contextlib.nullcontext)
    if how == "looking up":
        for weight, function, values in zip(weights, functions, scalars, strict=True):
            for m in (2, 1):  # one row is looked up by itself
                function(weight.tensors(m), values)
    with watched() as counts, counted_python() as seen, within():
        for again in ("new", "known") if how != "torch" else ("new",):
            spent = _spent(weights, asked, functions, scalars, wait)
            # Of the first calls each weight has one that loads its kernels.
            row |= {f"{again}_p50_us": _quantile(spent, 0.5), f"{again}_p99_us": _quantile(spent, 0.99)}
            row |= {f"{again}_max_us": round(max(spent), 2)}
        one = [(0, asked[0][1])] * len(asked)
        spent = _spent(weights, one, functions, scalars, wait)
        row |= {"one_m": one[0][1], "one_p50_us": _quantile(spent, 0.5), "one_p99_us": _quantile(spent, 0.99)}
    if how != "torch":
        origins = Counter(entry.plan.origin for entry in plans.ready.values())
        row |= {"came_to_python": len(seen)} if how != "python" else {}
        row |= {"tunings": counts["tunings"], "compilations": counts["compilations"], "origins": dict(origins)}
        row["new_p99_over_p50"] = round(row["new_p99_us"] / row["new_p50_us"], 2)
    click.echo(json.dumps(row))
    return row


def _spent(
    weights: Sequence[Weight],
    asked: Sequence[tuple[int, int]],
    functions: Sequence[Any],
    scalars: Sequence[Any],
    wait: Callable[[], None],
) -> list[float]:
    spent: list[float] = []
    wait()
    gc.collect()
    gc.disable()
    try:
        for number, (place, m) in enumerate(asked):
            tensors, function, values = weights[place].tensors(m), functions[place], scalars[place]
            if number % WAIT_EVERY == 0:
                wait()
            begun = time.perf_counter_ns()
            function(tensors, values)
            spent.append((time.perf_counter_ns() - begun) / 1e3)
    finally:
        gc.enable()
    wait()
    return spent


def _quantile(values: Sequence[float], share: float) -> float:
    return round(sorted(values)[min(int(share * len(values)), len(values) - 1)], 3)


def reserve(weights: Sequence[Weight]) -> None:
    """Have torch's allocator get the memory of the largest results now, not within a call."""
    for weight in weights:
        results = [torch.empty(weight.rows[-1], weight.n, device=weight.a.device, dtype=weight.a.dtype) for _ in range(2)]
        del results


def _words(value: str) -> tuple[str, ...]:
    return tuple(word for word in value.split(",") if word)


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--weights", "shapes", default=LLM, show_default=True, help="Comma-separated NxK.")
@click.option("--dtype", "kinds", default="bfloat16,int4", show_default=True, help="Comma-separated dtypes, int4 or uint4.")
@click.option("--rows", "asked_rows", default="1..8192", show_default=True, help="LO..HI, the range of M.")
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--unseen", "points", default=8, show_default=True, help="Ms of each weight whose regret is measured.")
@click.option("--exact", default="quick", show_default=True, help="The search of the exact tunings.")
@click.option("--calls", default=10_000, show_default=True, help="Calls of a trace by the native look-up.")
@click.option("--python-calls", default=2000, show_default=True, help="Calls of the traces by Python and by torch.")
@click.option("--seconds", default=3600.0, show_default=True, help="No further weight or M is begun after so long.")
@click.option("--seed", default=0, show_default=True)
@click.option("--store", "store_path", help="Keep the tables in this store, or take them from there; else in none.")
@click.option("--json", "out", help="Write everything to this file.")
def main(
    device: str, shapes: str, kinds: str, asked_rows: str, parts: str, points: int, exact: str, calls: int, python_calls: int,
    seconds: float, seed: int, store_path: str | None, out: str | None,
) -> None:  # fmt: skip
    """Print what is found as it is found."""
    begun = time.perf_counter()
    info = detect(device)
    low, high = (int(word) for word in asked_rows.split("..", 1))
    rows = rows_of((low, high))
    sizes = [tuple(int(x) for x in word.split("x")) for word in _words(shapes)]
    result: dict[str, Any] = {"environment": describe_environment(info), "tuning": [], "regret": [], "trace": []}
    left = lambda: seconds - (time.perf_counter() - begun)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path_of_store = store_path or str(Path(folder) / "store.sqlite")
        with settings.environment({"GEMMTUNE_STORE_PATH": path_of_store}):  # not patched: that would be a part of the look-up
            settings.from_environment.cache_clear()
            if "trace" in parts and settings.current().native:
                lookup.load(path.FOR_NATIVE)
            click.echo(json.dumps({"native": native.state, "device": info.name}))
            for kind in _words(kinds):
                weights = [Weight(n=n, k=k, kind=kind, rows=rows, device=info) for n, k in sizes]
                _one_kind(weights, parts, points, exact, calls, python_calls, left, random.Random(seed), Path(folder), result)
                if out:
                    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    settings.from_environment.cache_clear()


def _one_kind(
    weights: Sequence[Weight], parts: str, points: int, exact: str, calls: int, python_calls: int, left: Callable[[], float],
    generator: random.Random, folder: Path, result: dict[str, Any],
) -> None:  # fmt: skip
    """All parts for the weights of one dtype."""
    done = []
    for weight in weights:
        if left() > 0:
            result["tuning"].append(tuned(weight))
            done.append(weight)
    if "regret" in parts:
        asked = [unseen(weight, points, generator) for weight in done]
        found = [
            regret(weight, ms[i], folder / "exact.sqlite", exact)
            for i in range(points)
            for weight, ms in zip(done, asked, strict=True)
            if i < len(ms) and left() > 0
        ]
        result["regret"] += found
        result[f"regret {weights[0].kind}"] = sum_up(found)
        click.echo(json.dumps({"regret": weights[0].kind, **sum_up(found)}))
    if "trace" in parts and done and left() > 0:
        for weight in done:
            weight.load()
        reserve(done)
        ways = (("native", calls), ("looking up", calls), ("python", python_calls), ("torch", python_calls))
        for how, count in ways:
            not_native = how in ("native", "looking up") and native.call is None
            skipped = not_native or (how == "torch" and done[0].kind in ("int4", "uint4"))
            if not skipped and left() > 0:
                # Of its own: what a library keeps for an M would help those that come later.
                mixed = [(generator.randrange(len(done)), generator.choice(done[0].rows)) for _ in range(count)]
                result["trace"].append({"dtype": done[0].kind, **trace(done, mixed, how)})


if __name__ == "__main__":
    main()
