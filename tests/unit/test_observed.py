"""Observation of choices that declare nothing."""

from __future__ import annotations

import dataclasses

import torch
from fake_choices import fail, fake

from gemmtune.choice import Kernel
from gemmtune.selector.observed import CALLS, contradiction

CPU = torch.device("cpu")
ORDERED = fake("ordered")
UNORDERED = dataclasses.replace(ORDERED, claims=dataclasses.replace(ORDERED.claims, deterministic=False))


def observed(other: int | None) -> tuple[str, int]:
    """Return what calls contradict, and the number of calls, if call ``other`` gives other bits than the rest."""
    calls: list[torch.Tensor] = []

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        calls.append(out.fill_(1.0 if len(calls) + 1 == other else 2.0))

    return contradiction(ORDERED, Kernel(run=run), CPU), len(calls)


def test_each_call_of_a_deterministic_choice_gives_the_same_bits() -> None:
    assert observed(None) == ("", CALLS)
    for other in range(1, CALLS + 1):
        found, calls = observed(other)
        assert found.startswith("equal inputs gave other bits, which deterministic forbids"), other
        assert calls == max(other, 2), "a contradiction ends the calls"


def test_a_choice_that_is_not_deterministic_is_not_called() -> None:
    assert contradiction(UNORDERED, Kernel(run=fail), CPU) == ""
