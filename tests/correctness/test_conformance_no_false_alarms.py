"""Tests of the suite itself: right but unusual GEMMs pass everything that they declare."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from mutants.table import RIGHT, Right
from mutants.trial import cases_of
from rotation import rotated

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import InProcessRunner

SEEDS, PARTS = 200, 20
"""Number of seeds, and of parts. Each commit takes one part."""
MOST_WORK = 2**17
"""Maximum multiplications of a case. Small cases allow many."""
REPEATING = ("repeatability", "determinism", "threads")
"""Properties whose cases call the GEMM dozens of times. Fewer of their cases are tested."""
EVERY = 40


def sampled(cases: Mapping[str, Iterator[Case]], seeds: Sequence[int]) -> list[Case]:
    """Return a case for each seed, alternating between properties. Only the properties reached are enumerated to the end."""
    first = {name: case for name in cases if (case := next(cases[name], None))}
    common = [name for name in first if name not in REPEATING]
    rare = [name for name in first if name in REPEATING]
    names = [rare[seed // EVERY % len(rare)] if rare and seed % EVERY == 0 else common[seed % len(common)] for seed in range(SEEDS)]
    known = {name: [first[name], *cases[name]] for name in {names[seed] for seed in seeds}}
    return [random.Random(seed).choice(known[names[seed]]).changed(seed=seed) for seed in seeds]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.name)
def test_right_gemm_passes(right: Right) -> None:
    runner = InProcessRunner(right.spec, "cpu")
    traits = runner.describe().traits
    offered = {judging.name: cases_of(judging, traits, "cpu", (Level.SMOKE,)) for judging in PROPERTIES}
    small = {name: filter(lambda c: c.batch * c.m * c.n * c.k <= MOST_WORK, cases) for name, cases in offered.items()}
    share = SEEDS // PARTS
    shares = rotated([range(begin, begin + share) for begin in range(0, SEEDS, share)], PARTS, right.name)
    seeds = [seed for part in shares for seed in part]
    outcomes = [runner.run(case) for case in sampled(small, seeds)]
    wrong = [f"{x.case.id}: {x.status}: {x.reason} {x.failures}" for x in outcomes if x.status is not CaseStatus.PASSED]
    assert len(outcomes) == len(seeds) >= share
    assert not wrong, "\n".join(wrong)


def test_right_gemms_have_distinct_names() -> None:
    assert len({right.target for right in RIGHT}) == len(RIGHT) >= 20
