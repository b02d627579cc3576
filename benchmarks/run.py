"""Tune shapes, then measure gemmtune's pick and the references in turn, in one process.

    python benchmarks/run.py --shapes benchmarks/shapes/reference18.json --device cuda --against torch,inductor --json out.json
    python benchmarks/run.py --shapes benchmarks/shapes/cpu.json --device cpu --names '^fp32' --second-run
    python benchmarks/run.py --shapes benchmarks/shapes/bsr.json --store kept --json bsr.json --resume --minutes 8
    python benchmarks/run.py --host --device cuda

Tuning is cold: unless ``--store`` is given, store, compiled kernels and the compiler caches of the references are in a temporary
folder. Ratios are the reference's time over gemmtune's: above 1 gemmtune is faster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import fresh
import torch
from entries import Entry, read_entries
from environment import clocks, describe_environment
from measure import Comparison, compare, host_cost
from patterns import banded_operands
from references import REFERENCES, Reference
from report import print_row, print_summary, summary

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import BACKENDS
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch.ready import plan_for
from gemmtune.problem.flags import precision_scope
from gemmtune.selector.result import ProblemResult
from gemmtune.settings import Search, Timing
from gemmtune.timing.limits import limit_us, measure_limits

REGIMES: tuple[Timing, ...] = typing.get_args(Timing)
TUNED_TOGETHER = 12
"""Shapes that are tuned before the first of them is compared: the next ones' kernels compile while the first ones are measured."""


