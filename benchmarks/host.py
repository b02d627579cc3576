"""The host's cost of a warm call: gemmtune by the native look-up and by Python, beside torch in the same process.

    python benchmarks/host.py --device cpu --sizes 8,64 --backends cpp,aten
    python benchmarks/host.py --device cuda --dtype float16 --sizes 16,128,512,2048 \\
        --backends triton,cublaslt,cuda,cutlass,aten --json host.json

``launch`` is the kind of the native one, of ``toolchain/prepared.py``.
Blocks of calls alternate; nothing is waited for within a block. Ratios are medians of gemmtune's time over torch's within a round.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment
from torch.autograd import profiler

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path

__all__ = ["Call", "counted_python", "in_python", "interleaved", "looking_up", "measure"]

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLS = 200
WARM = 5


@contextmanager
def in_python() -> Iterator[None]:
    """Calls are looked up by Python."""
    call, native.call = native.call, None
    try:
        yield
    finally:
        native.call = call


@contextmanager
def looking_up() -> Iterator[None]:
    """Calls end where they would be launched: the native look-up finds what serves them, and nothing runs it."""
    call, native.call = native.call, native.module.found
    try:
        yield
    finally:
        native.call = call


@contextmanager
def counted_python() -> Iterator[list[str]]:
    """The names of calls that the native look-up leaves to Python."""
    seen: list[str] = []

    def in_python(missing: bool, name: str, *rest: Any) -> Any:
        seen.append(name)
        return path.in_python(missing, name, *rest)

    def surround(function: Callable[..., Any]) -> None:
        if native.module is not None:
            above = path.FOR_NATIVE
            native.module.surround(settings.patched, function, above.meaning_of, above.packed_type, vars(profiler))

    surround(in_python)
    try:
        yield seen
    finally:
        surround(path.in_python)


def by_python(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Only marks the case; ``interleaved`` calls gemmtune.mm without the native look-up."""
    return gemmtune.mm(a, b)


def interleaved(cases: Mapping[str, Call], a: torch.Tensor, b: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, by case and round."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    wait = torch.cuda.synchronize if a.is_cuda else lambda: None
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in cases.items():
                if call is by_python:
                    with in_python():
                        times[name].append(_block(gemmtune.mm, a, b, wait))
                else:
                    times[name].append(_block(call, a, b, wait))
    finally:
        gc.enable()
    return times


def _block(call: Call, a: torch.Tensor, b: torch.Tensor, wait: Callable[[], None]) -> float:
    for _ in range(WARM):
        call(a, b)
    wait()
    begun = time.perf_counter_ns()
    for _ in range(CALLS):
        call(a, b)
    spent = time.perf_counter_ns() - begun
    wait()
    return spent / CALLS / 1000


def measure(backend: str, size: int, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """One backend's pick for a square product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(4):
        gemmtune.mm(a, b)
    plan = next(reversed(ready.values())).plan
    launch = type(plan.kernel.prepared).__name__ if plan.kernel.prepared is not None else "by Python"
    cases: dict[str, Call] = {"torch": torch.mm, "python": by_python}
    if native.call is not None:
        cases["native"] = gemmtune.mm
    times = interleaved(cases, a, b, rounds)
    row: dict[str, Any] = {"backend": backend, "size": size, "choice": plan.choice.name, "launch": launch}
    for name, spent in times.items():
        row[f"{name}_us"] = round(statistics.median(spent), 3)
        if name != "torch":
            row[f"{name}_ratio"] = round(statistics.median(x / y for x, y in zip(spent, times["torch"], strict=True)), 3)
    return row


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--sizes", default="8,64", show_default=True, help="Comma-separated M = N = K.")
@click.option("--backends", default="cpp,aten", show_default=True, help="Comma-separated; each is the only one for its rows.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--rounds", default=41, show_default=True)
@click.option("--json", "out", help="Write everything to this file.")
def main(device: str, sizes: str, backends: str, dtype: str, rounds: int, out: str | None) -> None:
    """Print a row for each backend and size."""
    torch.set_num_threads(1)
    lookup.load(path.FOR_NATIVE)
    click.echo(f"native look-up: {native.state}")
    rows = []
    for backend in backends.split(","):
        changes = {"GEMMTUNE_BACKENDS": backend, "GEMMTUNE_SEARCH": "quick", "GEMMTUNE_TUNE_IN_SUBPROCESS": "0"}
        with settings.environment(changes):  # not patched: that would be a part of the look-up
            settings.from_environment.cache_clear()
            forget_plans()
            rows += [measure(backend, int(size), device, getattr(torch, dtype), rounds) for size in sizes.split(",")]
            for row in rows[-len(sizes.split(",")) :]:
                click.echo(json.dumps(row))
    if out:
        Path(out).write_text(json.dumps({"environment": describe_environment(detect(device)), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
