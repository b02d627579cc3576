"""The commands as users see them: arguments, options and help. What a command does is in a module that is imported when it runs."""

from __future__ import annotations

import importlib
from typing import Any

import click

from ..conformance.option_table import OPTIONS
from ..perf_gate.options import ANCHORS, FOLDER, LEAST_PROCESSES, PICK, PROCESSES
from .completion import complete_gemm
from .options import (
    arch_option,
    device_option,
    filter_options,
    problem_options,
    search_options,
    shapes_argument,
    shapes_option,
    timing_option,
)
from .output import json_option

TABLE_ROWS = 12
_TYPES: dict[str, Any] = {"integer": int, "seconds": float}


def _run(command: str, given: dict[str, Any]) -> Any:
    """Do what the options ask for: ``module.function`` of this folder. Here torch is imported, and not for help."""
    module, _, function = command.partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)(**given)


@click.command()
@shapes_argument
@shapes_option
@problem_options
@device_option
@search_options
@filter_options
@timing_option
@click.option("--m", "rows_asked", metavar="LO..HI", help="A table for all these M, in the place of each shape's own.")
@click.option("--batch-invariant", is_flag=True, help="One choice for every M of a range: rows have the same bits in every batch.")
@click.option("--force", is_flag=True, help="Measure again what the store knows.")
@click.option("--recorded", metavar="FILE", help="A file that gemmtune record has written: its problems, the heaviest first.")
@click.option("--rows", type=click.IntRange(min=0), default=TABLE_ROWS, show_default=True, help="Choices shown; 0 shows all.")
@click.option("--quiet", is_flag=True, help="No progress and no tables: one line for each shape.")
@json_option
def tune(**given: Any) -> None:
    """Find the fastest right choice for each SHAPE and remember it.

    A SHAPE is MxNxK, or BxMxNxK for a batch: out[M, N] = a[M, K] @ b[K, N]. What the store already knows is not measured again.
    With LO..HI in the place of M, it is a table of which choice serves which M, so that no call with one of them tunes.

    \b
    gemmtune tune 16x4096x4096 --dtype bfloat16
    gemmtune tune 2048x6144x4096 --bias n --layout nt
    gemmtune tune --shapes models.json --json result.json
    gemmtune tune 1..8192x6144x4096 --dtype bfloat16
    gemmtune tune --recorded shapes.json
    gemmtune tune 16x8192x8192 --op mixed_mm --dtype float16 --scales group_128 --encoding int4
    gemmtune tune 512x512x511 --allow '^aten|_pad' --deny _k
    """
    _run("tune.tune", given)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    default="shapes.json",
    show_default=True,
    help="The file to write.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- PROGRAM [ARGUMENTS]...")
@json_option
def record(**given: Any) -> int:
    """Run a Python program and note the products that it asks torch and gemmtune for; tune --recorded reads the file.

    PROGRAM is a script, or python with a script or a module. It runs in this process, unchanged but for torch.compile, which leaves
    functions as they are. Its exit status is that of this command, and what was noted until then is written in any case.

    \b
    gemmtune record -- python train.py --steps 10
    gemmtune record -o shapes.json -- python -m mypkg.generate
    """  # fmt: skip
    return int(_run("recording.record", given))


@click.command()
@click.argument("shape")
@arch_option
@problem_options
@search_options
@filter_options
@json_option
def choices(**given: Any) -> None:
    """List what would be tried for SHAPE, and what is refused beforehand and why.

    \b
    gemmtune choices 512x512x512 --arch sm80 --backends triton
    gemmtune choices 512x512x512 --arch sm90 --allow 'triton:mm_128x'
    """
    _run("choices.choices", given)


@click.command()
@shapes_argument
@shapes_option
@arch_option
@problem_options
@search_options
@filter_options
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def build(**given: Any) -> int:
    """Compile what the tuning of each SHAPE would compile, into the cache folder (GEMMTUNE_CACHE_DIR), and run nothing.

    Tuning with the same search on a machine that has this cache folder and the same versions then compiles nothing.

    \b
    gemmtune build 4096x4096x4096 --arch sm90 --backends triton,cutlass
    gemmtune build --shapes models.json --arch sm80 --search quick
    """
    return int(_run("build.build", given))


@click.command()
@click.option("--rows", type=click.IntRange(min=1), default=3, show_default=True, help="Choices shown for each problem.")
@json_option
def show(**given: Any) -> None:
    """Show what the store knows: for each machine and problem the pick and the next best."""
    _run("stores.show", given)


