"""The suite on quantized operations: right GEMMs conform in every form, and a GEMM gets what the case states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conformance_gemms import CPU, assert_conforms, cases_of, subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants.gemm import ALL_OPS, FACTOR, MIXED, SCALED, Gemm
from rotation import rotated

from gemmtune.choice import Claims
from gemmtune.conformance.bench.bench import Bench
from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.forms import Form, form_number, forms_of
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.properties.table import PROPERTIES, property_named
from gemmtune.conformance.runs.isolation import judge
from gemmtune.conformance.suite.drawing import cases
from gemmtune.declaration.labels import SCALES_OF, STRIDED
from gemmtune.declaration.subject import NamespaceSubject, Subject
from gemmtune.declaration.traits import Traits
from gemmtune.errors import CaseError, TraitsError
from gemmtune.problem.fused import NAMES as OPERATION_NAMES

QUANTIZED_ONLY = ALL_OPS.changed({"ops": tuple(op for op in STRIDED if OPERATION_NAMES[op].quantized)})
NEEDS_OTHERS = ("grade", "overflow")
"""Properties that have cases of dense operations only."""
NAMES = [
    p.name for p in PROPERTIES if p.needs(Scope(traits=QUANTIZED_ONLY)) is None and p.name not in NEEDS_OTHERS
]  # fmt: skip


def plain(traits: Traits = QUANTIZED_ONLY) -> Subject:
    return NamespaceSubject("plain", Gemm(gemm_traits=traits), traits)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", rotated(NAMES, 2, "right quantized"))
def test_a_right_gemm_conforms(name: str) -> None:
    assert_conforms(name, plain())


@pytest.mark.rotates(9)
@pytest.mark.parametrize("name", NAMES)
def test_cases_are_allowed_and_have_ids(name: str) -> None:
    scope = Scope(traits=QUANTIZED_ONLY, level=Level.FULL)
    found = cases_of(name, plain(), Level.FULL)
    assert found
    assert all(scope.allows(case) and Case.parse(case.id) == case for case in found)


def test_the_scales_property_has_every_form_at_level_full() -> None:
    traits = ALL_OPS.changed({"ops": tuple(SCALES_OF)})
    scope = Scope(traits=traits, level=Level.FULL)
    found = [case for name in ("scales", "group-scales") for case in property_named(name).cases(scope)]
    for op in SCALES_OF:
        forms = forms_of(op, traits)
        held = [case for case in found if case.op == op]
        assert set(map(Form.of, held)) >= set(forms)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 114])
def test_each_form_occurs_once_and_neighbours_differ(count: int) -> None:
    places = [form_number(number, count) for number in range(count)]
    assert sorted(places) == list(range(count))
    if count > 6:
        assert all(abs(x - y) > 1 for x, y in itertools.pairwise(places))


STATED: dict[str, str] = {
    "bound:mixed_mm-f16-33x40x66-scales.group_32-weights.int4-zeros.yes": (
        "mixed_mm 33x40x66 float16 nn b int4 scale_b[32x1] zero_b[32x1] on cpu"
    ),
    "bound:mixed_mm-bf16-5x7x9-b.col-scales.none-weights.float8_e5m2": "mixed_mm 5x7x9 bfloat16 nt b float8_e5m2 on cpu",
    "bound:scaled_mm-e4m3-130x260x300-scales.block_128x128-weights.float8_e5m2-result.float32": (
        "scaled_mm 130x260x300 float8_e4m3fn nn b float8_e5m2 out float32 scale_a[1x128] scale_b[128x128] on cpu"
    ),
    "bound:int_mm_mul-i8-3x4x5-scales.column-scale_dtype.bfloat16": "int_mm 3x4x5 int8 nn epilogue=mul(acc, x0) on cpu",
}


@pytest.mark.parametrize("case_id", STATED)
def test_a_case_states_its_problem(case_id: str) -> None:
    case = Case.parse(case_id)
    assert (case.id, str(problem_of(case, "cpu"))) == (case_id, STATED[case_id])


def test_scales_have_the_strides_of_inp() -> None:
    problem = problem_of(Case.parse("scales:mixed_mm-f32-5x6x64-inp.row+3-scales.group_32-zeros.yes"), "cpu")
    assert [scale.stride for scale in problem.scales] == [(9, 1), (9, 1)]
    factor = problem_of(Case.parse("scales:int_mm_mul-i8-5x6x64-inp.every2-scales.column"), "cpu").epilogue
    assert factor is not None
    assert factor.operands[0].stride == (2,)


@pytest.mark.parametrize(
    ("case_id", "text"),
    [
        ("bound:mixed_mm-f16-3x4x6-scales.row", "scales: got 'row', expected for mixed_mm one of none, tensor, column, group_32"),
        ("bound:scaled_mm-e4m3-3x4x6-weights.int4", "weights: got 'int4', expected one of , float8_e4m3fn, float8_e5m2"),
        ("bound:mixed_mm-f16-3x4x6-zeros.maybe", "zeros: got 'maybe', expected one of no, yes"),
    ],
)
def test_rejects_a_case_with_an_illegal_form(case_id: str, text: str) -> None:
    with pytest.raises(CaseError, match=text):
        Case.parse(case_id)


@pytest.mark.parametrize("declared", [{"weights": ("int2",)}, {"scales": ("group_16",)}, {"results": ("float64",)}, {"zeros": 1}])
def test_rejects_illegal_declarations(declared: dict[str, Any]) -> None:
    with pytest.raises(TraitsError, match=next(iter(declared))):
        Traits.of(declared)


def test_packed_weights_have_an_even_k() -> None:
    scope = Scope(traits=MIXED.changed({"weights": ("int4", "uint4")}))
    found = [case for p in PROPERTIES if p.needs(scope) is None for case in p.cases(scope)]
    assert found
    assert all(case.packed and case.k % 2 == 0 for case in found)
    assert not scope.allows(found[0].changed(k=7))


@pytest.mark.turn(4, 8)
@given(data=st.data())
@settings(max_examples=60)
def test_drawn_cases_state_problems(data: st.DataObject) -> None:
    case = data.draw(cases(property_named("scales"), Scope(traits=QUANTIZED_ONLY)))
    assert problem_of(case, "cpu").k == case.k


def called_with(case_id: str, **declared: Any) -> tuple[dict[str, Any], int]:
    """Return the keywords and the number of positional arguments of a case's first call."""
    calls: list[tuple[dict[str, Any], int]] = []

    def gemm(*args: torch.Tensor, **keywords: Any) -> torch.Tensor:
        calls.append((keywords, len(args)))
        raise NotImplementedError

    case = Case.parse(case_id)
    judge(subject_of(gemm, ops=(case.op,), **declared), case, CPU)
    return calls[0]


