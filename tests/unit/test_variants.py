"""Variants of the fastest kernels: selection, limits, and no measurement in a second run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_choices import CLAIMS, PROBLEM

from gemmtune import settings
from gemmtune.choice import Choice, Kernel, Offers, Status
from gemmtune.device import detect
from gemmtune.selector import offers as offers_module
from gemmtune.selector.candidates import candidates_for
from gemmtune.selector.offers import known_variants, untried_variants
from gemmtune.selector.progress import Progress
from gemmtune.selector.result import Outcome, ProblemResult
from gemmtune.selector.samples import Ranking, Sample
from gemmtune.selector.select import select
from gemmtune.settings import Settings
from gemmtune.store.store import open_store
from gemmtune.timing.rounds import Ranked

DEVICE = detect("cpu")
X, Y = range(4), range(3)


@dataclass(frozen=True, kw_only=True)
class Point(Choice):
    """A kernel with two arguments; its variants differ in one of them."""

    kernel: str
    x: int = 0
    y: int = 0

    @property
    def content_hash(self) -> str:
        return f"{self.kernel} {self.x} {self.y}"

    @property
    def compile_key(self) -> str:
        return self.kernel

    @property
    def compiled(self) -> bool:
        return True

    def launch_variants(self) -> list[Choice]:
        return [point(self.kernel, x, y) for x in X for y in Y if (x == self.x) != (y == self.y)]

    def bind(self, loaded: object) -> Kernel:
        return Kernel(run=lambda out, tensors, scalars: torch.mm(*tensors, out=out))


def point(kernel: str, x: int = 0, y: int = 0) -> Point:
    return Point(name=f"cutlass:{kernel}_x{x}_y{y}", backend="cutlass", problem=PROBLEM, claims=CLAIMS, kernel=kernel, x=x, y=y)


def outcome(choice: Choice, time_us: float | None, status: Status = Status.OK) -> Outcome:
    return Outcome(name=choice.name, backend=choice.backend, content_hash=choice.content_hash, status=status, time_us=time_us)


def untried(times: dict[Point, float | None], **changes: object) -> list[str]:
    choices = {c.content_hash: c for c in times}
    outcomes = {c.content_hash: outcome(c, t, Status.OK if t else Status.WRONG_RESULT) for c, t in times.items()}
    return [c.content_hash for c in untried_variants(choices, outcomes, Settings(**changes))]  # type: ignore[arg-type]


def test_variants_follow_the_order_of_their_kernels() -> None:
    found = untried({point("slow"): 12.0, point("far"): 20.0, point("fast"): 10.0})
    assert found[:5] == ["fast 0 1", "fast 0 2", "fast 1 0", "fast 2 0", "fast 3 0"]
    assert [name.split()[0] for name in found] == ["fast"] * 5 + ["slow"] * 5


def test_a_kernel_counts_once_at_its_fastest_point() -> None:
    assert untried({point("k"): 12.0, point("k", 2): 10.0, point("k", 1): 11.0, point("k", 3): 13.0}) == ["k 2 1", "k 2 2"]


@pytest.mark.parametrize(("search", "kernels"), [("quick", 1), ("default", 3), ("exhaustive", 8)])
def test_search_effort_limits_the_kernels_with_variants(search: str, kernels: int) -> None:
    found = untried({point(f"k{i}"): 10.0 for i in range(9)}, search=search)
    assert len({name.split()[0] for name in found}) == kernels


def test_a_wrong_kernel_has_no_variants() -> None:
    assert untried({point("wrong"): None, point("right"): 10.0})[0].startswith("right")
    assert untried({point("wrong"): None}) == []


def test_skips_choices_without_variants_or_compilation() -> None:
    assert Choice.launch_variants(point("k")) == ()


def test_regexes_apply_to_variants() -> None:
    assert untried({point("k"): 10.0}, choice_denylist_regex="y[12]$") == ["k 1 0", "k 2 0", "k 3 0"]
    assert untried({point("k"): 10.0}, cutlass_op_allowlist_regex="x2") == ["k 2 0"]


def test_the_cap_counts_tried_choices() -> None:
    assert len(untried({point("k"): 10.0, point("l"): 11.0}, max_profiling_configs=4)) == 2
    assert untried({point("k"): 10.0, point("l"): 11.0}, max_profiling_configs=2) == []


def test_known_variants_are_found_through_their_origins() -> None:
    wanted = {"k 2 0", "k 2 1", "k 3 2"}
    assert set(known_variants([point("k")], wanted, Settings())) == {"k 2 0", "k 2 1"}
    assert set(known_variants([point("k")], wanted, Settings(choice_denylist_regex="y1$", max_profiling_configs=1))) == {"k 2 0"}
    assert known_variants([point("k")], set(), Settings()) == {}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Tune one offered point of each of two kernels, and list the names that each run examined."""
    monkeypatch.setattr(offers_module, "legal_offers", lambda *_, **__: Offers(choices=(point("k"), point("l"))))
    runs: list[list[str]] = []
    monkeypatch.setattr("gemmtune.selector.measure.open_session", lambda *_: FakeSession(runs))
    with settings.patch(cache_dir=str(tmp_path), tune_in_subprocess=False):
        yield runs


