"""Running of commands, whose modules import torch, and the help of groups of them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import click

from .output import STDOUT, announced, log_as_notes, reserved_stdout

WRONG_USAGE = 2
"""Exit status of wrong usage, as click has it."""
SUBCOMMAND = "COMMAND [ARGS]..."
"""Metavar of a group of commands, which calls ``help_if_alone``."""


def run(command: str, given: dict[str, Any], logs: bool = True) -> Any:
    """Run ``module.function`` of this folder with the given options. This imports torch, which help does not.

    Without ``logs`` the log is left to the program that the command runs.
    """
    module, _, name = command.partition(".")
    with announced("loading torch"):
        function = getattr(importlib.import_module(f".{module}", __package__), name)
    to_stdout = STDOUT in (given.get("json_file"), given.get("json"))
    with log_as_notes() if logs else contextlib.nullcontext(), reserved_stdout() if to_stdout else contextlib.nullcontext():
        return function(**given)


def help_if_alone(context: click.Context) -> None:
    """Print the help of a group that is called without a command, and exit as wrong usage does."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(WRONG_USAGE)
