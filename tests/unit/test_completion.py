"""Completion of MODULE:NAME in a shell."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from gemmtune.cli.commands import conformance
from gemmtune.cli.completion import complete_gemm

TESTS = Path(__file__).parents[1]


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