def words(legal: Sequence[str]) -> Any:
    """A callback that splits a comma-separated option and checks its words."""

    def split(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        found = tuple(word.strip() for word in value.split(",") if word.strip()) if value else None
        for word in found or ():
            if word not in legal:
                raise click.BadParameter(f"got {word!r}, expected words out of {', '.join(legal)}", context, option)
        return found

    return split


@click.command()
@click.option("--shapes", "path", help="A JSON file of shapes, as in benchmarks/shapes.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--names", "--only", default="", help="A regular expression: only the shapes whose name it finds.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many shapes, those in front.")
@click.option("--resume", is_flag=True, help="Go on with what the file of --json has: its shapes are not measured again.")
@click.option("--minutes", type=float, help="No further shape is begun after this time; --resume does the rest.")
@click.option("--against", default="torch", callback=words(list(REFERENCES)), show_default=True, help="Comma-separated references.")
@click.option("--regime", "regimes", default="graph", callback=words(REGIMES), show_default=True, help="graph, eager, or both.")
@click.option("--backends", callback=words(list(BACKENDS)), help="Comma-separated; the device's own by default.")
@click.option("--search", type=click.Choice(typing.get_args(Search)), default="default", show_default=True)
@click.option("--timing", type=click.Choice(REGIMES), default="graph", show_default=True, help="What the tuning ranks by.")
@click.option("--seconds", default=1.0, show_default=True, help="Measuring time for each shape and regime.")
@click.option("--store", help="Keep measurements and compiled kernels in this folder, so that tuning may be warm.")
@click.option("--bandwidth", type=float, help="For the floor: GB/s instead of the measured one.")
@click.option("--rate", type=float, help="For the floor: GFLOP/s instead of the measured one, for every dtype.")
@click.option("--host", is_flag=True, help="Measure the host's cost of a warm call on a tiny product as well.")
@click.option("--second-run", is_flag=True, help="Time a fresh process that answers every shape from the store.")
@click.option("--repeat-picks", type=click.IntRange(min=0), default=0, help="Cold processes whose picks are compared.")
@click.option("--json", "out", help="Write everything to this file, after each shape anew.")
def main(**options: Any) -> None:
    """Tune shapes and compare gemmtune with torch and torch.compile."""
    if not options["path"] and not options["host"]:
        raise click.UsageError("got neither --shapes FILE nor --host: nothing to measure")
    device = detect(options["device"])
    with contextlib.ExitStack() as stack:
        folder = options["store"] or stack.enter_context(tempfile.TemporaryDirectory(prefix="gemmtune-bench-"))
        folder = str(Path(folder).absolute())
        environment = _environment(folder, options)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        changes = {name: options[name] for name in ("backends", "search", "timing")}
        stack.enter_context(settings.patch(cache_dir=folder, store_path=_store_path(folder), **changes))
        report: dict[str, Any] = {"environment": describe_environment(device), "options": _portable(options)}
        if options["path"]:
            _shapes(device, options, report)
            _processes(options, environment, report)
        if options["host"]:
            report["host"] = _host(device)
        _write(options["out"], report)


def _portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """What shaped the measurement: the options without the paths of this machine, and without what says which shapes."""
    return {name: value for name, value in options.items() if name not in ("path", "out", "store", "limit", "resume", "minutes")}


def _resumed(options: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """What the shapes of an earlier run with these options gave; of none where there is no file yet."""
    before: dict[str, Any] = {"skipped": [], "tuning_s": 0.0, "limits": {}, "shapes": []}
    if not options["resume"]:
        return before
    if not options["out"]:
        raise click.UsageError("got --resume without --json: nothing says what was measured")
    if not Path(options["out"]).exists():
        return before
    known = json.loads(Path(options["out"]).read_text())
    asked, had = json.loads(json.dumps(report["options"])), known["options"]
    other = sorted(name for name in asked | had if name != "names" and asked.get(name) != had.get(name))
    if other:
        raise click.UsageError(f"--resume: {options['out']} was measured with other values of {', '.join(other)}")
    return {name: known.get(name, value) for name, value in before.items()}


def _shapes(device: DeviceInfo, options: Mapping[str, Any], report: dict[str, Any]) -> None:
    entries, skipped = read_entries(options["path"], device.torch_device.type, options["names"])
    for line in skipped:
        click.echo(line)
    deadline = time.monotonic() + 60 * options["minutes"] if options["minutes"] else math.inf
    report |= _resumed(options, report)
    report["skipped"] = list(dict.fromkeys((*report["skipped"], *skipped)))
    done = {row["name"] for row in report["shapes"]}
    todo = [entry for entry in entries if entry.name not in done][: options["limit"]]
    if done:
        click.echo(f"{len(done)} shapes are measured already, {len(todo)} are left")
    for begin in range(0, len(todo), TUNED_TOGETHER):
        some = todo[begin : begin + TUNED_TOGETHER]
        if time.monotonic() > deadline:
            break
        begun = time.perf_counter()
        results = gemmtune.tune([entry.problem for entry in some], progress=False, device=str(device.torch_device))
        report["tuning_s"] += time.perf_counter() - begun
        click.echo(f"tuned {len(some)} shapes in {time.perf_counter() - begun:.1f} s")
        for entry, result in zip(some, results, strict=True):
            if time.monotonic() > deadline:
                break
            _shape(entry, result, device, options, report)
    left = len(todo) - sum(entry.name in {row["name"] for row in report["shapes"]} for entry in todo)
    if left:
        click.echo(f"the time is over: {left} shapes are left for --resume")
    report["summary"] = summary(report)
    print_summary(report)


def _shape(entry: Entry, result: ProblemResult, device: DeviceInfo, options: Mapping[str, Any], report: dict[str, Any]) -> None:
    """Compare one shape and add its row to the report."""
    limits = _limits(entry, device, options, report["limits"])
    row = _row(entry, result, limits)
    row["regimes"] = _measured(entry, device, options, row)
    row["clocks"] = clocks(device)
    report["shapes"].append(row)
    report["summary"] = summary(report)
    print_row(row)
    _write(options["out"], report)
    if device.type != "cpu":
        torch.cuda.empty_cache()


def _row(entry: Entry, result: ProblemResult, limits: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "problem": str(entry.problem),
        "pick": result.pick,
        "limit_us": limit_us(entry.problem, limits),
        "tuning_s": {"gemmtune": result.seconds},
        "finalists": [c for c in result.to_json()["choices"] if c.get("finalist")],
        "errors": {},
    }


def _measured(entry: Entry, device: DeviceInfo, options: Mapping[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The comparison in each regime. A reference that cannot be made is noted in the row and left out."""
    index = -1 if device.type == "cpu" else device.index
    operands = banded_operands(entry.problem, device) if entry.pattern == "banded" else None
    with torch.no_grad(), precision_scope(entry.problem):
        references: dict[str, Reference] = {}
        for name in options["against"]:
            try:
                references[name] = REFERENCES[name](entry.problem, device)
                row["tuning_s"][name] = references[name].tuning_s
            except RuntimeError as error:
                row["errors"][name] = f"{type(error).__name__}: {error}"
        plan = plan_for(entry.problem, index)
        regimes = {
            regime: compare(entry.problem, device, plan, references, regime, seconds=options["seconds"], operands=operands)
            for regime in options["regimes"]
        }
    return {regime: _comparison(comparison) for regime, comparison in regimes.items()}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "gemmtune_us": comparison.ours_us,
        "rounds": comparison.rounds,
        "references": {
            name: {"time_us": time_us, "ratio": comparison.ratios[name][0], "ratio_margin": comparison.ratios[name][1]}
            for name, time_us in comparison.reference_us.items()
        },
    }


def _limits(entry: Entry, device: DeviceInfo, options: Mapping[str, Any], known: dict[str, float]) -> dict[str, float]:
    label = entry.problem.dtype_label
    given = {"bandwidth_gbps": options["bandwidth"], f"{label}_gflops": options["rate"]}
    known |= {name: value for name, value in given.items() if value}
    known |= measure_limits(device, label, known)
    return known


def _environment(folder: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The settings of this run for other processes."""
    values = {"CACHE_DIR": folder, "STORE_PATH": _store_path(folder), "SEARCH": options["search"], "TIMING": options["timing"]}
    values |= {"BACKENDS": ",".join(options["backends"])} if options["backends"] else {}
    return {f"GEMMTUNE_{name}": value for name, value in values.items()}


def _store_path(folder: str) -> str:
    return str(Path(folder) / "store.sqlite")


def _processes(options: Mapping[str, Any], environment: Mapping[str, str], report: dict[str, Any]) -> None:
    def keep(known: dict[str, Any]) -> None:
        report["repeat_picks"] = known
        _write(options["out"], report)

    which = (options["path"], options["device"], options["names"], environment)
    if options["second_run"]:
        report["second_run"] = again = fresh.second_run(*which)
        click.echo(
            f"second run, from the store: {again['seconds']:.2f} s, measured again: {', '.join(again['measured']) or 'nothing'}"
        )
    if options["repeat_picks"]:
        same = fresh.repeated_picks(*which, options["repeat_picks"], keep)
        click.echo(f"same pick in {same['processes']} cold processes: {100 * same['same_pick']:.1f}%")


def _host(device: DeviceInfo) -> dict[str, float]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    problem = gemmtune.Problem.mm(16, 16, 16, dtype=dtype, layout="nn", device_type=device.torch_device.type)
    gemmtune.tune(problem, progress=False, device=str(device.torch_device))
    cost = host_cost(problem, device)
    click.echo(
        f"host cost of a warm call, {problem}: gemmtune {cost['gemmtune_us']:.2f} µs, torch {cost['torch_us']:.2f} µs, "
        f"gemmtune/torch {cost['ratio']:.3f} ± {cost['ratio_margin']:.3f}"
    )
    return cost


def _write(path: str | None, report: Mapping[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
