"""Batch-invariant products: their cost, their bits, and the reduction classes of a GPU.

    python benchmarks/invariant.py --json invariant.json
    python benchmarks/invariant.py --part times --weights 4096x4096,6144x4096 --store tables.sqlite
    python benchmarks/invariant.py --dtype int4,float8 --weights 4096x4096
    python benchmarks/invariant.py --weights 8x14336x4096,128x1536x2048
    python benchmarks/invariant.py --part classes --dtype bfloat16,float16

The weights of grouped products have three sizes. ``times`` makes two tables for each weight, one of a reduction class and one by
time alone. At each M the choices of both, torch's operation and, for dense products, one fixed Triton config for all M run in
alternating rounds. ``bits`` calls random Ms and counts rows whose bits differ from those of the largest batch. ``classes`` compares
the bits of all choices that declare one class. It tells if the classes hold on this GPU, and needs no table.

The file is written after each table and each M, so that an interrupted run keeps what it measured.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from calls import arguments, gemmtune_call
from environment import describe_environment

import gemmtune
from gemmtune import Problem, settings
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch.ranges import Found, range_plan_for
from gemmtune.dispatch.ready import forget_plans
from gemmtune.dispatch.strategies import fallback
from gemmtune.numerics.grouped import random_operands
from gemmtune.numerics.some_rows import first_other_row, some_rows
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.progress import Progress
from gemmtune.selector.reduction_classes import class_of
from gemmtune.selector.remote import open_session

WEIGHTS = "4096x4096,6144x4096,4096x14336,28672x4096,1536x7168,5120x13824"
MORE_WEIGHTS = "2048x2048,14336x4096"
"""Weights whose bits are compared in addition to WEIGHTS."""
ROWS = "1,2,4,8,16,24,48,96,160,256,384,512,1024,2048,4096"
PEER = Config(block_m=128, block_n=128, block_k=64, stages=3, warps=8)
"""One config for every M, as public batch-invariant libraries have it."""
PARTS = ("times", "bits", "classes")
CLASS_ROWS = (1, 3, 16, 17, 64, 200)
"""Ms at which members of a class are compared. The last one is the reference's."""


def problem_of(weight: str, m: int, kind: str, device: DeviceInfo) -> Problem:
    """Return the product of ``m`` rows with a weight N x K, or of ``m`` rows in groups with weights G x N x K."""
    *groups, n, k = (int(x) for x in weight.split("x"))
    on = "cpu" if device.type == "cpu" else "cuda"
    if groups:
        return Problem.grouped_mm(m, n, k, groups=groups[0], dtype=getattr(torch, kind), device_type=on)
    if kind == "int4":
        dtype = torch.bfloat16 if on == "cuda" else torch.float32
        return Problem.mixed_mm(
            m, n, k, dtype=dtype, encoding="int4", scales="group_128" if k % 128 == 0 else "column", device_type=on
        )
    if kind == "float8":
        return Problem.scaled_mm(m, n, k, scales="row", device_type=on)
    return Problem.mm(m, n, k, dtype=getattr(torch, kind), layout="nt", device_type=on)


class Stages(Progress):
    """Listener that prints each stage of a tuning, with the seconds since its begin."""

    def __init__(self) -> None:
        super().__init__()
        self._begun, self._latest = time.perf_counter(), ""

    def stage(self, name: str, done: int, total: int) -> None:  # noqa: ARG002 - only the begin of a stage is printed
        """Print the name of a new stage."""
        if name != self._latest:
            click.echo(f"  {time.perf_counter() - self._begun:6.1f} s  {name}, {total}")
        self._latest = name


def made(weight: str, kind: str, rows: range, device: DeviceInfo, *, invariant: bool) -> dict[str, Any]:
    """Make a table, and return what it took."""
    begun = time.perf_counter()
    (result,) = gemmtune.tune(problem_of(weight, 2, kind, device), m=rows, batch_invariant=invariant, progress=Stages())
    click.echo(str(result))
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "weight": weight,
        "invariant": invariant,
        "seconds": seconds,
        "class": result.table.reduction,
        "wrong": dict(result.wrong),
    }


