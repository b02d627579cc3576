"""The conformance suite on grouped products: cases, calls of a GEMM, detection of wrong ones."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from grouped_gemms import MUTANTS, Grouped, Mutant, scale_of_matrices
from grouped_gemms import TRAITS as EVERY
from grouped_mutants import ROWS, TERMS, of_rows, of_terms
from mutants.products import one_by_one

import gemmtune
from gemmtune import settings
from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.diagnose import group_suspects
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.labels import GROUPED
from gemmtune.declaration.legality import why_not
from gemmtune.declaration.subject import FunctionSubject, NamespaceSubject
from gemmtune.declaration.traits import Traits
from gemmtune.device import preset
from gemmtune.errors import CaseError
from gemmtune.problem import Problem
from gemmtune.problem.operations import OPERATIONS

Tensor = torch.Tensor
CPU = torch.device("cpu")
PLAIN = ("grouped_mm", "grouped_k_mm")
TRAITS = Traits(ops=PLAIN, dtypes=("float32",), out=True, deterministic=True, threads=True)


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
    assert {case.op for case in cases} == set(PLAIN)
    assert {case.groups for case in cases} == {"", "1", "7", "33"}
    named = {case.property_name for case in cases}
    assert named >= {"group-ends", "group-one-hot", "beside-groups", "group-bound", "changed-groups", "out-of-bounds", "unwritten"}
    assert named >= {"inputs-unchanged", "repeatability", "threads", "determinism", "fresh-pointers"}


def test_a_right_product_passes() -> None:
    judged = {case.id: judge(subject("right"), case, CPU) for case in some_cases()}
    wrong = {name: outcome.failures for name, outcome in judged.items() if outcome.status is not CaseStatus.PASSED}
    assert not wrong


@pytest.mark.rotates(2)
@pytest.mark.parametrize(("form", "name"), [("rows", x) for x in ROWS] + [("terms", x) for x in TERMS])
def test_wrong_products_are_found(form: str, name: str) -> None:
    if name == "right":
        return
    wrong = subject(name) if form == "rows" else subject("right", name)
    cases = [case for case in some_cases() if case.op == ("grouped_mm" if form == "rows" else "grouped_k_mm")]
    assert any(judge(wrong, case, CPU).status is CaseStatus.FAILED for case in cases)


def _by_size(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
    """Return a @ b[g], with K in two parts for groups of few rows."""
    result, half = a.new_zeros((a.shape[0], b.shape[-1])), a.shape[1] // 2
    for g, (begin, end) in enumerate(pieces):
        cut = half if end - begin <= 2 else a.shape[1]
        rows = a[begin:end]
        result[begin:end] = one_by_one(rows[:, :cut], b[g, :cut]) + one_by_one(rows[:, cut:], b[g, cut:])
    return result


def _one_by_one(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
    return torch.cat([one_by_one(a[begin:end], b[g]) for g, (begin, end) in enumerate(pieces)])


@pytest.mark.parametrize("right", [True, False])
def test_bits_that_depend_on_the_size_of_a_group_are_found(right: bool) -> None:
    traits = dataclasses.replace(EVERY, ops=PLAIN[:1], dtypes=("float32",), batch_invariant=True, splits=2)
    wanted = next(x for x in PROPERTIES if x.name == "batch-invariance")
    made = NamespaceSubject("groups", Grouped(multiply=_one_by_one if right else _by_size), traits)
    cases = [case for case in wanted.cases(Scope(traits=made.traits)) if case.m * case.n * case.k <= 2**18]
    judged = [judge(made, case, CPU) for case in cases[:6]]
    assert judged
    if right:
        assert {outcome.status for outcome in judged} == {CaseStatus.PASSED}
    else:
        assert any("without the others: the bits among all rows" in x.message for o in judged for x in o.failures)


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
        judged = [judge(stale(), case, CPU) for case in cases if case.groups != "1"]
    assert {outcome.status for outcome in judged} == {CaseStatus.FAILED}
    assert any(failure.diagnosis == "offsets of an earlier call" for outcome in judged for failure in outcome.failures)


def test_our_operation_and_torchs_pass_and_are_found_by_name() -> None:
    ours = NamespaceSubject("ours", gemmtune, Traits(ops=("grouped_mm",), dtypes=("float32",), out=True))
    theirs = FunctionSubject("torch", torch.nn.functional.grouped_mm, Traits(ops=PLAIN, dtypes=("float32",)))
    cases = [case for case in some_cases()[::4] if case.op == "grouped_mm" and case.a == case.b == "row"]
    with settings.patch(tune="never", backends=("aten",)):
        assert {judge(ours, case, CPU).status for case in cases} == {CaseStatus.PASSED}
    aligned = [case for case in cases if case.k % 4 == 0 and case.n % 4 == 0 and not case.out]
    assert {judge(theirs, case, CPU).status for case in aligned} == {CaseStatus.PASSED}


def test_a_declared_gemm_is_offered_for_grouped_problems() -> None:
    problem = Problem.grouped_mm(16, 32, 32, dtype=torch.float32, device_type="cpu")
    assert why_not(TRAITS, problem, preset("portable")) is None
    assert "ops declares grouped_k_mm" in str(why_not(TRAITS.changed({"ops": ["grouped_k_mm"]}), problem, preset("portable")))
    mixed = Problem.mixed_grouped_mm(16, 32, 32, device_type="cpu")
    assert "ops declares grouped_mm" in str(why_not(TRAITS, mixed, preset("portable")))
    routed = Problem.routed_grouped_mm(16, 32, 32, tokens=5, gated="silu", dtype=torch.float32, device_type="cpu")
    narrow = EVERY.changed({"gates": ["gelu"]})
    assert why_not(EVERY, routed, preset("portable")) is None
    assert why_not(narrow, routed, preset("portable")) == "gated: got silu, but gates declares gelu"
    other = EVERY.changed({"index_dtypes": ["int32"]})
    assert why_not(other, routed, preset("portable")) == "rows: got int64, but index_dtypes declares int32"


def every_case(op: str) -> list[Case]:
    """Return the cases of the properties of groups for an operation in every dtype and form, small ones first."""
    scope = Scope(traits=EVERY, ops=(op,))
    cases = [case for p in PROPERTIES if "group" in p.name and p.needs(scope) is None for case in p.cases(scope)]
    return sorted(cases, key=lambda case: case.m * case.n * case.k)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("op", GROUPED)
def test_each_grouped_operation_has_cases_that_a_right_product_passes(op: str) -> None:
    cases, gemm = every_case(op), NamespaceSubject("right", Grouped(), EVERY)
    assert {case.property_name for case in cases} >= {"group-ends", "group-one-hot", "beside-groups", "group-bound"}
    assert all(Case.parse(case.id) == case for case in cases)
    for name in ("scales", "weights", "gated", "index", "each"):
        words = {getattr(case, name) for case in cases}
        assert len(words) > 1 or not has(op, name), (name, words)
    judged = {case.id: judge(gemm, case, CPU) for case in cases[::3]}
    assert not {name: outcome.failures for name, outcome in judged.items() if outcome.status is not CaseStatus.PASSED}


def has(op: str, name: str) -> bool:
    """Return True if the row of an operation has what a field of a case chooses."""
    row = OPERATIONS[op]
    given = {
        "scales": row.operand("scale_b") is not None,
        "weights": row.widens_b or row.float8,
        "gated": "gated" in row.options,
        "index": any(operand.indexes for operand in row.operands),
        "each": row.operand("weights") is not None,
    }
    return given[name]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.op}-{mutant.diagnosis}".replace(" ", "_"))
def test_mutants_of_each_operation_are_killed_with_their_diagnosis(mutant: Mutant) -> None:
    wrong, diagnoses = NamespaceSubject("mutant", mutant.gemm, EVERY), set()
    for case in every_case(mutant.op):
        diagnoses |= {failure.diagnosis for failure in judge(wrong, case, CPU).failures}
        if any(mutant.diagnosis in text for text in diagnoses):
            return
    raise AssertionError(f"{mutant.diagnosis!r} is none of {diagnoses}")


def test_a_small_scale_that_counts_as_0_is_found() -> None:
    def flushed(scale: Tensor, k: int, n: int) -> Tensor:
        return scale_of_matrices(torch.where(scale < 2**-20, 0.0, scale), k, n)

    case = next(case for case in every_case("scaled_grouped_mm") if case.property_name == "group-scales")
    failures = judge(NamespaceSubject("flushed", Grouped(scale_b=flushed), EVERY), case, CPU).failures
    assert "scales far from 1" in str(failures)


def test_each_operation_of_the_table_has_mutants() -> None:
    counts = Counter(mutant.op for mutant in MUTANTS)
    assert all(counts[op] >= 2 for op in GROUPED if op not in PLAIN)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("matrix of the neighbour", "matrix of the next group"),
        ("matrix of the last group for all", "matrix of the last group used for all"),
        ("matrix of the group before at a boundary", "matrix of the group before where a group begins within a tile of 4"),
        ("last row of a group lost", "elements left unwritten in the last row of groups"),
        ("last group left out", "elements left unwritten in the last group"),
        ("groups begin at tiles", "groups begin at multiples of 4"),
        ("offsets read as sizes", "offsets read as sizes of groups"),
        ("next group's matrix times zero", "what another group may read spoils this one"),
    ],
)
def test_wrong_groups_have_their_diagnosis(name: str, words: str) -> None:
    cases = [case for case in some_cases() if case.op == "grouped_mm" and "group" in case.property_name]
    found = (failure.diagnosis for case in cases for failure in judge(subject(name), case, CPU).failures)
    assert any(words in text for text in found)


def test_functions_with_our_signatures_are_found_by_name_and_tested() -> None:
    for op, more in (
        ("mixed_grouped_mm", {}),
        ("scaled_grouped_mm", {}),
        ("grouped_mm", {"ops": ["routed_grouped_mm", "combined_grouped_mm", "grouped_k_mm"], "gates": ["silu"]}),
    ):
        gemm = FunctionSubject(op, getattr(gemmtune, op), Traits().changed(more))
        assert gemm.traits.ops == tuple(more.get("ops", [op]))
        with settings.patch(tune="never", backends=("aten",)):
            scope = Scope(traits=gemm.traits)
            cases = [case for p in PROPERTIES if p.name == "group-bound" for case in p.cases(scope)]
            assert {case.op for case in cases} == set(gemm.traits.ops)
            assert {judge(gemm, case, CPU).status for case in cases[::4]} == {CaseStatus.PASSED}
    assert set(NamespaceSubject("gemmtune", gemmtune, Traits()).traits.ops or ()) >= set(GROUPED)
    theirs = SimpleNamespace(grouped_mm=torch.nn.functional.grouped_mm)
    assert NamespaceSubject("theirs", theirs, Traits()).traits.ops == ("grouped_mm",)  # the others are not declared


PIECES = [(0, 3), (3, 8), (8, 9)]
MOVED_ROWS = {
    "groups begin and end one row early": [(0, 2), (2, 7), (7, 8)], "groups begin and end one row late": [(1, 4), (4, 9), (9, 10)],
    "offsets read as sizes of groups": [(0, 3), (3, 11), (11, 12)], "offsets of an earlier call": [(0, 5), (5, 5), (5, 12)],
    "rows behind the last group taken for its own": [(0, 3), (3, 8), (8, 12)],
}  # fmt: skip
MOVED_TERMS = {
    **{text.replace("row", "term"): pieces for text, pieces in MOVED_ROWS.items()},
    "first term of the next group added": [(0, 4), (3, 9), (8, 10)], "first term of groups dropped": [(1, 3), (4, 8), (9, 9)],
    "results in the places of the next groups": [(8, 9), (0, 3), (3, 8)],
    "results in the places of the groups before": [(3, 8), (8, 9), (0, 3)], "last group left out": [(0, 3), (3, 8), (0, 0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "wanted"), [(Problem.grouped_mm, MOVED_ROWS), (Problem.grouped_k_mm, MOVED_TERMS)], ids=["rows", "terms"]
)
def test_known_bugs_of_offsets_move_groups(make: Callable[..., Problem], wanted: dict[str, list[tuple[int, int]]]) -> None:
    problem = make(12, 12, 12, groups=3, dtype=torch.float32, device_type="cpu")
    found = group_suspects._of_offsets(problem, None, PIECES, [(5, 5, 12)], 12)  # type: ignore[arg-type]
    pieces = {change.text: list(change.pieces) for change in found}
    tiles = {int(text.rpartition(" ")[2]): pieces.pop(text) for text in list(pieces) if "multiples" in text}
    assert pieces == wanted
    assert tiles == {tile: [(begin // tile * tile, end) for begin, end in PIECES] for tile in group_suspects.TILES}


def test_known_bugs_of_routes_change_the_index_the_gates_or_the_weights() -> None:
    problem = Problem.routed_grouped_mm(4, 2, 3, groups=2, tokens=3, gated="silu", dtype=torch.float32, device_type="cpu")
    b = torch.arange(24.0).view(2, 3, 4)
    given = Mock(a=torch.ones(3, 3), b=b, rows=torch.tensor([2, 0, 1, 2]), slots=torch.tensor([1, 3, 0, 2]), weights=WEIGHTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_suspects.dataclasses, "replace", lambda _, **fields: fields)
        changes = list(group_suspects._of_routes(problem, given, PIECES))
    found: dict[str, Any] = {change.text: change.operands for change in changes if change.operands is not given}
    assert [x.text for x in changes if x.operands is given] == ["gates by gelu for silu", "gates by gelu_tanh for silu"]
    rows = {text: fields["rows"].tolist() for text, fields in found.items() if "rows" in fields}
    assert rows == {
        "row r of a used in place of row rows[r]": [0, 1, 2, 2], "the next row of a picked": [2, 1, 2, 2],
        "rows of the index one place late": [2, 2, 0, 1], "rows of the index one place early": [0, 1, 2, 2],
    }  # fmt: skip
    columns = {text: fields["b"][0, 0].tolist() for text, fields in found.items() if "b" in fields}
    assert columns == {"gates and the other columns exchanged": [2, 3, 0, 1], "gates taken from every second column": [0, 2, 1, 3]}
    weights = {text: fields["weights"].flatten().tolist() for text, fields in found.items() if "weights" in fields}
    assert weights == {
        "weights dropped": [1, 1, 1, 1], "weights applied twice": [4, 9, 16, 25], "weights read as bfloat16": [2, 3, 4, 5],
        "weights read as float16": [2, 3, 4, 5], "weights in the order of rows, not of slots": [4, 2, 5, 3],
        "weights of the next slot": [3, 4, 5, 2], "only the first row of each token counts": [2, 0, 4, 0],
        "only the last row of each token counts": [0, 3, 0, 5],
    }  # fmt: skip
    assert found["rows added in their own order, whatever their slots"]["slots"].tolist() == [0, 1, 2, 3]


WEIGHTS = torch.tensor([[2.0, 3.0], [4.0, 5.0]])