class FakeSession:
    """Session in which kernel k is fastest at x = 2, y = 1, and kernel l is too slow for variants."""

    def __init__(self, runs: list[list[str]]) -> None:
        self.examined: list[str] = []
        runs.append(self.examined)

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def time_us(self, choice: Point) -> float:
        return 200.0 if choice.kernel == "l" else 100.0 + 5 * (choice.x - 2) ** 2 + 3 * (choice.y - 1) ** 2

    def examine(self, choice: Point, best_us: float | None) -> Sample:
        self.examined.append(choice.content_hash)
        return Sample(status=Status.OK, time_us=self.time_us(choice))

    def recheck(self, choices: list[Point]) -> dict[str, Sample]:
        return {}

    def limits(self, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
        return {}, ""

    def rank(self, choices: list[Point]) -> Ranking:
        return Ranking(times={c.name: Ranked(time_us=self.time_us(c), margin_us=0.1) for c in choices})


def run() -> ProblemResult:
    chosen = settings.current()
    return select(candidates_for(PROBLEM, DEVICE, chosen), Progress())[1]


def test_a_winning_variant_adds_variants_and_a_second_run_measures_nothing(tuned: list[list[str]]) -> None:
    first = run()
    assert first.pick == "cutlass:k_x2_y1"
    [examined] = tuned
    assert examined[:2] == ["k 0 0", "l 0 0"]
    assert "k 2 1" in examined
    assert not any(name.startswith("l") for name in examined[2:])
    second = run()
    assert (second.pick, second.source) == (first.pick, "store")
    assert len(tuned) == 1
    assert {o.name for o in second.outcomes} == {o.name for o in first.outcomes}


def test_an_interrupted_tuning_is_completed(tuned: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    examine = FakeSession.examine

    def interrupted(self: FakeSession, choice: Point, best_us: float | None) -> object:
        if len(self.examined) == 4:
            raise KeyboardInterrupt
        return examine(self, choice, best_us)

    monkeypatch.setattr(FakeSession, "examine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(FakeSession, "examine", examine)
    assert run().pick == "cutlass:k_x2_y1"
    assert not set(tuned[0]) & set(tuned[1]) - {"k 1 0", "k 2 0", "k 0 1", "k 0 2", "k 0 0"}
    assert run().source == "store"


def test_a_regex_can_exclude_the_pick(tuned: list[list[str]]) -> None:
    run()
    chosen = dataclasses.replace(settings.current(), choice_denylist_regex="x2")
    known = candidates_for(PROBLEM, DEVICE, chosen).stored(open_store(chosen)).known
    assert known
    assert not any("x2" in o.name for o in known.values())
