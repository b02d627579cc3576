"""Commands that prove a GEMM, its values and its speed, as users see them: arguments, options and help."""

import functools
import importlib
from collections.abc import Collection
from typing import Any

import click

from ..conformance.option_table import OPTIONS
from ..judging.levels import LEVELS, MOST_CALL_S
from ..perf_gate.options import FOLDER, LEAST_PROCESSES, LIMIT, MOST_LIMIT, PICK, PROCESSES, REFERENCES
from . import words
from .files import OutputFile
from .options import complete_of, device_option, problem_options, search_options, shapes_options, timing_option
from .output import command
from .product import FiniteRange

_TYPES: dict[str, Any] = {"integer": int, "seconds": float}
_OUTPUTS = {"json": OutputFile(stdout=True), "html": OutputFile()}
_PATHS = {"FILE": click.Path(), "DIR": click.Path(file_okay=False)}
"""Types of options by their metavar, for completion in shells."""


def _words_of(option: str) -> Collection[str]:
    """Return the legal words of an option of the suite. This imports torch."""
    return importlib.import_module("..conformance.options", __package__).WORDS[option]  # type: ignore[no-any-return]


def _conformance_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        more: dict[str, Any] = {"is_flag": True}
        if option.kind != "flag":
            kind = click.Choice(option.choices) if option.choices and not option.repeated else _TYPES.get(option.kind, str)
            kind = _OUTPUTS.get(option.name) or _PATHS.get(option.metavar or "", kind)
            more = {"type": kind, "multiple": option.repeated, "metavar": option.metavar}
        if option.metavar == "DEVICE":
            more["shell_complete"] = complete_of(words.DEVICES)
        if option.kind == "words":
            more["shell_complete"] = complete_of(option.choices or functools.partial(_words_of, option.name), several=True)
        function = click.option(option.spelling, option.name, help=option.help, **more)(function)
    return function


@command("conformance.conformance", as_json=False)
@click.argument("gemm", required=False, metavar="[MODULE:NAME]")
@_conformance_options
@click.option("-k", "keyword", metavar="EXPRESSION", help="Run only cases whose id matches, like pytest's -k.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def conformance() -> None:
    """Test if a GEMM is correct.

    MODULE:NAME or FILE.py:NAME is a function f(a, b), or a module or object with functions named as in torch. It may refuse
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


@command("judge.judge")
@click.argument("target", metavar="TARGET")
@device_option
@click.option("--level", type=click.Choice(tuple(LEVELS)), default="normal", show_default=True, help="How much is tried.")
@click.option(
    "--trait", multiple=True, metavar="NAME=VALUE", help="Declare a trait, as for conformance; calls_torch lets torch do the work."
)
@click.option("--sandbox", is_flag=True, help="Run it in bubblewrap: no network, and files that it cannot write.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0, min_open=True, max=MOST_CALL_S),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds for one call, compilation included.",
)
@click.option("--html", metavar="FILE", type=OutputFile(), help="Write the verdict as one HTML page.")
def judge() -> None:
    """Judge a GEMM's values, speed and conduct.

    TARGET is package.module:function, a file.py:function, a module of KernelBench's form with ModelNew, a file.cpp:symbol or
    file.cu:symbol, or a folder of such files. It runs in its own process, with memory and clocks of the judge.
    UNTRUSTED CODE RUNS AS YOU: it can read and write what you can, unless --sandbox is given.
    Exit status: 0 right and honest, 1 wrong or dishonest, 2 not judged.

    \b
    gemmtune judge mypkg.ops:matmul
    gemmtune judge candidates/ --json verdicts.json --html verdicts.html
    gemmtune judge kernel.cpp:matmul --sandbox
    """


@command("perf_gate.perf_gate", name="perf-gate")
@shapes_options
@problem_options
@device_option
@search_options
@timing_option
@click.option(
    "--candidate",
    metavar="NAME",
    default=PICK,
    show_default=True,
    help="The GEMM to judge: gemmtune's pick, a choice such as cpp:…, or a function as module:function or file.py:function.",
)
@click.option("--reference", type=click.Choice(REFERENCES), help="Compare with torch (default), or with the stored ratio to torch.")
@click.option(
    "--baselines",
    metavar="DIR",
    type=click.Path(file_okay=False),
    default=FOLDER,
    show_default=True,
    help="Folder of stored ratios.",
)
@click.option(
    "--require-baseline", "--gemm-require-baseline", is_flag=True, help="Fail without a baseline; implies --reference baseline."
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
@click.option(
    "--limit",
    metavar="PERCENT",
    type=click.FloatRange(0, MOST_LIMIT, min_open=True),
    default=LIMIT,
    show_default=True,
    help="Slow-down that is allowed. PASS excludes one of 2.5 times as much.",
)
def perf_gate() -> None:
    """Check that no SHAPE takes over 2% longer than torch.

    The limit may also be the stored ratio of an earlier run.
    A SHAPE is MxNxK, or BxMxNxK for a batch. The default is a small set, or the shapes of the baselines with --reference baseline.
    Exit status: 0 nothing is slower, 1 a regression or a missing required baseline, 2 not measured, 3 nothing was judged.
    With --update-baseline, 3 means that noise kept it from writing any.

    \b
    gemmtune perf-gate 512x512x512 --dtype float32
    gemmtune perf-gate --shapes models.json --update-baseline
    gemmtune perf-gate --require-baseline
    """  # fmt: skip


PROOF_COMMANDS: tuple[click.Command, ...] = (conformance, judge, perf_gate)
