"""Properties of values: right GEMMs pass each of them, and each finds its bug."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from broken_kernels import backwards, narrowed, one_by_one, pairwise, rounding_blocks, shuffled, split_k
from conformance_gemms import assert_conforms, assert_found, cases_of, subject_of, torch_subject
from made_subjects import EVERYTHING, Product, apply_epilogue, judged, made
from rotation import rotated
from torch_faults import drops_beta_in_float16

from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.sampling import EDGES, Sample, covering
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.properties import edges, scalars, special, values
from gemmtune.conformance.properties.property import Property
from gemmtune.declaration.layouts import BATCH_KINDS, KINDS
from gemmtune.declaration.subject import Subject
from gemmtune.declaration.traits import Traits

PROPERTIES: tuple[Property, ...] = (
    *values.PROPERTIES,
    *(judging for judging in edges.PROPERTIES if judging.name != "full-tiles"),
    *(judging for judging in scalars.PROPERTIES if judging.name != "scales"),
    *special.PROPERTIES,
)
NAMES = tuple(judging.name for judging in PROPERTIES)
ALL = Traits.of(EVERYTHING)
FAULTS_OF_TORCH = ("alpha-beta", "subnormal")
"""Properties that torch fails on some CPUs, see below."""


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_gemm_conforms(name: str) -> None:
    assert_conforms(name, made())


@pytest.mark.rotates(9)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in FAULTS_OF_TORCH])
def test_torch_conforms(name: str) -> None:
    assert_conforms(name, torch_subject(ops=("mm", "addmm", "bmm", "baddbmm")))


def test_torch_conforms_in_alpha_and_beta_except_narrow_types_with_alpha_0() -> None:
    """Check torch. ``torch.baddbmm`` of bfloat16 above some size ignores beta if alpha is 0, on some CPUs of float16 too."""
    narrow = ("bfloat16", "float16") if drops_beta_in_float16() else ("bfloat16",)
    others = tuple(x for x in ("float32", "float16", "float64") if x not in narrow)
    assert_conforms("alpha-beta", torch_subject(ops=("addmm", "baddbmm"), dtypes=others))
    assert_conforms("alpha-beta", torch_subject(ops=("addmm",), dtypes=narrow))


def test_torch_conforms_in_subnormal_numbers_except_bfloat16() -> None:
    """Check torch. The dot-product instructions of AVX512-BF16 and AMX read subnormal numbers as 0."""
    dtypes = ("float32", "float64")
    assert_conforms("subnormal", torch_subject(ops=("mm", "addmm", "bmm"), dtypes=dtypes, flush_subnormals=False))


def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", ["integers", "one-hot-a", "width", "cancellation", "bound", "grade", "edges", "nan", "overflow"])
def test_a_function_without_declarations_conforms(name: str) -> None:
    assert_conforms(name, subject_of(plain))


ORDERS = (one_by_one, backwards, pairwise, shuffled, split_k(torch.float32, 3))
SUMMED = ("integers", "width", "cancellation", "bound", "grade", "overflow")


@pytest.mark.parametrize(("product", "name"), rotated([*itertools.product(ORDERS, SUMMED)], 4, "orders"))
def test_any_order_of_summation_conforms(product: Product, name: str) -> None:
    assert_conforms(name, made(product, ops=("mm", "addmm"), dtypes=("float32", "bfloat16")), every=3)


def test_declared_narrow_arithmetic_is_held_to_its_bound_and_not_graded() -> None:
    narrow = made(rounding_blocks(torch.float16), ops=("mm",), dtypes=("float16",), accumulate={"float16": "float16"})
    assert_conforms("bound", narrow)
    assert_conforms("cancellation", narrow)
    needs = {judging.name: judging.needs for judging in PROPERTIES}
    assert needs["grade"](Scope(traits=narrow.traits)) == (
        "float16 and bfloat16 are not tested, or are declared to be summed in a narrow dtype"
    )
    both = made(dtypes=("float16", "bfloat16"), partials={"float16": "float16"})
    assert {case.dtype for case in cases_of("grade", both)} == {"bfloat16"}


def spoiled(change: object) -> Subject:
    """Return a right GEMM whose result goes through ``change`` before it is rounded."""
    return made(epilogue=lambda p, c, alpha, beta: change(apply_epilogue(p, c, alpha, beta)))  # type: ignore[operator]


def clear_corner(result: torch.Tensor) -> torch.Tensor:
    result[..., -1, -1] = 1000
    return result


def only_aligned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[-1] - (a.shape[-1] % 8 == 1)
    return a[..., :k] @ b[..., :k, :]


def refuses_empty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[-2] == 0:
        raise ValueError("no rows")
    return a @ b


def without_later_terms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[..., :8191] @ b[..., :8191, :]


BROKEN: dict[str, tuple[str, Subject]] = {
    "integers": ("elements are wrong", made(ops=("mm",), read=lambda a, b: (a.abs(), b))),
    "one-hot-a": ("b read as bfloat16", made(narrowed("b", torch.bfloat16), ops=("mm",), dtypes=("float32",))),
    "one-hot-b": ("a read as bfloat16", made(narrowed("a", torch.bfloat16), ops=("mm",), dtypes=("float32",))),
    "width": ("width: P4 width", made(rounding_blocks(torch.bfloat16), dtypes=("bfloat16",))),
    "cancellation": ("float16 partial sums", made(split_k(torch.float16), dtypes=("float16",))),
    "bound": ("a and b read as float16", made(lambda a, b: a.half().float() @ b.half().float(), dtypes=("float32",))),
    "grade": ("grade", made(rounding_blocks(torch.float16), dtypes=("float16",))),
    "edges": ("last K block of 1", made(only_aligned, ops=("mm",))),
    "empty": ("raised for what it declares: ValueError: no rows", made(refuses_empty, ops=("mm",))),
    "k-zero": ("k-zero: integers", spoiled(lambda r: r + 1)),
    "alpha-beta": ("alpha dropped", made(epilogue=lambda p, c, alpha, beta: apply_epilogue(p, c, 1, beta))),
    "bias": (
        "the bias on the wrong axis",
        made(epilogue=lambda p, c, alpha, beta: apply_epilogue(p, moved(c, p), alpha, beta)),
    ),
    "nan": ("NaN swallowed", spoiled(lambda r: r.nan_to_num(0, torch.inf, -torch.inf))),
    "infinity": ("infinities in a", spoiled(lambda r: r.clamp(-1000, 1000))),
    "beta-zero": ("C is read although beta is 0", made(epilogue=lambda p, c, a, b: p * a if c is None else p * a + c * b)),
    "zeros": ("zeros: ", spoiled(lambda r: r.nan_to_num(0, torch.inf, -torch.inf))),
    "long": ("long: ", made(without_later_terms, ops=("mm",), dtypes=("float32",))),
    "overflow": ("overflow: out", spoiled(lambda r: r.clamp(-60000, 60000))),
    "subnormal": ("subnormal numbers became 0", spoiled(lambda r: torch.where(r.abs() < 2.0**-126, 0.0, r))),
}


def moved(c: torch.Tensor | None, product: torch.Tensor) -> torch.Tensor | None:
    square = c is not None and c.dim() == 1 and product.shape[-1] == product.shape[-2]
    return c.unsqueeze(-1) if square and c is not None else c


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_gemm_is_found(name: str) -> None:
    text, subject = BROKEN[name]
    assert_found(text, name, subject)


@pytest.mark.parametrize(("variant", "read"), [("", torch.isnan), ("infinite", torch.isinf)])
def test_beta_0_is_tried_on_nan_and_on_infinity(variant: str, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A GEMM that reads numbers of one kind only is wrong for the case with these, and right for the other."""
    subject = made(epilogue=lambda p, c, a, b: p * a + (0 if c is None else torch.where(read(c) | (b != 0), c * b, 0)))
    cases = {case.variant: case for case in cases_of("beta-zero", subject)}
    for name, case in cases.items():
        assert judged(subject, case.id).status is (CaseStatus.FAILED if name == variant else CaseStatus.PASSED), case.id
    assert cases.keys() == {"", "infinite"}


