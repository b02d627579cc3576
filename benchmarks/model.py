"""A whole model, ours and others': time of a step, of the first call, memory, error of the logits, and where the time goes.

    python benchmarks/model.py --model llama-3-8b --layers 8 --batch 1,16,64 --prefill 512,2048 --json model.json
    python benchmarks/model.py --model gemma-2-9b --layers 6 --batch 1 --prefill "" --ways compile,max-autotune,optimize+compile
    python benchmarks/model.py --model llama-3-8b --sparse 64:0.1 --ways compile,torch-sparse,sparse-optimize
    python benchmarks/model.py --model mixtral-8x7b --layers 2 --batch 16 --prefill 1024 --ways compile,optimize+compile
    python benchmarks/model.py --model vit-b-16 --layers 12 --batch 1,16 --sparse 64:0.1 --ways compile,torch-sparse,sparse-optimize
    python benchmarks/model.py --batch 1,16 --prefill 512 --ways optimize+compile,invariant+compile --rows 512 --store tables.sqlite
    python benchmarks/model.py --model tiny --device cpu --batch 1,4 --prefill 16 --ways eager,compile,optimize+compile

Weights are random. A decoding step reads a static cache of 512 positions. On a GPU each way's step is captured in a CUDA graph, and
the graphs take turns, so that all ways see the same clocks. The first call is timed with empty caches of compiled code, and
``tuning_s`` is what gemmtune's tuning from an empty store adds to it. An interrupt (SIGINT) ends the way that is being prepared:
those before it are timed.

The floor of a decoding step is the time that reading its weights once takes at the measured bandwidth. ``busy_us`` is the time of
a captured step during which a kernel runs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from environment import clocks, describe_environment
from model_steps import MODELS, Scenario, build_model, scenarios
from model_trace import Trace, traced
from model_ways import WAYS, Blocks, Prepared, prepare
from torch._inductor import config as inductor_config

import gemmtune
from gemmtune import settings
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.integration.compile import uninstall
from gemmtune.native import build
from gemmtune.timing.limits import BANDWIDTH, measure_limits
from gemmtune.timing.timer import collection_paused, median_margin

ROUNDS = 24
BLOCK_MS = 8.0
"""How long a way runs before the next has its turn."""
LEAST_STEPS = 4
"""Steps that no graph replays follow each other, as in a loop of training: the host runs ahead of the GPU."""
WARM_UPS = 3
SUSTAINED_S = 1.0
"""How long a way runs while clocks and power are read: as long as a limit of power takes to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How ways are compared: the dtype of the model, whether steps are captured, how many rounds there are, whether some first
    calls are timed twice, and the time after which no further way is begun."""

    dtype: torch.dtype
    graph: bool
    rounds: int
    again: bool
    until: float
    bandwidth_gbps: float
    """What the floor of a decoding step is reckoned by: its weights are read once."""
    blocks: Blocks | None = None
    """Of weights that are made zero before."""
    rows: int | None = None
    """Rows of the tables, by default those of each scenario."""


@dataclass(kw_only=True)
class Runner:
    """One way's step, ready to be repeated."""

    prepared: Prepared
    step: Callable[[], object]
    """Owns the tensors that a captured step reads."""
    repeat: Callable[[], object]
    first_call_s: float
    again_s: float | None
    """What the first call costs a process that finds everything in the store."""
    logits: torch.Tensor | None
    memory_bytes: int | None
    """The most memory during a step: weights, cache and what the step computes. None on a CPU."""
    trace: Trace
    explained: list[str]
    """What our pass did with each GEMM."""
    times_ms: list[float] = field(default_factory=list)


