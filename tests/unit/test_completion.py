"""Completion of options in a shell."""

from __future__ import annotations

import click

from gemmtune.cli.commands import COMMANDS, choices, tune
from gemmtune.cli.proof_commands import conformance


def completed(command: click.Command, option: str, word: str) -> list[str]:
    """Return what a shell offers for the value of an option."""
    [parameter] = [x for x in command.params if option in x.opts]
    return [item.value for item in parameter.shell_complete(click.Context(command), word)]


def test_every_option_completes_what_can_be_listed() -> None:
    free = {"N", "S", "REGEX", "ID", "EXPRESSION", "NAME=VALUE", "SIDE", "LO..HI", "NAME", "SHAPE", "SECONDS", "DAYS"}
    free |= {"MODULE:FUNCTION"}
    """Metavars of values that no list has."""
    for command in COMMANDS:
        for option in command.params:
            numbers = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
            if isinstance(option, click.Option) and not option.is_flag and not numbers and option.metavar not in free:
                found = option.shell_complete(click.Context(command), "")
                assert found, f"{command.name} {option.opts[0]}"


def test_lists_are_completed_word_by_word() -> None:
    assert completed(choices, "--arch", "sm8") == ["sm80", "sm86", "sm89"]
    assert completed(tune, "--backends", "cu") == ["cublaslt", "cutlass", "cuda"]
    assert completed(tune, "--backends", "aten,cuda,cu") == ["aten,cuda,cublaslt", "aten,cuda,cutlass"]
    assert completed(conformance, "--property", "integers,ed") == ["integers,edges"]
