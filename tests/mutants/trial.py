"""Bringing a mutant before a property."""

from __future__ import annotations

from collections.abc import Iterator

from gemmtune.conformance.bench.outcome import Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.properties.property import Property
from gemmtune.conformance.properties.table import property_named
from gemmtune.conformance.runs.isolation import Runner
from gemmtune.declaration.traits import Traits

from .table import Mutant

__all__ = ["cases_of", "convicted", "rejections"]


def cases_of(judging: Property, traits: Traits, device_type: str, levels: tuple[Level, ...]) -> Iterator[Case]:
    """The property's cases of these levels one after the other, none twice; none where the property is not tested."""
    seen: set[Case] = set()
    for level in levels:
        scope = Scope(traits=traits, device_type=device_type, level=level)
        if judging.needs(scope) is None:
            for case in judging.cases(scope):
                if case not in seen:
                    seen.add(case)
                    yield case


def rejections(runner: Runner, cases: Iterator[Case], *, most: int) -> Iterator[Outcome]:
    """The bad outcomes among the first ``most`` cases and all further ones up to the first bad one."""
    found = False
    for number, case in enumerate(cases):
        if found and number >= most:
            return
        outcome = runner.run(case)
        if outcome.verdict.bad:
            found = True
            yield outcome


def convicted(mutant: Mutant, runner: Runner, *, most: int = 200) -> tuple[Outcome, ...]:
    """The bad outcomes of the property that must reject a mutant, up to one that has its diagnosis. Empty: it survives."""
    description = runner.describe()
    device_type = "cuda" if description.sm else "cpu"
    cases = cases_of(property_named(mutant.killed_by), description.traits, device_type, (Level.SMOKE, Level.FULL))
    outcomes: list[Outcome] = []
    for outcome in rejections(runner, cases, most=most):
        outcomes.append(outcome)
        if any(mutant.diagnosis in failure.diagnosis for failure in outcome.failures):
            break
    return tuple(outcomes)