@click.command("export")
@click.argument("file", metavar="FILE")
@json_option
def export_store(**given: Any) -> None:
    """Write everything the store knows to FILE, as JSON that import reads."""
    _run("stores.export_store", given)


@click.command("import")
@click.argument("file", metavar="FILE")
@json_option
def import_store(**given: Any) -> None:
    """Take in a FILE that export wrote; where both know a choice, the later measurement stays."""
    _run("stores.import_store", given)


@click.command()
@click.argument("other_store", metavar="OTHER_STORE")
@json_option
def merge(**given: Any) -> None:
    """Take in another store, an SQLite file; where both know a choice, the later measurement stays."""
    _run("stores.merge", given)


@click.command()
@click.option("--build", "build_native", is_flag=True, help="Compile the native look-up of warm calls, unless it is there.")
@json_option
def doctor(**given: Any) -> int:
    """Show versions, devices, compilers, backends, the native look-up, the store and the cache folder.

    The exit status is 1 when the store or the cache folder cannot be used, when no backend works on any device, or when --build
    fails.
    """
    return int(_run("doctor.doctor", given))


def _conformance_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        more: dict[str, Any] = {"is_flag": True}
        if option.kind != "flag":
            kind = click.Choice(option.choices) if option.choices and not option.repeated else _TYPES.get(option.kind, str)
            more = {"type": kind, "multiple": option.repeated, "metavar": option.metavar}
        function = click.option(option.spelling, option.name, help=option.help, **more)(function)
    return function


@click.command()
@click.argument("gemm", required=False, metavar="[MODULE:NAME]", shell_complete=complete_gemm)
@_conformance_options
@click.option("-k", "keyword", metavar="EXPRESSION", help="Only cases whose id has this, as pytest's -k.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def conformance(**given: Any) -> None:
    """Test whether a GEMM is right: MODULE:NAME is a function f(a, b), or a module or object with functions named as torch's.

    What it is not declared to take, it may refuse; what it returns has to be right. Each case runs in a worker process, so that a
    crash or a hang is one failure. Exit status, by what ran: 0 it conforms, 1 it does not, 2 it could not be tested.

    \b
    gemmtune conformance mypkg.ops:matmul
    gemmtune conformance mypkg.ops:matmul --device cuda --trait out --trait dtypes=float16,bfloat16 --level full
    gemmtune conformance mypkg.ops:matmul --repro bound:mm-bf16-127x64x33-seed.7 --in-process
    gemmtune conformance mypkg.ops:matmul --html report.html -- -n 2
    gemmtune conformance mypkg.ops:slow_to_compile --max-cases 100 --max-seconds 120
    gemmtune conformance own:triton
    gemmtune conformance --sm 80
    """  # fmt: skip
    _run("conformance.conformance", given)


@click.command("perf-gate")
@shapes_argument
@shapes_option
@problem_options
@device_option
@search_options
@timing_option
@click.option(
    "--candidate",
    metavar="NAME",
    default=PICK,
    show_default=True,
    help="What is judged: gemmtune's pick, a choice such as cpp:…, or a function as package.module:function.",
)
@click.option("--anchor", type=click.Choice(ANCHORS), help="torch, or the stored ratio to it; torch when not given.")
@click.option("--baselines", metavar="DIR", default=FOLDER, show_default=True, help="The folder of stored ratios.")
@click.option(
    "--require-baseline", "--gemm-require-baseline", is_flag=True, help="Fail without a baseline; implies --anchor baseline."
)
@click.option("--update-baseline", is_flag=True, help="Write what is measured as the new baselines.")
@click.option(
    "--processes",
    type=click.IntRange(min=LEAST_PROCESSES),
    default=PROCESSES,
    show_default=True,
    help="Fresh processes in a batch.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def perf_gate(**given: Any) -> None:
    """Judge whether a SHAPE takes longer, by more than 2%, than by torch, or than its baseline.

    A SHAPE is MxNxK, or BxMxNxK for a batch. Without any, those of the baselines are taken where these are the anchor, else a small
    set. Exit status: 0 nothing is slower, 1 a regression or a required baseline that is missing, 2 it could not be measured.

    \b
    gemmtune perf-gate 512x512x512 --dtype float32
    gemmtune perf-gate --shapes models.json --update-baseline
    gemmtune perf-gate --require-baseline
    """  # fmt: skip
    _run("perf_gate.perf_gate", given)


COMMANDS: tuple[click.Command, ...] = (
    tune, record, choices, build, show, export_store, import_store, merge, doctor, conformance, perf_gate,
)  # fmt: skip
