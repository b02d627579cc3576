"""Gain of what other tools run by: Inductor's look-up table, and the layers of the plugin for vLLM.

    export PYTHONPATH=tests/correctness
    python benchmarks/integrations.py --json integrations.json
    python benchmarks/integrations.py --device cpu --weights 64x96 --rows 1,4

The products are those of a layer of Llama-3-8B. Nobody needs vLLM: our classes stand on the stand-in of the tests. Their layers
run by default tables, so nothing is tuned for them. The look-up table is an export of a store that was tuned without split-K,
swapped operands and overlapping launches, which Inductor's templates lack. All ways of a product take turns, in CUDA graphs, with
operands that no cache holds. ``ratio`` is the time of the first way over that of another: above 1 that is faster. No product begins
after ``--seconds``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import vllm_stand_in
from calls import arguments, torch_call
from environment import describe_environment
from measure import rounds
from references import allocating, baseline, dense, inductor, plain_torch
from torch import nn
from vllm_stand_in import MixedConfig, StandIn

import gemmtune
from gemmtune import settings
from gemmtune.choice import Kernel
from gemmtune.device import DeviceInfo, detect
from gemmtune.integration.defaults import make_defaults
from gemmtune.integration.serving.products import OP
from gemmtune.integration.vllm import register
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.report.other_formats import inductor_table, key_of
from gemmtune.selector.progress import Progress
from gemmtune.store.store import open_store
from gemmtune.timing.timer import Timer, collection_paused, median_margin

__all__ = ["Ways"]

WEIGHTS = "6144x4096,4096x4096,28672x4096,4096x14336"
"""[N, K] of the queries, keys and values, of the output, of gate and up, and of down."""
GROUP = 128
HAS_TEMPLATE, HAS_NONE = r"^aten:|^triton:mm_", r"_k\d|_swap|_pdl"
"""Choices that Inductor has too, and parts of names of those that it has not."""
MOST_ERROR = 0.02
PARTS = ("vllm", "inductor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways of one product, compared with the first."""

    device: DeviceInfo
    seconds: float

    def compare(self, problem: Problem, kernels: Mapping[str, Kernel]) -> dict[str, Any]:
        """Time and ratio of each way. Each must agree with the first."""
        timer, choice = Timer(problem, self.device, "graph"), baseline(problem, self.device)
        contenders = {name: timer.contender(choice, kernel) for name, kernel in kernels.items()}
        with collection_paused():
            rounds(contenders, self.seconds / 5, least=1)
            times = rounds(contenders, self.seconds, least=10)
        first = next(iter(kernels))
        found = {}
        for name, mine in times.items():
            ratio, margin = median_margin([a / b for a, b in zip(times[first], mine, strict=True)])
            found[name] = {"time_us": statistics.median(mine), "ratio": ratio, "ratio_margin": margin}
        return {"problem": str(problem), "ways": found}

    def layer(self, problem: Problem, way: Any) -> Kernel:
        """A kernel of a function that gets the operands and makes its result, if it computes what torch does."""
        given = arguments(random_operands(problem, self.device.torch_device, seed=1))
        expected, got = torch_call(problem)(*given).float(), way(*given).float()
        error = float((got - expected).abs().max() / expected.abs().max())
        if not error < MOST_ERROR:
            raise click.ClickException(f"{problem}: got an error of {error:.3g} of the largest value, expected {MOST_ERROR}")
        return allocating(way, problem, self.device)


@contextlib.contextmanager
def plugin(device: DeviceInfo) -> Iterator[StandIn]:
    """The stand-in of vLLM with our plugin, which may use default tables."""
    made = StandIn("cpu" if device.type == "cpu" else "cuda")
    with pytest.MonkeyPatch.context() as patch, settings.patch(rows="shared", vllm="all"):
        vllm_stand_in.install(patch, made)
        register()
        yield made