def test_a_wrong_corner_is_reported_with_place_and_count() -> None:
    outcome = judged(spoiled(clear_corner), "cancellation:mm-f32-64x48x33")
    failure = outcome.failures[0]
    assert failure.message.startswith("P5 cancellation: out[63, 47] = 1000, expected ")
    assert failure.message.endswith("exactly; 1 of 3072 elements are wrong")
    assert (failure.index, failure.got, failure.bad_elements, failure.diagnosis) == ((63, 47), 1000.0, 1, "")


def test_the_grade_and_the_error_over_the_bound_are_reported() -> None:
    outcome = judged(made(), "grade:mm-bf16-64x96x256")
    assert outcome.grade == pytest.approx(1.0, abs=0.01)
    assert outcome.error_over_bound is not None
    assert 0.5 < outcome.error_over_bound <= 1


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", list(Level))
def test_cases_are_allowed_distinct_and_have_ids(name: str, level: Level) -> None:
    scope = Scope(traits=ALL, level=level)
    cases = cases_of(name, made(), level)
    assert cases
    assert all(scope.allows(case) for case in cases)
    ids = [case.id for case in cases]
    assert len(set(ids)) == len(ids)
    assert all(Case.parse(text) == case for text, case in zip(ids, cases, strict=True))
    assert {case.property_name for case in cases} == {name}


@pytest.mark.rotates(9)
@pytest.mark.parametrize(("level", "most"), [(Level.SMOKE, 900), (Level.FULL, 5000), (Level.EXHAUSTIVE, 26500)])
def test_levels_keep_to_their_budget(level: Level, most: int) -> None:
    dense = made(ops=("mm", "addmm", "bmm", "baddbmm"), dtypes=("float32", "float16", "bfloat16", "float64"))
    assert most / 2 < sum(len(cases_of(name, dense, level)) for name in NAMES) <= most


