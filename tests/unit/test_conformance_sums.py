"""The conformance suite on mm_plus_mm: cases, calls of a GEMM, error bounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from adapters.torch_ops import sums

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.cases.statement import problem_of
from gemmtune.conformance.properties.table import property_named
from gemmtune.declaration.subject import Call, FunctionSubject, NamespaceSubject
from gemmtune.declaration.traits import Traits
from gemmtune.errors import CaseError
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem

CASE = Case(property_name="integers", op="mm_plus_mm", dtype="float16", m=17, n=33, k=20, k2="45", a="col+1")
SCOPE = Scope(traits=sums.gemm_traits)


def test_an_id_has_k2_if_it_differs_from_k() -> None:
    assert CASE.id == "integers:mm_plus_mm-f16-17x33x20-a.col+1-k2.45"
    assert Case.parse(CASE.id) == CASE
    assert (CASE.summed, CASE.changed(k2="").summed, CASE.changed(op="mm", k2="").summed) == ((20, 45), (20, 20), (20,))


@pytest.mark.parametrize(("op", "k2"), [("mm", "45"), ("mm_plus_mm", "-3"), ("mm_plus_mm", "x")])
def test_rejects_an_illegal_k2(op: str, k2: str) -> None:
    with pytest.raises(CaseError, match=f"k2: got '{k2}' for {op}, expected a whole number, and the operation mm_plus_mm"):
        CASE.changed(op=op, k2=k2)


def test_c_and_d_have_separate_strides_if_k2_differs_from_k() -> None:
    problem, alike = problem_of(CASE, "cpu"), problem_of(CASE.changed(k2=""), "cpu")
    assert (problem.op, problem.summed, alike.summed) == ("mm_plus_mm", (20, 45), (20, 20))
    assert [(x.size, x.stride) for x in (alike.c, alike.d)] == [((17, 20), (1, 18)), ((20, 33), (33, 1))]  # as a and b
    assert [(x.size, x.stride) for x in (problem.c, problem.d)] == [((17, 45), (45, 1)), ((45, 33), (1, 46))]  # as b and a


def test_cases_have_longer_shorter_and_equal_second_products() -> None:
    cases = list(property_named("integers").cases(SCOPE))
    assert {c.op for c in cases} == {"mm_plus_mm"}
    lengths = {(k2 > k) - (k2 < k) for k, k2 in (c.summed for c in cases)}
    assert lengths == {-1, 0, 1}
    empty = {tuple(bool(k) for k in c.summed) for c in property_named("k-zero").cases(SCOPE)}
    assert empty == {(False, False), (False, True), (True, False)}
    multiples = Scope(traits=sums.gemm_traits.changed({"multiples": (1, 1, 8), "least": (1, 1, 8)}), level=Level.FULL)
    assert all(k % 8 == 0 and k >= 8 for c in property_named("integers").cases(multiples) for k in c.summed)


def test_functions_and_namespaces_get_four_operands() -> None:
    problem = Problem.mm_plus_mm(5, 6, 7, 3, dtype=torch.float32, device_type="cpu")
    x = random_operands(problem, torch.device("cpu"), seed=0)
    expected = x.a @ x.b + x.c @ x.d

    def mm_plus_mm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return a @ b + c @ d

    function = FunctionSubject("f", mm_plus_mm, Traits())
    assert function.traits.ops == ("mm_plus_mm",)
    for subject in (function, NamespaceSubject("n", sums, sums.gemm_traits)):
        assert torch.allclose(subject(Call(problem=problem, tensors=x.tensors)), expected, atol=1e-5)


def test_an_undeclared_addmm_takes_three_operands() -> None:
    def addmm(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return inp + a @ b

    def of_two(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return a @ b if bias is None else a @ b + bias

    of_two.__name__ = "addmm"
    for function, op in ((addmm, "addmm"), (torch.addmm, "addmm"), (torch.mm, "mm"), (of_two, "mm")):
        assert FunctionSubject("f", function, Traits()).traits.ops == (op,)


def test_a_function_without_the_keyword_of_the_added_operand_gets_it_first() -> None:
    def in_order(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float) -> torch.Tensor:
        return beta * inp + a @ b

    def by_keyword(a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor, beta: float) -> torch.Tensor:
        return beta * bias + a @ b

    problem = Problem.addmm(3, 5, 4, dtype=torch.float32, device_type="cpu", beta=2.0)
    inp, a, b = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    for function in (in_order, by_keyword):
        subject = FunctionSubject("f", function, Traits(ops=("addmm",), beta=True))
        result = subject(Call(problem=problem, tensors=(a, b, inp), scalars=(1.0, 2.0)))
        assert torch.allclose(result, torch.addmm(inp, a, b, beta=2), atol=1e-5)


def test_one_product_may_be_rounded_unless_wider_partials_are_declared() -> None:
    problem = problem_of(CASE, "cpu")
    claims = Traits(splits=3).claims(problem)
    assert (claims.partials, claims.splits) == (torch.float16, 6)
    assert Traits(partials={"float16": "float32"}).claims(problem).partials == torch.float32
    one = dataclasses.replace(problem, op="mm", c=None, d=None)
    assert Traits().claims(one).partials == torch.float32
