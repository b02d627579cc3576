"""The search along the axes of a few parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_choices import CLAIMS, PROBLEM, Fake, fake

from gemmtune import settings
from gemmtune.choice import Choice, Offers, Status
from gemmtune.device import DeviceInfo, detect
from gemmtune.effort import EFFORT
from gemmtune.errors import GemmtuneError
from gemmtune.selector import axes
from gemmtune.selector import measure as measure_module
from gemmtune.selector import offers as offers_module
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.progress import Progress
from gemmtune.selector.result import MOVED
from gemmtune.selector.samples import Ranking, Sample
from gemmtune.selector.select import select
from gemmtune.sparse import minimize
from gemmtune.store.store import open_store
from gemmtune.timing.rounds import Ranked


def step(name: str, value: int, direction: int, _: Mapping[str, int]) -> int:
    """Step through powers of two up to 64 for warps, and whole numbers from 1 to 9 for the rest."""
    if name == "warps":
        return min(max(int(value * 2.0**direction), 1), 64)
    return min(max(value + direction, 1), 9)


def bowl(p: Mapping[str, int]) -> float:
    return 1.0 + (p["stages"] - 6) ** 2 + (p["warps"].bit_length() - 4) ** 2


def test_finds_the_minimum_and_evaluates_no_point_twice() -> None:
    asked: list[tuple[int, int]] = []

    def target(p: dict[str, int]) -> float:
        asked.append((p["stages"], p["warps"]))
        return bowl(p)

    found = minimize(target, {"stages": 1, "warps": 1}, step)
    assert found.parameters == {"stages": 6, "warps": 8}
    assert found.value == 1.0
    assert found.speedup == 35.0
    assert len(asked) == len(set(asked)) == len(found.tried)
    assert found.slopes == {"stages": 2.0, "warps": 2.0}


def test_two_steps_cross_a_ridge() -> None:
    values = {1: 5.0, 2: 9.0, 3: 1.0}
    assert minimize(lambda p: values.get(p["x"], 9.0), {"x": 1}, step).parameters == {"x": 3}
    assert minimize(lambda p: values.get(p["x"], 9.0), {"x": 1}, step, max_step=1).parameters == {"x": 1}
    diagonal = {(1, 1): 5.0, (2, 2): 1.0}
    assert minimize(lambda p: diagonal.get((p["x"], p["y"]), 9.0), {"x": 1, "y": 1}, step).parameters == {"x": 2, "y": 2}


def test_ties_go_to_the_start_or_the_smallest() -> None:
    assert minimize(lambda p: 1.0 - 1e-5 * p["x"], {"x": 2}, step).parameters == {"x": 2}
    assert minimize(lambda p: 9.0 if p["x"] == 5 else 1.0 - 1e-5 * p["x"], {"x": 5}, step).parameters["x"] < 5


def test_failures_are_reported_and_the_reference_is_the_fallback() -> None:
    def target(p: dict[str, int]) -> float:
        if p["x"] > 4:
            raise RuntimeError("out of shared memory")
        return float(10 - p["x"])

    found = minimize(target, {"x": 8}, step, reference={"x": 2})
    assert found.parameters == {"x": 4}
    assert found.speedup == 8 / 6
    assert found.tried[(8,)] == "RuntimeError: out of shared memory"
    with pytest.raises(GemmtuneError, match="neither start has a value: RuntimeError: out of shared memory"):
        minimize(target, {"x": 8}, step)
    for value in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(GemmtuneError, match=f"got {value}, expected a finite positive number"):
            minimize(lambda _, value=value: value, {"x": 8}, step)
    with pytest.raises(GemmtuneError, match="noise: got -1"):
        minimize(target, {"x": 2}, step, noise=-1)
    with pytest.raises(GemmtuneError, match="and a reference with"):
        minimize(target, {"x": 8}, step, reference={"y": 1})


def test_the_result_is_never_worse_than_the_reference() -> None:
    values = {1: 4.0, 2: 5.0, 3: 6.0, 9: 3.0}
    found = minimize(lambda p: values.get(p["x"], 7.0), {"x": 1}, step, reference={"x": 9})
    assert (found.parameters, found.value, found.speedup) == ({"x": 9}, 3.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Deep(Fake):
    """A choice with two axes, whose time is a bowl; deep ones are not legal."""

    stages: int = 1
    warps: int = 1

    @property
    def axes(self) -> Mapping[str, Sequence[int]]:
        return {"stages": range(1, 10), "warps": (1, 2, 4, 8, 16, 32, 64)}

    @property
    def parameters(self) -> Mapping[str, int]:
        return {"stages": self.stages, "warps": self.warps}

    def moved(self, parameters: Mapping[str, int], device: DeviceInfo) -> Choice | str:
        return "too deep" if parameters["stages"] > 7 else deep(**parameters)


def deep(stages: int, warps: int) -> Deep:
    return Deep(name=f"triton:s{stages}_w{warps}", backend="triton", problem=PROBLEM, claims=CLAIMS, stages=stages, warps=warps)


class TimedSession:
    """Session that measures by ``bowl``, and 9 µs for plain choices."""

    def __init__(self, *_: object) -> None:
        self.examined: list[str] = []

    def __enter__(self) -> TimedSession:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def examine(self, choice: Choice, best_us: float | None) -> Sample:
        self.examined.append(choice.name)
        return Sample(status=Status.OK, time_us=self.time(choice))

    def recheck(self, choices: Sequence[Choice]) -> dict[str, Sample]:
        return {}

    def limits(self, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
        return {}, ""

    def rank(self, choices: Sequence[Choice], rounds_s: float | None = None) -> Ranking:
        return Ranking(times={c.name: Ranked(time_us=self.time(c), margin_us=0.0, spread=0.0) for c in choices})

    @staticmethod
    def time(choice: Choice) -> float:
        return bowl(choice.parameters) if isinstance(choice, Deep) else 9.0


@pytest.mark.parametrize(("search", "picked", "points"), [("quick", "fake:plain", 2), ("exhaustive", "triton:s6_w8", 0)])
def test_tuning_searches_axes_and_reuses_stored_points(
    search: str, picked: str, points: int, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Offers(choices=(fake("plain", baseline=True), deep(3, 4)))
    monkeypatch.setattr(offers_module, "legal_offers", lambda *_, **__: offered)
    session = TimedSession()
    monkeypatch.setattr(measure_module, "open_session", lambda *_: session)
    chosen = dataclasses.replace(settings.current(), search=search)  # type: ignore[arg-type]
    candidates = candidates_for(PROBLEM, detect("cpu"), chosen)
    found, result = select(candidates, open_store(chosen), Progress())
    pick = found.picked
    assert pick is not None
    assert pick.name == picked
    assert len(session.examined) == len(set(session.examined))
    assert len(session.examined) == points or search == "exhaustive"
    points = len(session.examined)
    again, known = select(candidates_for(PROBLEM, detect("cpu"), chosen), open_store(chosen), Progress())
    assert again.picked == pick
    assert (known.source, len(session.examined)) == ("store", points)
    ours = [o for o in known.outcomes if o.backend == "triton"]
    assert min(o.time_us or 0 for o in ours) <= bowl({"stages": 3, "warps": 4})
    assert result.pick == picked


def test_only_identical_moved_kernels_are_found_again() -> None:
    def row(way_from: Choice, stages: int, warps: int, content_hash: str = "") -> tuple[str, Any]:
        digest = content_hash or deep(stages, warps).content_hash
        return digest, SimpleNamespace(info={MOVED: {"from": way_from.content_hash, "stages": stages, "warps": warps}})

    origin = deep(2, 2)
    rows = dict((
        row(deep(4, 4), 5, 4), row(origin, 4, 4), row(origin, 3, 2, "of an older source"), row(origin, 8, 2), row(deep(1, 1), 1, 2),
        (origin.content_hash, SimpleNamespace(info={})),
    ))  # fmt: skip
    known = {origin.content_hash: origin}

    def moved(**fields: Any) -> list[str]:
        return list(offers_module.moved_choices(known, rows, detect("cpu"), settings.Settings(**fields)))

    assert moved() == ["fake-triton:s4_w4", "fake-triton:s5_w4"], "the second one from the first"
    assert moved(choice_denylist_regex="s4") == ["fake-triton:s5_w4"]
    known |= {deep(4, 4).content_hash: deep(4, 4)}
    assert moved() == ["fake-triton:s5_w4"], "what is known already is not made again"


@pytest.mark.parametrize(
    ("value", "direction", "there"), [(4, 1, 8), (4, -1, 2), (4, 2, 16), (1, -1, 1), (64, 2, 64), (3, 1, 4), (3, -1, 2)]
)
def test_a_step_stops_at_the_ends_of_its_axis(value: int, direction: int, there: int) -> None:
    chosen = settings.Settings()
    walk = axes._Walk(deep(1, 1), candidates_for(PROBLEM, detect("cpu"), chosen), {}, lambda *_: None, lambda _: None)  # type: ignore[arg-type,return-value]
    assert walk.step("warps", value, direction, {}) == there


def test_a_search_keeps_its_budget_and_compiles_neighbours_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deep, "compiled", property(lambda self: self.stages < 3), raising=False)
    chosen = settings.Settings()
    monkeypatch.setattr(axes, "EFFORT", {chosen.search: dataclasses.replace(EFFORT[chosen.search], axis_points=3)})
    tried, compiled = [], []

    def try_one(choice: Choice, _: Choice) -> Sample:
        tried.append(choice.name)
        return Sample(status=Status.OK, time_us=1.0)

    walk = axes._Walk(deep(1, 1), candidates_for(PROBLEM, detect("cpu"), chosen), {}, try_one, compiled.append)  # type: ignore[arg-type]
    for stages in (2, 3, 4):
        walk.time_us({"stages": stages, "warps": 1})
        assert bool(compiled) == (stages > 2)
    with pytest.raises(GemmtuneError, match="the search has used up its points"):
        walk.time_us({"stages": 5, "warps": 1})
    assert tried == ["triton:s2_w1", "triton:s3_w1", "triton:s4_w1"]
    assert all(len(wanted) <= 3 for wanted in compiled)
