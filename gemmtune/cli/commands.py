"""Commands as users see them: arguments, options and help. Each command imports the module that implements it when it runs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Collection
from typing import Any

import click

from ..conformance.option_table import OPTIONS
from ..perf_gate.options import ANCHORS, FOLDER, LEAST_PROCESSES, PICK, PROCESSES
from ..settings import Settings
from . import words
from .completion import complete_gemm, complete_of
from .fleet_options import devices_option, fleet, ray_option
from .judge_command import judge
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
from .output import level_options, output_options
from .running import run
from .store_commands import STORE_COMMANDS

TABLE_ROWS = 12
SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))
_TYPES: dict[str, Any] = {"integer": int, "seconds": float}
_PATHS = {"FILE": click.Path(), "DIR": click.Path(file_okay=False)}
"""Types of options by their metavar, for completion in shells."""


@click.command()
@shapes_argument
@shapes_option
@problem_options
@device_option
@devices_option
@ray_option
@search_options
@filter_options
@timing_option
@click.option("--m", "m_range", metavar="LO..HI", help="Tune a table for all these M instead of each shape's M.")
@click.option(
    "--batch-invariant", is_flag=True, help="Pick choices that sum K in one order, so that rows have equal bits in every batch."
)
@click.option("--force", is_flag=True, help="Measure choices again that are in the store.")
@click.option("--again", is_flag=True, help="Measure again what was measured on a busy machine.")
@click.option("--wait-quiet", is_flag=True, help="Wait up to two minutes for a quiet machine before measuring.")
@click.option("--accept-busy", is_flag=True, help="Measure once on a busy machine, too. Results are marked all the same.")
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Seconds for all shapes. What is measured by then is kept and picked from; another tune goes on.",
)
@click.option("--recorded", metavar="FILE", type=click.Path(), help="A file of gemmtune record. Its heaviest problems come first.")
@click.option(
    "--rows", type=click.IntRange(min=0), default=TABLE_ROWS, show_default=True, help="Number of choices to show; 0 shows all."
)
@output_options
def tune(**given: Any) -> None:
    """Find and store the fastest correct choice for each SHAPE.

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
    run("tune.tune", given)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    type=click.Path(),
    default="shapes.json",
    show_default=True,
    help="The file to write.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- PROGRAM [ARGUMENTS]...")
@output_options
def record(**given: Any) -> int:
    """Run a Python program and record the products it computes.

    These are calls of torch and of gemmtune. tune --recorded reads the file.

    PROGRAM is a script, or python with a script or a module. It runs unchanged in this process, except that torch.compile leaves
    functions uncompiled. This command returns its exit status, and always writes the products recorded so far.

    \b
    gemmtune record -- python train.py --steps 10
    gemmtune record -o shapes.json -- python -m mypkg.generate
    """  # fmt: skip
    return int(run("recording.record", given, logs=False))


@click.command()
@click.argument("shape")
@arch_option
@problem_options
@search_options
@filter_options
@output_options
def choices(**given: Any) -> None:
    """List the choices that tuning SHAPE would try.

    The refused ones follow, with reasons.

    \b
    gemmtune choices 512x512x512 --arch sm80 --backends triton
    gemmtune choices 512x512x512 --arch sm90 --allow 'triton:mm_128x'
    """
    run("choices.choices", given)


@click.command()
@click.argument("shape")
@problem_options
@device_option
@search_options
@filter_options
@timing_option
@output_options
def explain(**given: Any) -> None:
    """Show which choice a call of SHAPE runs, and why.

    The measured choices follow, with those that were refused or failed. Nothing is measured.

    \b
    gemmtune explain 16x4096x4096 --dtype bfloat16
    """
    run("explain.explain", given)


@click.command()
@shapes_argument
@shapes_option
@arch_option
@problem_options
@search_options
@filter_options
@output_options
def build(**given: Any) -> int:
    """Compile ahead of time the kernels that tuning would compile.

    They go into the cache folder (GEMMTUNE_CACHE_DIR), and nothing runs. A machine with this cache folder and the same
    versions then tunes with the same search without compiling.

    \b
    gemmtune build 4096x4096x4096 --arch sm90 --backends triton,cutlass
    gemmtune build --shapes models.json --arch sm80 --search quick
    """
    return int(run("build.build", given))


