"""The command ``gemmtune judge`` as users see it. ``judge`` does the work."""

from __future__ import annotations

from typing import Any

import click

from ..judging.levels import LEVELS
from .completion import complete_gemm
from .options import device_option
from .output import output_options
from .running import run


@click.command()
@click.argument("target", metavar="TARGET", shell_complete=complete_gemm)
@device_option
@click.option("--level", type=click.Choice(tuple(LEVELS)), default="normal", show_default=True, help="How much is tried.")
@click.option(
    "--trait", multiple=True, metavar="NAME=VALUE", help="Declare a trait, as for conformance; calls_torch lets torch do the work."
)
@click.option("--sandbox", is_flag=True, help="Run it in bubblewrap: no network, and files that it cannot write.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds for one call, compilation included.",
)
@click.option("--html", metavar="FILE", type=click.Path(), help="Write the verdict as one HTML page.")
@output_options
def judge(**given: Any) -> None:
    """Judge a GEMM's values, speed and conduct.

    TARGET is package.module:function, a file.py:function, a module of KernelBench's form with ModelNew, a file.cpp:symbol or
    file.cu:symbol, or a folder of such files. It runs in a process of its own, with memory and clocks of the judge.
    UNTRUSTED CODE RUNS AS YOU: it may read and write what you may, unless --sandbox is given.
    Exit status: 0 right and honest, 1 wrong or dishonest, 2 not judged.

    \b
    gemmtune judge mypkg.ops:matmul
    gemmtune judge candidates/ --json verdicts.json --html verdicts.html
    gemmtune judge kernel.cpp:matmul --sandbox
    """
    run("judge.judge", given)