def test_a_gemm_gets_the_arguments_of_the_case() -> None:
    keywords, count = called_with("bound:mixed_mm-f16-4x6x8-scales.group_32-weights.uint4-zeros.yes")
    assert (sorted(keywords), keywords["encoding"], count) == (["encoding", "scale_b", "zero_b"], "uint4", 2)
    assert called_with("bound:mixed_mm-f16-4x6x8-scales.none") == ({}, 2)
    keywords, count = called_with("bound:scaled_mm-e4m3-4x6x8-scales.row-result.float16")
    assert (sorted(keywords), keywords["out_dtype"], count) == (["out_dtype", "scale_a", "scale_b"], torch.float16, 2)
    assert called_with("bound:int_mm_mul-i8-4x6x8-scales.column") == ({}, 3)


def test_claims_allow_weights_to_be_rounded_to_the_dtype_of_a() -> None:
    def claimed(case_id: str) -> Claims:
        return MIXED.claims(problem_of(Case.parse(case_id), "cpu"))

    assert claimed("bound:mixed_mm-bf16-4x6x8-scales.column").weights == torch.bfloat16
    assert claimed("bound:mixed_mm-bf16-4x6x8-scales.none").weights is None
    factor = FACTOR.claims(problem_of(Case.parse("bound:int_mm_mul-i8-4x6x8"), "cpu"))
    assert (factor.accumulate, factor.epilogue_input) == (torch.int32, torch.float32)


def test_fast_accumulation_is_requested_if_declared() -> None:
    case = Case.parse("bound:scaled_mm-e4m3-4x6x8")
    for declared in (False, True):
        subject = plain(SCALED.changed({"fast_accum": declared}))
        assert Bench(subject, case, CPU).problem.fast_accum is declared


def test_a_wrong_factor_is_reported_with_the_tolerance() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((a.double() @ b.double()) * scale * 1.01).float()

    outcome = judge(subject_of(gemm, ops=("int_mm_mul",)), Case.parse("bound:int_mm_mul-i8-33x40x65"), CPU)
    assert outcome.status is CaseStatus.FAILED
    failure = outcome.failures[0]
    assert failure.expected is not None
    assert failure.tolerance is not None
    assert failure.got is not None
    assert failure.got == pytest.approx(1.01 * failure.expected, rel=1e-6)
    assert 0 < failure.tolerance < 1e-5 * abs(failure.expected)


@pytest.mark.parametrize("level", list(Level))
def test_int_mm_has_no_scales(level: Level) -> None:
    scope = Scope(traits=ALL_OPS.changed({"ops": ("int_mm",)}), level=level)
    assert property_named("scales").needs(scope) == "none of int_mm_mul, mixed_mm, scaled_mm is tested"
