"""The search along the axes of a few parameters."""

import math
from collections.abc import Mapping

import pytest

from gemmtune.errors import GemmtuneError
from gemmtune.sparse import minimize


def step(name: str, value: int, direction: int, _: Mapping[str, int]) -> int:
    """Step through powers of two up to 64 for warps, and whole numbers from 1 to 9 for the rest."""
    if name == "warps":
        return min(max(int(value * 2.0**direction), 1), 64)
    return min(max(value + direction, 1), 9)


def bowl(p: Mapping[str, int]) -> float:
    return 1.0 + (p["stages"] - 6) ** 2 + (p["warps"].bit_length() - 4) ** 2


def test_finds_the_minimum_and_evaluates_no_point_twice() -> None:
    asked: list[tuple[int, int]] = []

    def target(p: dict[str, int]) -> float:
        asked.append((p["stages"], p["warps"]))
        return bowl(p)

    found = minimize(target, {"stages": 1, "warps": 1}, step)
    assert found.parameters == {"stages": 6, "warps": 8}
    assert found.value == 1.0
    assert found.speedup == 35.0
    assert len(asked) == len(set(asked)) == len(found.tried)
    assert found.slopes == {"stages": 2.0, "warps": 2.0}


def test_two_steps_cross_a_ridge() -> None:
    values = {1: 5.0, 2: 9.0, 3: 1.0}
    assert minimize(lambda p: values.get(p["x"], 9.0), {"x": 1}, step).parameters == {"x": 3}
    assert minimize(lambda p: values.get(p["x"], 9.0), {"x": 1}, step, max_step=1).parameters == {"x": 1}
    diagonal = {(1, 1): 5.0, (2, 2): 1.0}
    assert minimize(lambda p: diagonal.get((p["x"], p["y"]), 9.0), {"x": 1, "y": 1}, step).parameters == {"x": 2, "y": 2}


def test_ties_go_to_the_start_or_the_smallest() -> None:
    assert minimize(lambda p: 1.0 - 1e-5 * p["x"], {"x": 2}, step).parameters == {"x": 2}
    assert minimize(lambda p: 9.0 if p["x"] == 5 else 1.0 - 1e-5 * p["x"], {"x": 5}, step).parameters["x"] < 5


def test_failures_are_reported_and_the_reference_is_the_fallback() -> None:
    def target(p: dict[str, int]) -> float:
        if p["x"] > 4:
            raise RuntimeError("out of shared memory")
        return float(10 - p["x"])

    found = minimize(target, {"x": 8}, step, reference={"x": 2})
    assert found.parameters == {"x": 4}
    assert found.speedup == 8 / 6
    assert found.tried[(8,)] == "RuntimeError: out of shared memory"
    with pytest.raises(GemmtuneError, match="neither start has a value: RuntimeError: out of shared memory"):
        minimize(target, {"x": 8}, step)
    for value in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(GemmtuneError, match=f"got {value}, expected a finite positive number"):
            minimize(lambda _, value=value: value, {"x": 8}, step)
    with pytest.raises(GemmtuneError, match="noise: got -1"):
        minimize(target, {"x": 2}, step, noise=-1)
    with pytest.raises(GemmtuneError, match="and a reference with"):
        minimize(target, {"x": 8}, step, reference={"y": 1})


def test_the_result_is_never_worse_than_the_reference() -> None:
    values = {1: 4.0, 2: 5.0, 3: 6.0, 9: 3.0}
    found = minimize(lambda p: values.get(p["x"], 7.0), {"x": 1}, step, reference={"x": 9})
    assert (found.parameters, found.value, found.speedup) == ({"x": 9}, 3.0, 1.0)
