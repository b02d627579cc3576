"""Operands and expected results that verification uses.

``PYTHONPATH=tests:tests/unit python tests/correctness/test_expectations.py`` writes expectations.json.

An error of a choice is stated for operands that a seed draws, so results compare between versions only while these are the same.
Bounds are part of what a verified choice promises. So a change of either is a decision. A digest covers all plain values but floats
that the functions of both rooms return, and the places of special numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from many_problems import problems
from watching import PLAIN, watching

from gemmtune.declaration.traits import Traits
from gemmtune.numerics.bounds import Claims
from gemmtune.numerics.expectation import Expectation
from gemmtune.numerics.fills import fills_of
from gemmtune.numerics.judging import Judge
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Problem
from gemmtune.selector.verify import Verifier

FILE = Path(__file__).with_name("expectations.json")
CPU = torch.device("cpu")
MOST = 2**20
"""Multiplications of a problem."""
EACH = 3
"""Problems of each operation and dtype."""
CLOSE = 2e-3
"""Relative difference of sums, whose random numbers differ in a few last bits between processors."""
TRAITS = (
    Traits(),
    Traits(splits=3, flush_subnormals=False, skips_absent=True),
    Traits(calls_torch=True, accumulate={"float16": "float16"}),
    Traits(partials={"bfloat16": "bfloat16"}, splits=2, input_mode="tf32"),
    Traits(input_mode="parts", skips_zeros=True),
)
"""Declarations of GEMMs in turn."""
CLAIMS: tuple[dict[str, Any], ...] = ({}, {"flush_subnormals": True}, {"accumulator_bits": 14, "promoted_every": 16})
"""Further fields of claims in turn."""


def small_problems() -> Iterator[tuple[str, Problem]]:
    """Yield small problems of each operation and dtype by name."""
    counts: dict[str, int] = {}
    for name, problem in problems("cpu", 6):
        if 0 < problem.flops < 2 * MOST and not problem.prepacked and counts.get(name, 0) < EACH:
            counts[name] = counts.get(name, 0) + 1
            yield f"{name} {counts[name]}", problem


def weighed(*tensors: torch.Tensor | None) -> float:
    """Return a sum over all finite magnitudes with weights by place, and 1000 for each other number.

    Before torch 2.13 what is too large for float8_e4m3fn becomes NaN. It counts as the largest number, which it is since then.
    """
    total = 0.0
    for tensor in tensors:
        if tensor is None:
            continue
        values = (tensor.values() if tensor.layout is not torch.strided else tensor).double().flatten()
        if len(values):
            weights = 1 + torch.arange(len(values)) % 7 + (values < 0)
            other = torch.finfo(tensor.dtype).max if tensor.dtype is torch.float8_e4m3fn else 1000.0
            total = 1.1 * total + float((values.abs().nan_to_num(other, other).clamp(max=1e6) * weights).mean())
    return total


def special(*tensors: torch.Tensor | None) -> list[int]:
    """Return the sums of the places of zeros, of infinities and of NaN, which are the same on all processors."""
    values = [(x.values() if x.layout is not torch.strided else x).double().flatten() for x in tensors if x is not None]
    return [int(kind.nonzero().sum()) for x in values for kind in (x == 0, x == math.inf, x == -math.inf, x.isnan())]


def summed(problem: Problem, claims: Claims, places: list[list[int]]) -> dict[str, list[float]]:
    """Return sums over the operands, the expected values and their errors, by expectation, and over operands of each fill.

    The places of special numbers in the operands are appended to ``places``.
    """
    verifier, sums = Verifier(problem, CPU), {}
    for number, expectation in enumerate(verifier._expectations(claims)):
        results = _results(problem, claims, expectation, verifier._extra)
        places.append(special(*expectation.operands.tensors))
        sums[f"{number} {expectation.name}"] = _rounded(weighed(*expectation.operands.tensors), *results)
    if not problem.groups and problem.sparsity is None:
        fills = fills_of(problem.a.dtype), fills_of(problem.b.dtype)
        for fill_a, fill_b in [] if problem.encoding else zip_longest(*fills, fillvalue="normal"):
            sums[f"{fill_a} {fill_b}"] = _rounded(weighed(*Probes(problem, CPU).filled(fill_a, fill_b).tensors))
    return sums


def _rounded(*values: float) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _results(problem: Problem, claims: Claims, expectation: Expectation, extra: tuple[torch.Tensor, ...]) -> list[float]:
    whole = Judge(problem, claims, extra).whole(expectation)
    return [] if whole is None else [weighed(whole.value), math.log2(1e-300 + weighed(whole.error))]


def found() -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield the sums of each small problem, with claims in turn."""
    with watching("numerics", "declaration", kinds=frozenset(x for x in PLAIN if "float" not in x)) as watched:
        for number, (name, problem) in enumerate(small_problems()):
            claims = dataclasses.replace(TRAITS[number % len(TRAITS)].claims(problem), **CLAIMS[number % len(CLAIMS)])
            places: list[list[int]] = []
            sums = summed(problem, claims, places)
            if torch.float8_e4m3fn in (problem.a.dtype, problem.b.dtype):  # torch's versions differ in what is too large for it
                places.clear()
            values = hashlib.sha256(repr([*watched.taken(), places]).encode()).hexdigest()[:8]
            yield f"{name}: {problem}", sums | {f"plain values and places {values}": []}


@pytest.mark.turn(0, 2)
def test_operands_results_and_bounds_are_as_before() -> None:
    known: Mapping[str, Mapping[str, list[float]]] = json.loads(FILE.read_text())
    sums = dict(found())
    assert sums.keys() == known.keys(), "run this file as a script if the change is meant"
    for name, expectations in sums.items():
        assert expectations.keys() == known[name].keys(), name
        for key, values in expectations.items():
            assert values == pytest.approx(known[name][key], rel=CLOSE), f"{name}, {key}"


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(sums)}" for name, sums in found())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
