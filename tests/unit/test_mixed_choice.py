"""The setting mixed_mm_choice: which choices of mixed_mm it leaves."""

from __future__ import annotations

import dataclasses

import pytest
from fake_choices import fake

from gemmtune import settings
from gemmtune.choice import Choice, Offers, Refusal
from gemmtune.errors import SettingsError
from gemmtune.filters import filtered
from gemmtune.problem import Problem
from gemmtune.settings import Settings

PROBLEM = Problem.mixed_mm(4, 8, 16, device_type="cpu")


def named(name: str, problem: Problem = PROBLEM, **fields) -> Choice:
    backend = name.partition(":")[0]
    return dataclasses.replace(fake("right", problem), name=name, backend=backend, **{"baseline": False} | fields)


TORCH = named("aten:mixed_mm", baseline=True)
TRITON = [named("triton:a"), named("triton:b", info={"heuristic": True}), named("triton:c", info={"heuristic": True})]
CPP = named("cpp:a")
ALL = Offers(choices=(TORCH, *TRITON, CPP), refusals=(Refusal(name="cublaslt", reason="no"),))


def left(offers: Offers, choice: str) -> list[str]:
    return [c.name for c in filtered(offers, Settings(mixed_mm_choice=choice), templates=()).choices]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("default", ["aten:mixed_mm", "triton:a", "triton:b", "triton:c", "cpp:a"]),
        ("triton", ["triton:a", "triton:b", "triton:c"]),
        ("aten", ["aten:mixed_mm"]),
        ("heuristic", ["triton:b"]),
    ],
)
def test_what_is_left(choice: str, expected: list[str]) -> None:
    assert left(ALL, choice) == expected


@pytest.mark.parametrize("choice", ["triton", "heuristic"])
def test_torch_serves_where_triton_has_nothing(choice: str) -> None:
    assert left(Offers(choices=(TORCH, CPP)), choice) == ["aten:mixed_mm"]


def test_what_goes_is_refused_with_the_reason() -> None:
    refusals = filtered(ALL, Settings(mixed_mm_choice="aten"), templates=()).refusals
    assert [(r.name, r.reason) for r in refusals] == [
        ("cublaslt", "no"),
        *((f"{name}", "mixed_mm_choice is 'aten'") for name in ("triton:a", "triton:b", "triton:c", "cpp:a")),
    ]


def test_other_operations_are_left_as_they_are() -> None:
    problem = Problem.mm(4, 8, 16, device_type="cpu")
    offers = Offers(choices=(named("aten:mm", problem, baseline=True), named("cpp:a", problem)))
    assert left(offers, "triton") == ["aten:mm", "cpp:a"]
    assert left(Offers(), "triton") == []


def test_the_setting() -> None:
    assert settings.current().mixed_mm_choice == "default"
    with pytest.raises(SettingsError, match="mixed_mm_choice: got 'fast', expected one of default, triton, aten, heuristic"):
        Settings(mixed_mm_choice="fast")  # type: ignore[arg-type]
