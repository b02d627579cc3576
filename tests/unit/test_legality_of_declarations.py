"""The predicate that offers declared GEMMs agrees with the scope in which the suite tests them."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.gemms.backends import EVERYTHING
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.declaration.layouts import OperandLayout, kinds_of
from gemmtune.declaration.legality import why_not
from gemmtune.declaration.traits import Traits
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.problem.precision import Precision

CPU, GPU = preset("avx512"), preset("sm90")
ALL = dataclasses.replace(EVERYTHING, empty=True)
EXACTLY: dict[str, Traits] = {
    "everything": ALL,
    "nothing declared": Traits(),
    **{
        "-".join(changes): dataclasses.replace(ALL, **changes)
        for changes in (
            {"ops": ("mm", "int_mm_mul")}, {"dtypes": ("float16", "float8_e5m2")}, {"alpha": False}, {"beta": False},
            {"zeros": False}, {"float8_pairs": False}, {"results": ("float16",)}, {"weights": ("int4", "float8_e5m2")},
            {"empty": False}, {"min_alignment": 8}, {"multiples": (1, 8, 4)}, {"least": (2, 2, 16)},
        )
    },
}  # fmt: skip
AT_LEAST: dict[str, Traits] = {
    "-".join(changes): dataclasses.replace(ALL, **changes)
    for changes in (
        {"layouts": ("row",)}, {"layouts": ("row", "col", "padded")}, {"layouts": ("col", "offset", "batch0", "every2")},
        {"bias": ("n", "m1")}, {"scales": ("tensor", "group_32", "row")}, {"scale_dtypes": ()},
    )
}  # fmt: skip
"""Traits with several words for one layout or shape, such as that of a single row. The predicate accepts any of them."""


@functools.cache
def stated() -> list[tuple[Case, Problem]]:
    """Return cases of all properties with their problems."""
    every = [case for p in PROPERTIES if p.needs(Scope(traits=ALL)) is None for case in p.cases(Scope(traits=ALL))]
    cases = [case.changed(out="") for case in random.Random(7).sample(every, 250)]
    return [(case, problem_of(case, "cpu")) for case in cases]


def in_scope(traits: Traits, case: Case, problem: Problem) -> bool:
    refused = not traits.empty and 0 in (problem.m, problem.n, problem.batch, *problem.summed)
    return Scope(traits=traits).allows(case) and not refused


@pytest.mark.parametrize("traits", EXACTLY.values(), ids=EXACTLY)
def test_exactly_the_tested_cases_are_offered(traits: Traits):
    for case, problem in stated():
        assert in_scope(traits, case, problem) == (why_not(traits, problem, CPU) is None), (case.id, why_not(traits, problem, CPU))


@pytest.mark.parametrize("traits", AT_LEAST.values(), ids=AT_LEAST)
def test_tested_cases_are_offered_if_words_overlap(traits: Traits):
    reasons = [why_not(traits, problem, CPU) for _, problem in stated()]
    for (case, problem), reason in zip(stated(), reasons, strict=True):
        assert reason is None or not in_scope(traits, case, problem), (case.id, reason)
    assert len(list(filter(None, reasons))) > 10


@pytest.mark.parametrize(
    "text",
    ["row", "col", "row+8", "col+4@1", "every2", "rows0", "cols0", "window", "row~0", "col+1@3~1", "every3+2", "row~i", "col+8~i"],
)
def test_strides_are_recognised_by_their_kinds(text: str):
    found = OperandLayout.parse(text)
    assert list(kinds_of(found.layout((3, 4, 5), torch.float32))) == [found.kinds]
    assert not list(kinds_of(dataclasses.replace(found.layout((3, 4, 5), torch.float32), stride=(60, 15, 3))))


def test_weaker_arithmetic_than_torchs_is_not_offered():
    problem = dataclasses.replace(Problem.mm(16, 16, 64, dtype=torch.float16, device_type="cuda"), precision=Precision())
    on_a_gpu = {"streams": True, "capturable": True}
    assert why_not(Traits(**on_a_gpu), problem, GPU) is None
    for changes, reason in (
        ({"accumulate": {"float16": "float16"}}, "accumulate: declares float16, expected float32 or wider"),
        (
            {"partials": {"float16": "float16"}, "splits": 4},
            "partials: declares float16, which torch's flags for reduced precision",
        ),
        ({"skips_zeros": True}, "skips_zeros: declared, expected"),
        ({"capturable": False}, "capturable: not declared, expected true: on a GPU"),
        ({"sms": (80,)}, "device: got sm90, but sms declares 80"),
    ):
        assert why_not(Traits(**(on_a_gpu | changes)), problem, GPU).startswith(reason)
    reduced = dataclasses.replace(problem, precision=Precision(reduced_partials=True))
    assert why_not(Traits(**on_a_gpu, partials={"float16": "float16"}), reduced, GPU) is None
    single = Problem.mm(16, 16, 64, dtype=torch.float32, device_type="cuda")
    tf32 = dataclasses.replace(single, precision=Precision(input_mode="tf32"))
    rounding = Traits(**on_a_gpu, input_mode="tf32")
    assert why_not(rounding, single, GPU) == "input_mode: declares tf32, which torch's float32 precision does not allow here"
    assert why_not(rounding, tf32, GPU) is None
    assert why_not(Traits(**on_a_gpu, dtypes=("float32",)), tf32, GPU) is None


def test_a_declaration_takes_every_name_of_a_dtype():
    declared = {
        "dtypes": ["bf16", torch.float16, "e4m3"],
        "accumulate": {"half": "FP16"},
        "weights": ["int4", "i8"],
        "results": ["f32"],
    }
    assert Traits.of(declared) == Traits(
        dtypes=("bfloat16", "float16", "float8_e4m3fn"),
        accumulate={"float16": "float16"},
        weights=("int4", "int8"),
        results=("float32",),
    )
