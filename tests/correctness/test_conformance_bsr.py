"""The conformance suite on block-sparse products: cases, calls of a GEMM, detection of wrong ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from bsr_mutants import FAULTS, product

from gemmtune import settings
from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.properties.table import PROPERTIES, property_named
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.labels import SPARSE
from gemmtune.declaration.subject import FunctionSubject, NamespaceSubject, Subject
from gemmtune.declaration.traits import Traits
from gemmtune.errors import CaseError, TraitsError
from gemmtune.numerics.block_sparse import parts
from gemmtune.sparse.products import bsr_addmm

CPU = torch.device("cpu")
TRAITS = Traits(ops=("bsr_mm",), dtypes=("float32",), out=True, empty=True, skips_absent=True, blocks=("16x16", "8x24"))
CASE = Case(property_name="bound", op="bsr_mm", dtype="bfloat16", m=17, n=48, k=32, blocks="16x8@0.2+skewed+int64", a="col")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


def subject(fault: str) -> FunctionSubject:
    def bsr_mm(bsr: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(bsr.shape[0], x.shape[1]) if out is None else out
        product(out.t(), x.t(), *parts(bsr), fault=FAULTS[fault])
        return out

    return FunctionSubject(fault, bsr_mm, TRAITS)


@functools.cache
def some_cases() -> tuple[Case, ...]:
    """Return two cases of each property, with small products."""
    cases: list[Case] = []
    for wanted in PROPERTIES:
        scope = Scope(traits=TRAITS)
        fitting = [case for case in wanted.cases(scope) if case.m * case.n * case.k <= 2**20] if not wanted.needs(scope) else []
        cases += sorted(fitting, key=lambda case: (case.m < 2, case.m * case.n * case.k))[: 5 if "block" in wanted.name else 2]
    return tuple(cases)


def test_a_weight_overwritten_in_place_is_judged_by_its_new_values() -> None:
    case = Case.parse("fresh-pointers:bsr_mm-f32-17x48x32-blocks.16x16@0.3-variant.overwritten")
    assert judge(subject("right"), case, CPU).status is CaseStatus.PASSED


def test_an_id_has_the_class_of_the_weight() -> None:
    assert CASE.id == "bound:bsr_mm-bf16-17x48x32-a.col-blocks.16x8@0.2+skewed+int64"
    assert Case.parse(CASE.id) == CASE
    problem = problem_of(CASE, "cpu")
    assert str(problem.sparsity) == "blocks 16x8 density 0.2 skewed int64"
    assert (problem.b.size, problem.b.stride) == ((32, 48), (1, 32))
    for words, message in (
        ({"blocks": "16@0.5"}, "expected rows x columns @ density"),
        ({"blocks": "32x32@0.5"}, "N = 48, K = 32, expected blocks that divide them"),
        ({"op": "mm"}, "expected nothing: its operands are dense"),
    ):
        with pytest.raises(CaseError, match=message):
            CASE.changed(**words)
    with pytest.raises(TraitsError, match="blocks: got '16', expected rows x columns of a block"):
        Traits(blocks=("16",))


def test_cases_have_the_declared_blocks_and_every_kind_of_weight() -> None:
    cases = [case for name in ("bound", "edges") for case in property_named(name).cases(Scope(traits=TRAITS))]
    kinds = {case.blocks for case in cases}
    assert kinds == {f"{sides}{kind}" for sides in TRAITS.blocks for kind in ("@0.5", "@0.2+skewed", "@0.3+int64", "@0")}
    assert {case.op for case in cases} == {"bsr_mm"}


def test_a_right_gemm_passes_every_property_of_block_sparse_products() -> None:
    judged = {case.id: judge(subject("right"), case, CPU).status for case in some_cases()}
    assert len(judged) >= 30
    assert set(judged.values()) == {CaseStatus.PASSED}, judged


WORDS = {
    "column of the block before at row ends": "column index of the last block of each row one too small",
    "first column at row begins": "column index of the first block of each row taken for 0",
    "position for column": "column indices ignored: blocks placed from the left on",
    "last block of a row left out": "last block of each row dropped",
    "first block of a row left out": "first block of each row dropped",
    "first block of the next row too": "first block of the next row counted too",
    "last panel left out": "elements left unwritten",
    "block transposed": "blocks transposed",
    "first block twice": "first block of each row counted twice",
    "empty row keeps old memory": "elements left unwritten",
    "long rows end early": "dropped",
    "NaN beside absent blocks": "",  # the property of absent blocks says it
    "partial sums of 16 bits": "bfloat16 partial sums",
}
"""Words of the diagnosis of each fault."""


def diagnosed(gemm: Subject, cases: Iterable[Case], words: str) -> bool:
    """Return True if the diagnosis of a failed case has these words."""
    return any(words in failure.diagnosis for case in cases for failure in judge(gemm, case, CPU).failures)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "right"])
def test_wrong_products_are_found_with_their_diagnosis(fault: str) -> None:
    assert diagnosed(subject(fault), reversed(some_cases()), WORDS[fault])


SUMS = {
    "alpha dropped": ("right", lambda alpha, beta: (1, beta)),
    "beta dropped": ("right", lambda alpha, beta: (alpha, 1)),
    "column indices ignored": ("position for column", lambda alpha, beta: (alpha, beta)),
}
"""Words of a diagnosis to the fault of the product, and the scalars that a wrong sum uses for alpha and beta."""


@pytest.mark.parametrize("words", SUMS)
def test_wrong_sums_are_found_with_their_diagnosis(words: str) -> None:
    fault, used = SUMS[words]

    def bsr_addmm(inp: torch.Tensor, bsr: torch.Tensor, x: torch.Tensor, *, alpha: float = 1, beta: float = 1) -> torch.Tensor:
        alpha, beta = used(alpha, beta)
        made = x.new_empty(bsr.shape[0], x.shape[1])
        product(made.t(), x.t(), *parts(bsr), fault=FAULTS[fault])
        return alpha * made + beta * inp if beta else alpha * made

    traits = TRAITS.changed({"ops": ["bsr_addmm"], "out": False, "alpha": True, "beta": True})
    cases = property_named("alpha-beta" if fault == "right" else "block-patterns").cases(Scope(traits=traits))
    assert diagnosed(FunctionSubject(fault, bsr_addmm, traits), cases, words)


def test_a_stale_copy_of_the_weight_is_found() -> None:
    kept: dict[int, torch.Tensor] = {}

    def stale(bsr: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(bsr.values().data_ptr(), bsr.to_dense()) @ x

    wrong = FunctionSubject("stale", stale, TRAITS.changed({"out": False}))
    cases = [case for case in some_cases() if case.property_name == "changed-in-place"]
    assert [judge(wrong, case, CPU).status for case in cases] == [CaseStatus.FAILED] * 2


def test_our_operation_gets_the_added_operand() -> None:
    ours = type("ours", (), {"bsr_addmm": staticmethod(bsr_addmm)})
    traits = Traits(alpha=True, beta=True, out=True, dtypes=("float32",), bias=("n", "mn", "m1", "1n", "scalar"))
    namespace = NamespaceSubject("ours", ours, traits)
    assert namespace.traits.ops == ("bsr_addmm",)
    cases = list(property_named("bias").cases(Scope(traits=namespace.traits)))[::8]
    assert {case.bias for case in cases} > {"n", "mn"}
    with settings.patch(tune="never", backends=("aten",)):
        assert {judge(namespace, case, CPU).status for case in cases} == {CaseStatus.PASSED}
    assert set(SPARSE) == {"bsr_mm", "bsr_addmm"}