def _words(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    def read(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
        found = tuple(word for word in value.split(",") if word)
        if unknown := [word for word in found if word not in known]:
            raise click.BadParameter(f"got {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return read


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in value.split(",") if word)
    except ValueError as error:
        raise click.BadParameter(f"got {value!r}, expected numbers with commas between them") from error


def _blocks(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Blocks | None:
    try:
        return Blocks.parse(value) if value else None
    except ValueError as error:
        raise click.BadParameter(f"got {value!r}, expected a side and a share, such as 64:0.1") from error


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="llama-3-8b", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True, help="Layers of the model that are built.")
@click.option(
    "--batch", default="1,16,64", callback=_numbers, show_default=True, help="Sequences of a decoding step; images of a step."
)
@click.option("--prefill", default="512,2048", callback=_numbers, show_default=True, help="Tokens of a prompt.")
@click.option("--train", default="", callback=_numbers, help="Tokens of a training step of one block, forward and backward.")
@click.option("--ways", default="eager,compile,optimize,optimize+compile", callback=_words(list(WAYS)), show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option(
    "--sparse", callback=_blocks, help="Make weights block-sparse first: side of a block:share that stays, such as 64:0.1."
)
@click.option("--graph/--no-graph", default=True, show_default=True, help="On a GPU: capture each step in a CUDA graph.")
@click.option("--again/--no-again", default=True, show_default=True, help="Time a second first call, which finds all in the store.")
@click.option("--seconds", default=math.inf, show_default=True, help="No further way is begun after this time.")
@click.option("--rounds", default=ROUNDS, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), help="Rows of the tables, instead of those of each scenario.")
@click.option("--store", help="A store of all scenarios, which is kept, instead of a new one for each.")
@click.option("--json", "out", help="Write everything to this file, after each scenario anew.")
def main(
    name: str, layers: int, ways: Sequence[str], device: str, store: str | None, out: str | None, batch: Any, prefill: Any,
    train: Any, **how: Any,
) -> None:  # fmt: skip
    """Compare ways to run a model, in one process."""
    torch._dynamo.config.recompile_limit = 1024  # every way compiles the same functions again
    info = detect(device)
    how["until"] = time.monotonic() + how.pop("seconds")
    how["graph"] &= info.type != "cpu"
    how["blocks"] = how.pop("sparse")
    how["dtype"] = getattr(torch, how["dtype"])
    sizes = {"batch": batch, "prefill": prefill, "train": train}
    how[BANDWIDTH] = measure_limits(info, "float32")[BANDWIDTH]
    report: dict[str, Any] = {
        "environment": describe_environment(info) | {BANDWIDTH: how[BANDWIDTH]},
        "options": {
            "model": name,
            "dtype": str(how["dtype"]).removeprefix("torch."),
            "layers": layers,
            "ways": list(ways),
            "graph": how["graph"],
            "sparse": str(how["blocks"]),
            **sizes,
        },
        "scenarios": [],
    }
    look_up = build.make()  # once for a machine, as by gemmtune doctor --build: no part of a first call
    with tempfile.TemporaryDirectory(prefix="gemmtune-model-") as folder:
        shutil.copytree(look_up.parent, Path(folder) / "kernels" / look_up.parent.name)
        for scenario in scenarios(MODELS[name], sizes["batch"], sizes["prefill"], sizes["train"]):
            kernels = settings.current().cache_dir if store else str(Path(folder) / "kernels")
            with settings.patch(store_path=store or str(Path(folder) / f"{scenario.name}.sqlite"), cache_dir=kernels):
                report["scenarios"].append(_scenario(scenario, name, layers, ways, info, How(**how)))
            if out:
                Path(out).write_text(json.dumps(report, indent=1) + "\n")


def _scenario(scenario: Scenario, name: str, layers: int, ways: Sequence[str], info: DeviceInfo, how: How) -> dict[str, Any]:
    click.echo(f"\n{scenario.name}")
    device = info.torch_device
    model = build_model(MODELS[name], 1 if scenario.kind == "train" else layers, device, how.dtype)
    if how.blocks is not None:
        how.blocks.zero_others_(model)
    expected = scenario.step(model, device, torch.float32)
    gc.collect()
    row: dict[str, Any] = {"name": scenario.name, "tokens": scenario.tokens, "ways": {}}
    runners: dict[str, Runner] = {}
    for way in ways:
        try:
            if time.monotonic() > how.until:
                raise TimeoutError("not begun: the time given is over")
            # All of Inductor's settings are put back after each way: torchao's quantize_ sets some for what is compiled later.
            with inductor_config.patch(inductor_config.get_config_copy() | {"triton.enable_pdl": WAYS[way].pdl}):
                runners[way] = _runner(way, scenario, model, info, how)
        except KeyboardInterrupt:
            row["ways"][way] = {"error": "interrupted"}
            click.echo(f"  {way:24} interrupted: the ways before it are timed")
            break
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result of the comparison
            row["ways"][way] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            click.echo(f"  {way:24} {type(error).__name__}: {str(error)[:300]}")
    with collection_paused():
        _rounds(runners, scenario, device, how.rounds)
        sustained = {way: _sustained(runner, scenario, info) for way, runner in runners.items()}
    references = [way for way in ("compile", "max-autotune") if way in runners] or [way for way in ("eager",) if way in runners]
    for way, runner in runners.items():
        row["ways"][way] = told = _told(runner, expected, scenario, how.bandwidth_gbps) | {"sustained": sustained[way]}
        for other in references:
            told[f"over_{other}"], told[f"over_{other}_margin"] = median_margin(
                [theirs / ours for theirs, ours in zip(runners[other].times_ms, runner.times_ms, strict=True)]
            )
        ratios = ", ".join(f"{told[f'over_{other}']:.3f} of {other}" for other in references)
        click.echo(
            f"  {way:24} {told['ms']:8.3f} ms  {told['tokens_per_s']:9.0f} tokens/s  {ratios}"
            + ("" if told["of_floor"] is None else f"  {told['of_floor']:.3f} of the floor")
            + f"  weights {told['weights_gb']:.2f} GB"
            f"  error {told['error']:.4f}  first call {told['first_call_s']:.1f} s + tuning {told['tuning_s']:.1f} s"
            + ("" if runner.again_s is None else f", again {runner.again_s:.1f} s")
            + "".join(f", {name} {value:.0f}" for name, value in (sustained[way] or {}).items())
        )
    runners.clear()
    gc.collect()
    if info.type != "cpu":
        torch.cuda.empty_cache()
    return row


@contextlib.contextmanager
def _cold_compiler() -> Iterator[None]:
    """Empty caches of what Inductor and Triton compile."""
    from torch._inductor.utils import fresh_cache  # noqa: PLC0415 - takes seconds to import, and eager ways need none of it

    torch._dynamo.reset()
    with fresh_cache():
        yield


def _runner(way: str, scenario: Scenario, model: torch.nn.Module, info: DeviceInfo, how: How) -> Runner:
    device = info.torch_device
    allocated = _allocated(device)
    prepared = prepare(way, model, scenario, device, how.blocks, how.rows)
    step = scenario.runnable(prepared.model, device, prepared.compile)
    with _cold_compiler():
        begun = time.perf_counter()
        found = step()
        _wait(device)
        first = time.perf_counter() - begun
        logits = None if found is None else found.detach().float().clone()
    twice = how.again and WAYS[way].again
    with _cold_compiler() if twice else contextlib.nullcontext():
        forget_plans()
        begun = time.perf_counter()
        for _ in range(WARM_UPS):
            step()
        _wait(device)
        again_s = time.perf_counter() - begun if twice else None
        ours = WAYS[way].optimize and prepared.compile is not None
        explained = str(gemmtune.explain(scenario.compiled)).splitlines() if ours else []
    uninstall()  # what the next way compiles is its own
    memory = _peak(step, device)
    repeat = _captured(step, scenario) if how.graph and scenario.kind != "train" else step
    scenario.rewind()
    return Runner(
        prepared=prepared,
        step=step,
        repeat=repeat,
        first_call_s=first,
        again_s=again_s,
        logits=logits,
        memory_bytes=None if memory is None else memory - allocated + (0 if prepared.copied else prepared.weights_bytes),
        trace=traced(repeat, device),
        explained=explained,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type != "cpu" else 0


def _peak(step: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that is allocated during a step."""
    if device.type == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return torch.cuda.max_memory_allocated(device)


def _captured(step: Callable[[], object], scenario: Scenario) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    scenario.rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _rounds(runners: Mapping[str, Runner], scenario: Scenario, device: torch.device, rounds: int) -> None:
    counts = {}
    for way, runner in runners.items():
        scenario.rewind()
        once = _block_ms(runner, 1, device)
        least = LEAST_STEPS if device.type != "cpu" and runner.repeat is runner.step else 1
        counts[way] = min(scenario.most_steps, max(least, round(BLOCK_MS / once)))
    order = list(runners)
    for number in range(rounds + 2):
        for way in order:
            scenario.rewind()
            time_ms = _block_ms(runners[way], counts[way], device)
            if number >= 2:
                runners[way].times_ms.append(time_ms)
        order.reverse()


def _sustained(runner: Runner, scenario: Scenario, info: DeviceInfo) -> dict[str, float] | None:
    """The medians of clock, power and temperature while a way runs without a pause; None where they cannot be read."""
    found: list[dict[str, float]] = []
    end = time.perf_counter() + (SUSTAINED_S if clocks(info) else 0.0)
    while time.perf_counter() < end:
        scenario.rewind()
        for _ in range(LEAST_STEPS):
            runner.repeat()
        found += filter(None, [clocks(info)])
        _wait(info.torch_device)
    return {name: statistics.median(x[name] for x in found) for name in found[0]} if found else None


def _block_ms(runner: Runner, count: int, device: torch.device) -> float:
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(count):
            runner.repeat()
        return (time.perf_counter() - begun) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        runner.repeat()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def _told(runner: Runner, expected: torch.Tensor | None, scenario: Scenario, bandwidth_gbps: float) -> dict[str, Any]:
    ms, read = statistics.median(runner.times_ms), runner.prepared.read_bytes
    floor_ms = read / bandwidth_gbps / 1e6 if scenario.kind == "decode" and read is not None else None
    return {
        "ms": ms,
        "tokens_per_s": scenario.tokens / ms * 1e3,
        "floor_ms": floor_ms,
        "of_floor": None if floor_ms is None else floor_ms / ms,
        "first_call_s": runner.first_call_s,
        "first_call_from_store_s": runner.again_s,
        "tuning_s": runner.prepared.tuning_s,
        "weights_gb": runner.prepared.weights_bytes / 1e9,
        "memory_gb": None if runner.memory_bytes is None else runner.memory_bytes / 1e9,
        "error": 0.0 if expected is None or runner.logits is None else _error(runner.logits, expected),
        "gemm_share": runner.trace.gemm_share,
        "busy_us": runner.trace.busy_us,
        "launches": len(runner.trace.spans),
        "kernels": runner.trace.kernels,
        "explained": runner.explained,
    }


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a fraction of the largest number expected."""
    return float((found - expected).abs().max() / expected.abs().max())


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
