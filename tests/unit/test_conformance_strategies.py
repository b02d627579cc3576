"""Drawn cases: within the scope, of the right property, and simple after shrinking."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from rotation import rotated

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.properties.table import PROPERTIES, property_named
from gemmtune.conformance.suite.drawing import cases, layouts
from gemmtune.declaration.traits import Traits

SCOPES = {
    "plain function": Scope(traits=Traits(ops=("mm",))),
    "everything": Scope(traits=Traits(ops=("mm", "addmm", "bmm", "baddbmm"), out=True, alpha=True, beta=True, empty=True)),
    "narrow": Scope(
        traits=Traits(ops=("mm",), dtypes=("float16",), layouts=("row", "padded"), min_alignment=16, multiples=(16, 8, 8))
    ),
}
QUICK = hypothesis.settings(
    max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
DRAWN = [p.name for p in PROPERTIES if p.drawn]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    "scope", [SCOPES[name] for name in rotated(list(SCOPES), 2, "drawn")], ids=rotated(list(SCOPES), 2, "drawn")
)
def test_drawn_cases_are_of_the_property_and_within_the_scope(name: str, scope: Scope) -> None:
    wanted = property_named(name)
    if wanted.needs(scope) is not None or not any(True for _ in wanted.cases(scope)):
        return
    seen: set[Case] = set()

    @QUICK
    @hypothesis.given(cases(wanted, scope))
    def check(case: Case) -> None:
        assert case.property_name == name
        assert scope.allows(case)
        assert Case.parse(case.id) == case
        seen.add(case)

    check()
    assert len(seen) >= 10


@pytest.mark.turn(4, 8)
def test_a_case_shrinks_to_the_smallest_and_simplest() -> None:
    smallest = hypothesis.find(cases(property_named("bound"), SCOPES["plain function"]), lambda case: case.k > 40, settings=QUICK)
    assert (smallest.m, smallest.n, smallest.a, smallest.b, smallest.seed) == (1, 1, "row", "row", 0)
    assert smallest.k <= 63


@QUICK
@hypothesis.given(st.data(), st.sampled_from(list(SCOPES)), st.booleans())
def test_drawn_layouts_have_kinds_of_the_scope(data: st.DataObject, name: str, batched: bool) -> None:
    text = data.draw(layouts(SCOPES[name], batched=batched))
    assert Case(property_name="bound", op="bmm", m=3, n=4, k=5, a=text).kinds <= set(SCOPES[name].tested_kinds)