def vllm_layers(m: int, n: int, k: int, ways: Ways, vllm: StandIn) -> list[dict[str, Any]]:
    """A bfloat16 layer against torch, and an int4 layer against torch's dequantization and against bfloat16."""
    device = ways.device
    plain, mixed = dense_problem(m, n, k, device), mixed_problem(m, n, k, device)
    method = vllm.linear()
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device.torch_device).requires_grad_(False)
    method.process_weights_after_loading(layer)
    op = getattr(layer, OP)
    kernels = {"torch": plain_torch(plain, device).kernel}
    if op:
        kernels["gemmtune"] = ways.layer(plain, lambda x, _: method.apply(SimpleNamespace(weight=x[1].t(), **{OP: op}), x[0]))
    found = [ways.compare(plain, kernels)]
    kernels = {"dequantize": plain_torch(mixed, device).kernel, "bfloat16": dense(mixed, device).kernel}
    config = MixedConfig((k, n), "uint4b8", GROUP, False)
    kernel = vllm.kernel("_POSSIBLE_KERNELS")
    served, reason = kernel.can_implement(config)
    if served:
        made = kernel(config, "q", "s")
        kernels["gemmtune"] = ways.layer(mixed, lambda x, _: made.apply_weights(SimpleNamespace(q=x[1].t(), s=x[2]), x[0]))
    return [*found, ways.compare(mixed, kernels) | ({} if served else {"not_served": reason})]


def dense_problem(m: int, n: int, k: int, device: DeviceInfo) -> Problem:
    """The product of a layer in bfloat16."""
    return Problem.mm(m, n, k, layout="nt", device_type=device.torch_device.type)


def mixed_problem(m: int, n: int, k: int, device: DeviceInfo) -> Problem:
    """The product of a layer of int4."""
    return Problem.mixed_mm(m, n, k, dtype="bf16", encoding="int4", scales=f"group_{GROUP}", device_type=device.torch_device.type)


def tables_for(weights: Sequence[tuple[int, int]], device: DeviceInfo) -> None:
    """Make the default tables of all layers, as ``optimize`` does."""
    problems = [make(16, n, k, device) for n, k in weights for make in (dense_problem, mixed_problem)]
    if device.type != "cpu":
        make_defaults(device, [row_classes(problem)[0] for problem in problems], Progress())


def tuned_table(problems: list[Problem], budget_s: float, search: str) -> tuple[dict[str, Any], float]:
    """The look-up table of a new store with these products, as JSON keeps it, and the seconds of its tuning."""
    begun = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        settings.patch(
            store_path=str(Path(folder) / "store.sqlite"),
            search=search,
            backends=("aten", "triton"),
            choice_allowlist_regex=HAS_TEMPLATE,
            choice_denylist_regex=HAS_NONE,
        ),
    ):
        gemmtune.tune(problems, progress=False, budget_s=budget_s)
        table = inductor_table(open_store(settings.current()).every_row())
    return json.loads(json.dumps(table)), time.perf_counter() - begun


