"""Commands as users see them: arguments, options and help. Each command imports the module that implements it when it runs."""

from __future__ import annotations

import contextlib
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
from .output import STDOUT, json_option, reserved_stdout

TABLE_ROWS = 12
_TYPES: dict[str, Any] = {"integer": int, "seconds": float}


def _run(command: str, given: dict[str, Any]) -> Any:
    """Run ``module.function`` of this folder with the given options. This imports torch, which help does not."""
    module, _, function = command.partition(".")
    with reserved_stdout() if STDOUT in (given.get("json_file"), given.get("json")) else contextlib.nullcontext():
        return getattr(importlib.import_module(f".{module}", __package__), function)(**given)


@click.command()
@shapes_argument
@shapes_option
@problem_options
@device_option
@search_options
@filter_options
@timing_option
@click.option("--m", "m_range", metavar="LO..HI", help="Tune a table for all these M instead of each shape's M.")
@click.option(
    "--batch-invariant", is_flag=True, help="Use one choice for every M of a range, so that rows have equal bits in every batch."
)
@click.option("--force", is_flag=True, help="Measure choices again that are in the store.")
@click.option("--recorded", metavar="FILE", help="A file of gemmtune record. Its heaviest problems come first.")
@click.option(
    "--rows", type=click.IntRange(min=0), default=TABLE_ROWS, show_default=True, help="Number of choices to show; 0 shows all."
)
@click.option("--quiet", is_flag=True, help="Print one line for each shape, without progress and tables.")
@json_option
def tune(**given: Any) -> None:
    """Find the fastest correct choice for each SHAPE and remember it.

    A SHAPE is MxNxK, or BxMxNxK for a batch: out[M, N] = a[M, K] @ b[K, N]. Stored results are not measured again. LO..HI instead
    of M makes a table with a choice for each M of the range. Calls within the range then never tune.

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
    """Run a Python program and record the products that it computes with torch and gemmtune. tune --recorded reads the file.

    PROGRAM is a script, or python with a script or a module. It runs unchanged in this process, except that torch.compile leaves
    functions uncompiled. This command returns its exit status, and always writes the products recorded so far.

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
    """List the choices that tuning SHAPE would try, and the refused ones with their reasons.

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
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
def build(**given: Any) -> int:
    """Compile the kernels that tuning each SHAPE would compile into the cache folder (GEMMTUNE_CACHE_DIR), and run nothing.

    A machine with this cache folder and the same versions then tunes with the same search without compiling.

    \b
    gemmtune build 4096x4096x4096 --arch sm90 --backends triton,cutlass
    gemmtune build --shapes models.json --arch sm80 --search quick
    """
    return int(_run("build.build", given))


@click.command()
@click.option(
    "--rows", type=click.IntRange(min=1), default=3, show_default=True, help="Number of choices to show for each problem."
)
@json_option
def show(**given: Any) -> None:
    """Show the contents of the store: the pick and the next best choices of each problem, by machine."""
    _run("stores.show", given)


@click.command("export")
@click.argument("file", metavar="FILE")
@json_option
def export_store(**given: Any) -> None:
    """Write the whole store to FILE, as JSON that import reads."""
    _run("stores.export_store", given)


@click.command("import")
@click.argument("file", metavar="FILE")
@json_option
def import_store(**given: Any) -> None:
    """Merge a FILE that export wrote into the store. If both have a choice, the later measurement stays."""
    _run("stores.import_store", given)


@click.command()
@click.argument("other_store", metavar="OTHER_STORE")
@json_option
def merge(**given: Any) -> None:
    """Merge another store, an SQLite file, into the store. If both have a choice, the later measurement stays."""
    _run("stores.merge", given)


@click.command()
@click.option("--build", "build_native", is_flag=True, help="Compile the native look-up of warm calls if it is missing.")
@json_option
def doctor(**given: Any) -> int:
    """Show versions, devices, compilers, backends, the native look-up, the store and the cache folder.

    The exit status is 1 if the store or the cache folder cannot be used, if no backend works on any device, or if --build
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
@click.option("-k", "keyword", metavar="EXPRESSION", help="Run only cases whose id matches, like pytest's -k.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def conformance(**given: Any) -> None:
    """Test if a GEMM is correct: MODULE:NAME is a function f(a, b), or a module or object with functions named as in torch.

    The GEMM may refuse undeclared inputs, but every result must be correct. Each case runs in a worker process, so a crash or a
    hang is one failure. Exit status of the cases that ran: 0 it conforms, 1 it does not, 2 it could not be tested.

    \b
    gemmtune conformance mypkg.ops:matmul
    gemmtune conformance mypkg.ops:matmul --device cuda --trait out --trait dtypes=float16,bfloat16 --level full
    gemmtune conformance mypkg.ops:matmul --repro bound:mm-bf16-127x64x33-seed.7 --in-process
    gemmtune conformance mypkg.ops:matmul --html report.html -- -n 2
    gemmtune conformance mypkg.ops:slow_to_compile --max-cases 100 --max-seconds 120
    gemmtune conformance backend:triton
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
    help="The GEMM to judge: gemmtune's pick, a choice such as cpp:…, or a function as package.module:function.",
)
@click.option("--anchor", type=click.Choice(ANCHORS), help="Compare with torch (default), or with the stored ratio to torch.")
@click.option("--baselines", metavar="DIR", default=FOLDER, show_default=True, help="Folder of stored ratios.")
@click.option(
    "--require-baseline", "--gemm-require-baseline", is_flag=True, help="Fail without a baseline; implies --anchor baseline."
)
@click.option("--strict", is_flag=True, help="Fail if a problem is INCONCLUSIVE, not only if all are.")
@click.option("--update-baseline", is_flag=True, help="Write the measured ratios as the new baselines.")
@click.option(
    "--processes",
    type=click.IntRange(min=LEAST_PROCESSES),
    default=PROCESSES,
    show_default=True,
    help="Number of fresh processes in a batch.",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
def perf_gate(**given: Any) -> None:
    """Check if a SHAPE takes over 2% longer than torch or than its baseline.

    A SHAPE is MxNxK, or BxMxNxK for a batch. The default is the shapes of the baselines if --anchor is baseline, else a small set.
    Exit status: 0 nothing is slower, 1 a regression or a missing required baseline, 2 not measured, 3 nothing was judged.

    \b
    gemmtune perf-gate 512x512x512 --dtype float32
    gemmtune perf-gate --shapes models.json --update-baseline
    gemmtune perf-gate --require-baseline
    """  # fmt: skip
    _run("perf_gate.perf_gate", given)


COMMANDS: tuple[click.Command, ...] = (
    tune, record, choices, build, show, export_store, import_store, merge, doctor, conformance, perf_gate,
)  # fmt: skip
