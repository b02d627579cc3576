"""benchmarks/mutants_table.py: the rows that it makes, and the parts of a document that it keeps."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

PACKAGE = "mutants"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize(
    ("target", "tolerance", "draw", "passes"),
    [
        ("right:plain", None, torch.randn, True),
        ("right:plain", 0.1, torch.rand, True),
        ("writing:bottom_rows_of_zeros", 0.1, torch.rand, False),
        ("sums:k_tail_dropped", 0.1, torch.rand, True),
        ("sums:int8_read_as_unsigned", 0.1, torch.randn, False),
        ("scalars:alpha_dropped", None, torch.randn, True),
    ],
)
def test_the_usual_test(target: str, tolerance: float | None, draw: object, passes: bool) -> None:
    usual = importlib.import_module("usual_test")
    assert usual.passes_usual_test(f"{PACKAGE}.{target}", "cpu", tolerance, draw) is passes


@pytest.mark.turn(6, 8)
def test_new_rows_replace_old_ones_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("mutants_table")
    document = tmp_path / "conformance.md"
    kept = "| `sums:k_tail_dropped` | kept | a \\| b | d | passes | fails | fails |"
    document.write_text(f"before\n{script.BEGIN}\n{kept}\n{script.END}\nafter\n")
    monkeypatch.setattr(script, "DOCUMENT", document)
    done = CliRunner().invoke(script.main, ["--only", "sums:int8_read_as_unsigned", "--write"], catch_exceptions=False)
    assert done.exit_code == 0
    made = "| `sums:int8_read_as_unsigned` | int8 taken for unsigned | **integers**, "
    assert done.output.startswith(made)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert kept in text
    assert made in text
    assert "The ordinary tests of the last three columns let 1, 0 and 1 of these 2 mutants pass" in " ".join(text.split())
    assert "| `triton_kernels:race` | a race that shows on some runs |  |  |  |  |  |" in text
    assert len(script.rows_of(text)) == len(script.MUTANTS)