def choice_at(problem: Problem, device: DeviceInfo, *, invariant: bool) -> Choice:
    """Return the choice of a table, or torch's operation."""
    with settings.patch(batch_invariant=invariant) as current:
        plan = range_plan_for(problem, device, current)
        found = plan.find(problem) if plan is not None else "no table"
        return found.choice if isinstance(found, Found) else fallback(problem, device, current).choice


def times_at(weight: str, m: int, kind: str, device: DeviceInfo, seconds: float) -> dict[str, Any]:
    """Return the times of the contenders at an M, and the ratios of the others to the batch-invariant choice."""
    problem = problem_of(weight, m, kind, device)
    ways = {"ours": choice_at(problem, device, invariant=True), "free": choice_at(problem, device, invariant=False)}
    ways["torch"] = fallback(problem, device, settings.current()).choice
    if device.type != "cpu" and problem.op == "mm":
        ways["peer"] = TritonChoice.of(problem, device, PEER)
    several = {choice.name: choice for choice in ways.values()}
    with open_session(problem, device, settings.current()) as session:
        ranked = session.rank(list(several.values()), seconds).times
    us = {way: round(ranked[choice.name].time_us, 2) for way, choice in ways.items() if choice.name in ranked}
    row = {"weight": weight, "dtype": kind, "m": m, "choice": ways["ours"].name, "free_choice": ways["free"].name, "us": us}
    row |= {f"over_{way}": round(us[way] / us["ours"], 3) for way in ("torch", "free", "peer") if way in us and "ours" in us}
    click.echo(json.dumps(row))
    return row


