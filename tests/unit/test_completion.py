"""Completion of MODULE:NAME in a shell."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from gemmtune.cli.commands import COMMANDS, choices, tune
from gemmtune.cli.completion import complete_gemm
from gemmtune.cli.proof_commands import conformance

TESTS = Path(__file__).parents[1]


def completed(command: click.Command, option: str, word: str) -> list[str]:
    """Return what a shell offers for the value of an option."""
    [parameter] = [x for x in command.params if option in x.opts]
    return [item.value for item in parameter.shell_complete(click.Context(command), word)]


def test_every_option_completes_what_can_be_listed() -> None:
    free = {"N", "S", "REGEX", "ID", "EXPRESSION", "NAME=VALUE", "SIDE", "LO..HI", "NAME", "SHAPE", "SECONDS", "DAYS"}
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


@pytest.mark.parametrize(
    ("word", "some", "none"),
    [
        ("backen", {"backend:"}, {"backend"}),
        ("backend:c", {"backend:cpp", "backend:cublaslt", "backend:cuda"}, {"backend:triton", "backend:call"}),
        ("mutants.su", {"mutants.sums"}, {"mutants.table"}),
        ("mutants.sums:last", {"mutants.sums:last_k_block_dropped"}, {"mutants.sums:zeros_skipped", "mutants.sums:_Racing"}),
        ("no_such_module:", set(), set()),
    ],
)
def test_names_of_gemms_are_completed(word: str, some: set[str], none: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    [argument] = [parameter for parameter in conformance.params if parameter.name == "gemm"]
    words = {item.value for item in argument.shell_complete(click.Context(conformance), word)}
    assert words >= some
    assert not words & none
    assert all(found.startswith(word) for found in words)
    assert words == {item.value for item in complete_gemm(click.Context(conformance), argument, word)}