@click.command()
@click.option("--build", "build_native", is_flag=True, help="Compile the native look-up of warm calls if it is missing.")
@output_options
def doctor(**given: Any) -> int:
    """Show what gemmtune finds here, and what is missing.

    These are versions, devices, compilers, backends, the native look-up, the store and the cache folder. The exit
    status is 1 if the store or the cache folder cannot be used, if no backend works on any device, or if --build
    fails.
    """
    return int(run("doctor.doctor", given))


@click.command("settings")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_of(SETTINGS))
@click.option("--changed", is_flag=True, help="Leave out settings with their default.")
@output_options
def show_settings(**given: Any) -> None:
    """Show the settings in force, and the source of each.

    A variable GEMMTUNE_<NAME> sets one, or else a line of the nearest pyproject.toml with a table [tool.gemmtune].

    \b
    gemmtune settings --changed
    gemmtune settings search timing
    """
    run("settings_table.show_settings", given)


def _words_of(option: str) -> Collection[str]:
    """Return the legal words of an option of the suite. This imports torch."""
    return importlib.import_module("..conformance.options", __package__).WORDS[option]  # type: ignore[no-any-return]


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="FILE.tar.gz|DIR",
    type=click.Path(),
    default="gemmtune-bundle.tar.gz",
    show_default=True,
    help="The archive, or the new or empty folder, to write.",
)
@output_options
def bundle(**given: Any) -> None:
    """Pack what a container image needs.

    These are the store, the kernels and the native look-up. The look-up is compiled if it is missing. In the image,
    GEMMTUNE_CACHE_DIR names the folder with the unpacked files. It may be read-only, and needs no compiler.

    \b
    gemmtune bundle
    gemmtune bundle --output image/gemmtune
    """
    run("bundle.bundle", given)


def _conformance_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        more: dict[str, Any] = {"is_flag": True}
        if option.kind != "flag":
            kind = click.Choice(option.choices) if option.choices and not option.repeated else _TYPES.get(option.kind, str)
            more = {"type": _PATHS.get(option.metavar or "", kind), "multiple": option.repeated, "metavar": option.metavar}
        if option.metavar == "DEVICE":
            more["shell_complete"] = complete_of(words.DEVICES)
        if option.kind == "words":
            more["shell_complete"] = complete_of(option.choices or functools.partial(_words_of, option.name), several=True)
        function = click.option(option.spelling, option.name, help=option.help, **more)(function)
    return function


@click.command()
@click.argument("gemm", required=False, metavar="[MODULE:NAME]", shell_complete=complete_gemm)
@_conformance_options
@click.option("-k", "keyword", metavar="EXPRESSION", help="Run only cases whose id matches, like pytest's -k.")
@level_options
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def conformance(**given: Any) -> None:
    """Test if a GEMM is correct.

    MODULE:NAME is a function f(a, b), or a module or object with functions named as in torch. The GEMM may refuse
    undeclared inputs, but every result must be correct. Each case runs in a worker process, so a crash or a
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
    run("conformance.conformance", given)


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
@click.option(
    "--baselines",
    metavar="DIR",
    type=click.Path(file_okay=False),
    default=FOLDER,
    show_default=True,
    help="Folder of stored ratios.",
)
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
@output_options
def perf_gate(**given: Any) -> None:
    """Check that no SHAPE takes over 2% longer than torch.

    The limit may also be the stored ratio of an earlier run.
    A SHAPE is MxNxK, or BxMxNxK for a batch. The default is the shapes of the baselines if --anchor is baseline, else a small set.
    Exit status: 0 nothing is slower, 1 a regression or a missing required baseline, 2 not measured, 3 nothing was judged.

    \b
    gemmtune perf-gate 512x512x512 --dtype float32
    gemmtune perf-gate --shapes models.json --update-baseline
    gemmtune perf-gate --require-baseline
    """  # fmt: skip
    run("perf_gate.perf_gate", given)


COMMANDS: tuple[click.Command, ...] = (
    tune, fleet, explain, record, choices, build, *STORE_COMMANDS, show_settings, doctor, bundle, conformance, judge, perf_gate,
)  # fmt: skip