def test_few_operations_and_dtypes_get_equally_many_cases() -> None:
    one = made(ops=("mm",), dtypes=("float32",))
    assert len(cases_of("bound", one)) == 90
    assert len(cases_of("bound", made())) >= 90


@pytest.mark.parametrize("name", ["integers", "bound"])
def test_full_has_every_operation_dtype_and_kind_of_strides(name: str) -> None:
    cases = cases_of(name, made(), Level.FULL)
    contexts = {(case.op, case.dtype) for case in cases}
    assert len(contexts) == 4 * 4 + 2
    for op, dtype in contexts:
        kinds = set[str]().union(*(case.kinds for case in cases if (case.op, case.dtype) == (op, dtype)))
        assert kinds >= set(KINDS) - (set() if op in ("bmm", "baddbmm") else set(BATCH_KINDS.values()))


def test_edges_have_every_pair_of_sizes_above_smoke_and_each_size_at_smoke() -> None:
    scope = Scope(traits=ALL)
    smoke = edges.edge_shapes(scope)
    assert all({shape[axis] for shape in smoke} == set(EDGES) for axis in range(3))
    full = edges.edge_shapes(dataclasses.replace(scope, level=Level.FULL))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(shape[first], shape[second]) for shape in full} == set(itertools.product(EDGES, EDGES))


def test_covering_has_every_combination_once_and_each_value_early() -> None:
    lengths = (3, 7, 4)
    found = list(covering(*lengths, start=11))
    assert sorted(found) == sorted(itertools.product(*map(range, lengths)))
    for begin in (0, 5, 40):
        first = list(itertools.islice(covering(*lengths, start=begin), 7))
        assert len({indices[1] for indices in first}) == 7
    for axis, length in enumerate(lengths):
        assert {indices[axis] for indices in list(covering(*lengths))[:7]} == set(range(length))


def test_a_sample_continues_where_the_previous_operation_stopped() -> None:
    sample = Sample(budget=(4, 4, 4), shapes=((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)))
    scope = Scope(traits=Traits(ops=("mm", "bmm"), dtypes=("float32", "float16"), layouts=("row",)))
    assert [(case.op, case.dtype, case.m) for case in sample("bound", scope)] == [
        ("mm", "float32", 1), ("mm", "float16", 2), ("bmm", "float32", 3), ("bmm", "float16", 4),
    ]  # fmt: skip


def test_sizes_respect_the_declarations() -> None:
    subject = made(ops=("mm",), multiples=(16, 8, 32), least=(16, 8, 64))
    for name in ("integers", "bound", "edges", "nan", "overflow", "grade"):
        for case in cases_of(name, subject):
            assert (case.m % 16, case.n % 8, case.k % 32) == (0, 0, 0)
            assert case.k >= 64


def test_undeclared_operations_are_not_tested_and_have_a_reason() -> None:
    needs = {judging.name: judging.needs for judging in PROPERTIES}
    mm = Scope(traits=Traits(ops=("mm",), least=(1, 1, 1)))
    assert needs["bias"](mm) == "neither addmm nor baddbmm is tested"
    assert needs["beta-zero"](mm) == "neither addmm nor baddbmm is tested"
    assert needs["empty"](mm) == "M and N are declared to be at least 1, and there is no batch"
    assert needs["k-zero"](mm) == "K is declared to be at least 1"
    assert needs["subnormal"](mm) == "flush_subnormals is not declared"
    addmm = Scope(traits=Traits(ops=("addmm",)))
    assert needs["beta-zero"](addmm) == "beta= is not declared"
    assert needs["alpha-beta"](addmm) == "neither alpha= nor beta= is declared"
    assert [needs[name](addmm) for name in ("bias", "empty", "k-zero", "integers")] == [None] * 4


def raises(outcome: Outcome) -> tuple[CaseStatus, str]:
    return outcome.status, outcome.reason


def test_an_undeclared_size_of_0_may_be_refused() -> None:
    assert raises(judged(made(refuses_empty, empty=False), "empty:mm-f32-0x5x7")) == (CaseStatus.REFUSED, "ValueError: no rows")
    assert raises(judged(made(refuses_empty), "empty:mm-f32-0x5x7")) == (CaseStatus.RAISED, "ValueError: no rows")


@pytest.mark.parametrize("a", ["cols0", "window"])
def test_probes_fall_back_to_integers_if_strides_fix_elements(a: str) -> None:
    for name in ("one-hot-a", "width", "cancellation"):
        case_id = f"{name}:mm-f32-33x40x65-a.{a}"
        assert judged(made(), case_id).status is CaseStatus.PASSED
        assert judged(made(lambda x, y: x @ y + 1), case_id).failures[0].message.startswith("integers: out[0, 0] = ")
