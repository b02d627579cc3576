"""A kernel is loaded for a class of problems and bound to the sizes of one."""

from __future__ import annotations

import pytest
import torch

from gemmtune.backends.cpp import library
from gemmtune.backends.table import load
from gemmtune.choice import Choice
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.settings import current

CPU = detect("cpu")
ROWS = (1, 7, 64, 130)


def choices_of(backend: str, m: int) -> dict[str, Choice]:
    problem = Problem.addmm(m, 48, 40, dtype=torch.float32, layout="nt", device_type="cpu")
    return {choice.name: choice for choice in load(backend).enumerate(problem, CPU, current()).choices}


def sum_of(choice: Choice, loaded: object) -> tuple[torch.Tensor, torch.Tensor]:
    """What the choice makes of random operands, and what torch does."""
    a, b = torch.randn(choice.problem.m, 40), torch.randn(48, 40).t()
    inp, out = torch.randn(choice.problem.inp.size), torch.empty(choice.problem.m, 48)
    choice.bind(loaded).run(out, (a, b, inp), (0.5, 2.0))
    return out, torch.addmm(inp, a, b, alpha=0.5, beta=2.0)


@pytest.mark.parametrize("backend", ["aten", "cpp"])
def test_what_was_loaded_once_serves_every_number_of_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_rows = {m: choices_of(backend, m) for m in ROWS}
    name = next(name for name in by_rows[ROWS[0]] if all(name in choices for choices in by_rows.values()))
    same = [by_rows[m][name] for m in ROWS]
    assert len({choice.compile_key for choice in same}) == 1
    loaded = same[0].load()
    monkeypatch.setattr(library, "compile_source", lambda *_: pytest.fail("bind compiled something"))
    monkeypatch.setattr(library, "load", lambda *_: pytest.fail("bind loaded something"))
    for choice in same:
        got, expected = sum_of(choice, loaded)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_build_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = next(iter(choices_of("aten", 3).values()))
    asked: list[object] = []
    monkeypatch.setattr(type(choice), "load", lambda _self: "artifact")
    monkeypatch.setattr(type(choice), "bind", lambda _self, loaded: asked.append(loaded) or "kernel")
    assert choice.build() == "kernel"
    assert asked == ["artifact"]