def compiled(problem: Problem, device: DeviceInfo, table: Mapping[str, Any] | None) -> tuple[Any, float, dict[str, Any]]:
    """The product through torch.compile, with a look-up table or by its defaults; the seconds; and the entry that it took."""
    from torch._inductor import config, select_algorithm  # noqa: PLC0415 - slow to import
    from torch._inductor.lookup_table import LookupTableChoices  # noqa: PLC0415
    from torch._inductor.utils import run_and_get_code  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    select_algorithm.PRINT_AUTOTUNE = False
    options = {} if table is None else {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    looked_up = contextlib.nullcontext() if table is None else V.set_choices_handler(LookupTableChoices())
    given = arguments(random_operands(problem, device.torch_device, seed=1))
    begun = time.perf_counter()
    with config.patch({"fx_graph_cache": False, "lookup_table.table": table or {}}), looked_up:
        function = torch.compile(torch_call(problem), dynamic=False, options=options)
        _, codes = run_and_get_code(function, *given)
        seconds = time.perf_counter() - begun
    with torch.compiler.set_stance("fail_on_recompile"):
        function(*given)  # whatever compiles again does so outside of this block, without the table
    return function, seconds, taken(table, problem, "\n".join(codes))


def taken(table: Mapping[str, Any] | None, problem: Problem, code: str) -> dict[str, Any]:
    """The entry of the table that a graph's code has, torch's operation by default."""
    entries = (table or {}).get(key_of(problem), [])
    of_template = (entry for entry in entries if "BLOCK_M" in entry and "triton_tem" in code)
    return next((x for x in of_template if all(text in code for text in _texts(x))), {"template_id": f"aten::{problem.op}"})


def _texts(entry: Mapping[str, Any]) -> Iterator[str]:
    for name, value in entry.items():
        if name.startswith(("BLOCK_", "GROUP_")):
            yield f"{name} : tl.constexpr = {value}"
        elif name.startswith("num_"):
            yield f"{name}={value},"


def inductor_ways(problem: Problem, ways: Ways, table: Mapping[str, Any], autotune: bool) -> dict[str, Any]:
    """torch.compile by its defaults, by the table, and with ``autotune`` by its own search."""
    torch._dynamo.reset()
    kernels: dict[str, Kernel] = {}
    compile_s: dict[str, float] = {}
    if autotune:  # which begins with a reset of its own
        found = inductor(problem, ways.device)
        kernels["max-autotune"], compile_s["max-autotune"] = found.kernel, found.tuning_s
    entry: dict[str, Any] = {}
    for name, given in (("default", None), ("table", table)):
        function, compile_s[name], entry = compiled(problem, ways.device, given)
        kernels[name] = ways.layer(problem, function)
    kernels = {"default": kernels.pop("default"), **kernels}
    return ways.compare(problem, kernels) | {"compile_s": compile_s, "entries": table.get(key_of(problem), []), "taken": entry}


def vllm_part(sizes: Sequence[tuple[int, int]], ms: Sequence[int], ways: Ways) -> Iterator[dict[str, Any]]:
    """Rows of the layers for vLLM."""
    with tempfile.TemporaryDirectory() as folder, settings.patch(store_path=str(Path(folder) / "store.sqlite")):
        tables_for(sizes, ways.device)
        with plugin(ways.device) as vllm:
            for m, (n, k) in itertools.product(ms, sizes):
                yield from vllm_layers(m, n, k, ways, vllm)


def inductor_part(
    sizes: Sequence[tuple[int, int]], ms: Sequence[int], ways: Ways, *, tuning: float, search: str, autotune: bool
) -> Iterator[dict[str, Any]]:
    """Rows of Inductor's table. A store and a table are made for each number of rows."""
    for m in ms:
        problems = [dense_problem(m, n, k, ways.device) for n, k in sizes]
        table, tuning_s = tuned_table(problems, tuning, search)
        for problem in problems:
            yield inductor_ways(problem, ways, table, autotune) | {"tuning_s": tuning_s}


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--weights", default=WEIGHTS, show_default=True, help="[N, K] of each layer.")
@click.option("--rows", default="16,512,1", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--seconds", default=110.0, show_default=True, help="No product begins later.")
@click.option("--each", default=0.4, show_default=True, help="Seconds of measuring for each product.")
@click.option("--tuning", default=15.0, show_default=True, help="Seconds of tuning for each number of rows.")
@click.option("--search", default="default", show_default=True)
@click.option("--max-autotune", is_flag=True, help="Let torch.compile search too, some 8 s for each product.")
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(device: str, weights: str, rows: str, parts: tuple[str, ...], seconds: float, each: float, tuning: float, search: str,
         max_autotune: bool, file: Path | None) -> None:  # fmt: skip
    """Measure the layers for vLLM, then Inductor's table."""
    begun, ways = time.monotonic(), Ways(device=detect(device), seconds=each)
    sizes = [(int(n), int(k)) for n, k in (weight.split("x") for weight in weights.split(","))]
    ms = [int(m) for m in rows.split(",")]
    result: dict[str, Any] = {
        "environment": describe_environment(ways.device),
        "options": {"search": search, "tuning_s": tuning, "each_s": each},
        **{part: [] for part in PARTS},
    }
    made = {
        "vllm": lambda: vllm_part(sizes, ms, ways),
        "inductor": lambda: inductor_part(sizes, ms, ways, tuning=tuning, search=search, autotune=max_autotune),
    }
    try:
        for part in parts:
            with contextlib.closing(made[part]()) as found:
                for row in found:
                    result[part].append(_shown(row))
                    if time.monotonic() > begun + seconds:
                        break
    finally:
        result["seconds"] = time.monotonic() - begun
        if file is not None:
            file.write_text(json.dumps(result, indent=1) + "\n")
        click.echo(f"{result['seconds']:.0f} s")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    ways = "  ".join(f"{name} {x['time_us']:.1f} µs ×{x['ratio']:.2f}" for name, x in row["ways"].items())
    click.echo(f"{row['problem']:60} {ways}  {row.get('taken') or row.get('not_served') or ''}")
    return row


if __name__ == "__main__":
    main()
