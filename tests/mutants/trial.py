"""Trial of a mutant: its cases, and the outcomes that reject it."""

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
    """Yield the property's cases of these levels, each once. Yield none if the property is not tested."""
    seen: set[Case] = set()
    for level in levels:
        scope = Scope(traits=traits, device_type=device_type, level=level)
        if judging.needs(scope) is None:
            for case in judging.cases(scope):
                if case not in seen:
                    seen.add(case)
                    yield case


def rejections(runner: Runner, cases: Iterator[Case], *, most: int) -> Iterator[Outcome]:
    """Yield the bad outcomes among the first ``most`` cases, or the first bad one after them."""
    found = False
    for number, case in enumerate(cases):
        if found and number >= most:
            return
        outcome = runner.run(case)
        if outcome.status.bad:
            found = True
            yield outcome


def convicted(mutant: Mutant, runner: Runner, *, most: int = 200) -> tuple[Outcome, ...]:
    """Return the bad outcomes for the property that must reject a mutant, up to the first with its diagnosis.

    An empty result means that the mutant survives.
    """
    description = runner.describe()
    device_type = "cuda" if description.sm else "cpu"
    cases = cases_of(property_named(mutant.killed_by), description.traits, device_type, (Level.SMOKE, Level.FULL))
    outcomes: list[Outcome] = []
    for outcome in rejections(runner, cases, most=most):
        outcomes.append(outcome)
        if any(mutant.diagnosis in failure.diagnosis for failure in outcome.failures):
            break
    return tuple(outcomes)
