"""The conformance suite on grouped products: cases, calls of a GEMM, detection of wrong ones."""

from __future__ import annotations

import functools

import pytest
import torch
from grouped_mutants import ROWS, TERMS, of_rows, of_terms

import gemmtune
from gemmtune import settings
from gemmtune.conformance.bench.outcome import Verdict
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.labels import GROUPED
from gemmtune.declaration.legality import why_not
from gemmtune.declaration.subject import FunctionSubject, NamespaceSubject
from gemmtune.declaration.traits import Traits
from gemmtune.device import preset
from gemmtune.errors import CaseError
from gemmtune.problem import Problem

Tensor = torch.Tensor
CPU = torch.device("cpu")
TRAITS = Traits(ops=GROUPED, dtypes=("float32",), out=True, deterministic=True, threads=True)


def subject(rows: str, terms: str = "right") -> FunctionSubject:
    def grouped(a: Tensor, b: Tensor, *, offs: Tensor, out: Tensor | None = None) -> Tensor:
        size = (a.shape[0], b.shape[-1])
        if b.dim() == 3:
            out = a.new_empty(size) if out is None else out
            of_rows(out, a, b, offs, fault=ROWS[rows])
        else:
            out = a.new_empty(len(offs), *size) if out is None else out
            of_terms(out, a, b, offs, fault=TERMS[terms])
        return out

    return FunctionSubject("grouped", grouped, TRAITS)


@functools.cache
def some_cases() -> tuple[Case, ...]:
    """Return a few cases of each property, with small products, and more of the properties for groups only."""
    cases: list[Case] = []
    for wanted in PROPERTIES:
        scope = Scope(traits=TRAITS)
        fitting = [case for case in wanted.cases(scope) if case.m * case.n * case.k <= 2**20] if not wanted.needs(scope) else []
        cases += fitting[:: max(1, len(fitting) // (12 if "group" in wanted.name else 2))]
    return tuple(cases)


def test_an_id_has_the_number_of_groups() -> None:
    case = Case(property_name="group-ends", op="grouped_mm", dtype="bfloat16", m=17, n=48, k=32, groups="7", variant="even")
    assert case.id == "group-ends:grouped_mm-bf16-17x48x32-groups.7-variant.even"
    assert Case.parse(case.id) == case
    problem = problem_of(case, "cpu")
    assert (problem.groups, problem.b.size, problem.out.size) == (7, (7, 32, 48), (17, 48))
    terms = problem_of(case.changed(op="grouped_k_mm", groups=""), "cpu")
    assert (terms.groups, terms.b.size, terms.out.size) == (4, (32, 48), (4, 17, 48))
    for words in ({"groups": "0"}, {"groups": "2000"}, {"op": "mm", "groups": "2"}):
        with pytest.raises(CaseError, match="expected 1 to 1024, and a grouped operation"):
            case.changed(**words)


def test_cases_have_both_forms_and_include_memory_and_calls() -> None:
    cases = some_cases()
    assert {case.op for case in cases} == set(GROUPED)
    assert {case.groups for case in cases} == {"", "1", "7", "33"}
    named = {case.property_name for case in cases}
    assert named >= {"group-ends", "group-one-hot", "beside-groups", "group-bound", "changed-groups", "out-of-bounds", "unwritten"}
    assert named >= {"inputs-unchanged", "repeatability", "threads", "determinism", "fresh-pointers"}


def test_a_right_product_passes() -> None:
    judged = {case.id: judge(subject("right"), case, CPU) for case in some_cases()}
    wrong = {name: outcome.failures for name, outcome in judged.items() if outcome.verdict is not Verdict.PASSED}
    assert not wrong


@pytest.mark.parametrize(("form", "name"), [("rows", x) for x in ROWS] + [("terms", x) for x in TERMS])
def test_wrong_products_are_found(form: str, name: str) -> None:
    if name == "right":
        return
    wrong = subject(name) if form == "rows" else subject("right", name)
    cases = [case for case in some_cases() if case.op == ("grouped_mm" if form == "rows" else "grouped_k_mm")]
    assert any(judge(wrong, case, CPU).verdict is Verdict.FAILED for case in cases)


def test_cached_offsets_are_found() -> None:
    def stale() -> FunctionSubject:
        kept: list[int] = []

        def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
            kept[:] = kept or offs.tolist()
            return gemmtune.grouped_mm(a, b, torch.tensor(kept, dtype=torch.int32))

        return FunctionSubject("stale", grouped_mm, Traits(dtypes=("float32",)))

    assert stale().traits.ops == ("grouped_mm",)
    with settings.patch(tune="never", backends=("aten",)):
        cases = [case for case in some_cases() if case.property_name == "changed-groups" and case.op == "grouped_mm"]
        judged = {judge(stale(), case, CPU).verdict for case in cases if case.groups != "1"}
    assert judged == {Verdict.FAILED}


def test_our_operation_and_torchs_pass_and_are_found_by_name() -> None:
    ours = NamespaceSubject("ours", gemmtune, Traits(ops=("grouped_mm",), dtypes=("float32",), out=True))
    theirs = FunctionSubject("torch", torch.nn.functional.grouped_mm, Traits(ops=GROUPED, dtypes=("float32",)))
    cases = [case for case in some_cases()[::4] if case.op == "grouped_mm" and case.a == case.b == "row"]
    with settings.patch(tune="never", backends=("aten",)):
        assert {judge(ours, case, CPU).verdict for case in cases} == {Verdict.PASSED}
    aligned = [case for case in cases if case.k % 4 == 0 and case.n % 4 == 0 and not case.out]
    assert {judge(theirs, case, CPU).verdict for case in aligned} == {Verdict.PASSED}


def test_a_declared_gemm_is_offered_for_grouped_problems() -> None:
    problem = Problem.grouped_mm(16, 32, 32, dtype=torch.float32, device_type="cpu")
    assert why_not(TRAITS, problem, preset("portable")) is None
    assert "ops declares grouped_k_mm" in str(why_not(TRAITS.changed({"ops": ["grouped_k_mm"]}), problem, preset("portable")))
    mixed = Problem.mixed_grouped_mm(16, 32, 32, device_type="cpu")
    assert "which no declaration covers" in str(why_not(TRAITS, mixed, preset("portable")))