def sum_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean and the worst of each ratio."""
    found: dict[str, Any] = {"points": len(rows)}
    for way in ("over_torch", "over_free", "over_peer"):
        values = [row[way] for row in rows if way in row]
        if values:
            found[way] = {"geomean": round(math.exp(statistics.fmean(map(math.log, values))), 3), "worst": min(values)}
    return found


def differing(weight: str, kind: str, rows: range, count: int, device: DeviceInfo, generator: random.Random) -> dict[str, Any]:
    """Count the Ms whose rows have other bits than among all rows, by public calls."""
    problem = problem_of(weight, rows[-1], kind, device)
    operands, wrong = random_operands(problem, device.torch_device), list[int]()
    with settings.patch(batch_invariant=True, tune="never"):
        whole = gemmtune_call(problem)(*arguments(operands))
        for m in [rows[0], *(generator.choice(rows) for _ in range(count - 1))]:
            begin = generator.randrange(rows[-1] - m + 1)
            part = some_rows(operands, problem_of(weight, m, kind, device), begin)
            if part.offs is not None:
                part = dataclasses.replace(part, offs=(part.offs - begin).clamp(0, m))
            if first_other_row(whole, gemmtune_call(problem)(*arguments(part)), begin) is not None:
                wrong.append(m)
    row = {"weight": weight, "dtype": kind, "checked": count, "differing": len(wrong), "ms": wrong[:20]}
    click.echo(json.dumps(row))
    return row


def classes_of(weight: str, kind: str, device: DeviceInfo) -> list[dict[str, Any]]:
    """Compare the bits of the choices of each declared class at several Ms, and those without a class with the largest class."""
    top, current = CLASS_ROWS[-1], settings.current()
    offered: dict[str, Choice] = {}
    for m in CLASS_ROWS:
        for choice in candidates_for(problem_of(weight, m, kind, device), device, current).offers.choices:
            at = choice.at(problem_of(weight, top, kind, device), device)
            offered.setdefault(choice.name, at if isinstance(at, Choice) else choice)
    members: dict[str, list[Choice]] = collections.defaultdict(list)
    for choice in offered.values():
        reduction = class_of(choice)
        members[str(reduction) if reduction is not None else "none declared"].append(choice)
    found = []
    undeclared = members.pop("none declared", [])
    for name, own in sorted(members.items(), key=lambda item: -len(item[1])):
        reference = next((c for c in own if c.problem.m == top), None)
        if reference is None or (len(own) < 2 and not undeclared):
            continue
        row: dict[str, Any] = {"weight": weight, "dtype": kind, "class": name, "members": len(own), "other": {}, "joined": {}}
        with open_session(reference.problem, device, current) as session:
            for choice in own:
                parts = [at for m in CLASS_ROWS if isinstance(at := choice.at(problem_of(weight, m, kind, device), device), Choice)]
                sample = session.same_rows(reference, parts)
                if str(sample.status) != "ok":
                    row["other"][choice.name] = sample.reason
            for choice in undeclared if not found else ():
                row["joined"][choice.name] = [
                    m
                    for m in CLASS_ROWS
                    if isinstance(at := choice.at(problem_of(weight, m, kind, device), device), Choice)
                    and str(session.same_rows(reference, [at]).status) == "ok"
                ]
        click.echo(json.dumps(row))
        found.append(row)
    return found


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--weights", default=WEIGHTS, show_default=True, help="Comma-separated NxK, or GxNxK for groups.")
@click.option("--dtype", "kinds", default="bfloat16", show_default=True, help="Comma-separated dtypes, int4 or float8.")
@click.option(
    "--rows", "sampled", default=ROWS, show_default=True, help="Comma-separated Ms that are timed. The last ends the range."
)
@click.option("--part", "parts", default="times,bits", show_default=True, help="Comma-separated, out of times, bits, classes.")
@click.option("--search", default="quick", show_default=True, help="The search of the tables.")
@click.option("--count", default=200, show_default=True, help="Ms of each weight whose bits are compared.")
@click.option("--rounds", default=0.15, show_default=True, help="Seconds of rounds at each M.")
@click.option("--seconds", default=540.0, show_default=True, help="No further weight is begun after so long.")
@click.option("--store", "store_path", help="Keep the tables in this store, or take them from there.")
@click.option("--json", "out", help="Write everything to this file.")
def main(
    device: str, weights: str, kinds: str, sampled: str, parts: str, search: str, count: int, rounds: float, seconds: float,
    store_path: str | None, out: str | None,
) -> None:  # fmt: skip
    """Print what is found as it is found."""
    begun, info = time.perf_counter(), detect(device)
    ms = [int(m) for m in sampled.split(",")]
    wanted = parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise click.UsageError(f"--part: got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    result: dict[str, Any] = {"environment": describe_environment(info), "tables": [], "times": [], "bits": [], "classes": []}
    rows, generator = range(1, ms[-1] + 1), random.Random(0)

    def found(part: str, row: dict[str, Any]) -> None:
        """Keep a result, and write all of them."""
        result[part].append(row)
        if result["times"]:
            result["summary"] = sum_up(result["times"])
        if out:
            Path(out).write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), settings.patch(search=search) as current:
        chosen = dataclasses.replace(current, store_path=store_path or str(Path(folder) / "store.sqlite"))
        for kind in kinds.split(","):
            more = MORE_WEIGHTS.split(",") if weights == WEIGHTS and "bits" in wanted and kind not in ("int4", "float8") else []
            for weight in [*weights.split(","), *more]:
                if time.perf_counter() - begun > seconds:
                    click.echo(f"{kind} {weight} is left out: {seconds} s are over")
                    continue
                with settings.use(chosen):
                    _one_weight(weight, kind, rows, ms if weight not in more else [], wanted, count, rounds, info, generator, found)
    click.echo(json.dumps({"summary": result.get("summary"), "seconds": round(time.perf_counter() - begun, 1)}))


def _one_weight(
    weight: str, kind: str, rows: range, ms: Sequence[int], wanted: Sequence[str], count: int, rounds: float, device: DeviceInfo,
    generator: random.Random, found: Callable[[str, dict[str, Any]], None],
) -> None:  # fmt: skip
    """Measure all parts for one weight. A weight without ``ms`` is not timed."""
    for row in classes_of(weight, kind, device) if "classes" in wanted else ():
        found("classes", row)
    if "times" in wanted or "bits" in wanted:
        found("tables", made(weight, kind, rows, device, invariant=True))
    if "times" in wanted and ms:
        found("tables", made(weight, kind, rows, device, invariant=False))
    forget_plans()
    for m in ms if "times" in wanted else ():
        found("times", times_at(weight, m, kind, device, rounds))
    if "bits" in wanted:
        found("bits", differing(weight, kind, rows, count, device, generator))


if __name__ == "__main__":
    main()
