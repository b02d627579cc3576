"""Options for several devices, and the declaration of ``gemmtune fleet``. Plain data, so that help needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any, get_args

import click

from ..operand_kinds import ModelDtype
from . import words
from .completion import complete_of
from .options import filter_options, problem_options, search_options, shapes_argument, shapes_option, timing_option
from .output import output_options
from .running import run

devices_option = click.option(
    "--devices",
    metavar="DEVICES",
    shell_complete=complete_of(words.SEVERAL_DEVICES),
    help="Devices to tune on at once: all GPUs of this host, their numbers such as 0,1, or cpu.",
)
ray_option = click.option(
    "--ray",
    metavar="ADDRESS",
    shell_complete=complete_of(("auto",)),
    help="Tune on the GPUs of a Ray cluster: auto, or its address. Needs the extra gemmtune[fleet].",
)


def _models() -> Collection[str]:
    """Return the names of the models. This imports torch."""
    return importlib.import_module("..fleet.models", __package__).MODELS  # type: ignore[no-any-return]


@click.command()
@shapes_argument
@shapes_option
@click.option("--recorded", metavar="FILE", type=click.Path(), help="A file of gemmtune record.")
@click.option(
    "--models",
    metavar="NAMES",
    shell_complete=complete_of(_models, several=True),
    help="Public models whose weights to tune: all, or names such as llama-3.1-8b,qwen3-*.",
)
@click.option(
    "--dtypes",
    metavar="NAMES",
    shell_complete=complete_of(get_args(ModelDtype), several=True),
    default="bf16",
    show_default=True,
    help=f"Dtypes of the weights of --models: some of {', '.join(get_args(ModelDtype))}.",
)
@click.option("--m", "m_range", metavar="LO..HI", help="Tune a table for all these M; 1..8192 for --models.")
@devices_option
@ray_option
@click.option("--dry-run", is_flag=True, help="Show the jobs, which are stored, and how long the others take. Measure nothing.")
@problem_options
@search_options
@filter_options
@timing_option
@click.option("--force", is_flag=True, help="Measure choices again that are in the store.")
@click.option("--again", is_flag=True, help="Measure again what was measured on a busy machine.")
@output_options
def fleet(**given: Any) -> int:
    """Tune many shapes or whole models on many GPUs at once.

    Each GPU measures one shape or one weight's table at a time, the longest first. A process or node that dies loses only the
    job that it runs, which is dealt again. Ctrl-C keeps what was measured, and the same command goes on from there. The exit
    status is 1 if a job failed.

    \b
    gemmtune fleet --models llama-3.1-8b --dtypes bf16,int4 --devices all --dry-run
    gemmtune fleet --models llama-3.1-8b --dtypes bf16,int4 --devices all
    gemmtune fleet --recorded shapes.json --devices 0,1
    gemmtune fleet --shapes models.json --ray auto
    """  # fmt: skip
    return int(run("fleet.fleet", given))
