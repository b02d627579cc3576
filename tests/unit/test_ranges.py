"""Ranges of M, from tuning to calls, over choices whose times are a function of M."""

from __future__ import annotations

import dataclasses
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_choices import CLAIMS, RUNS, Fake
from fixed_backend import install

import gemmtune
from gemmtune import cli, settings
from gemmtune.choice import Availability, Choice, Kernel, Offers, Status
from gemmtune.device import DeviceInfo, detect
from gemmtune.dispatch import absent, strategies
from gemmtune.dispatch import ready as plans
from gemmtune.dispatch.asked import ASKED, asked_rows, save_asked
from gemmtune.dispatch.ready import forget_plans, plan_for
from gemmtune.errors import InvalidProblemError, NoValidChoicesError
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector import offers, ranges, session
from gemmtune.selector.crossover import sampled_rows
from gemmtune.selector.machine_limits import MachineLimits
from gemmtune.selector.progress import Progress
from gemmtune.selector.proof import legal_runs
from gemmtune.selector.result import ProblemResult
from gemmtune.selector.samples import Ranking, Sample
from gemmtune.selector.segments import TABLE
from gemmtune.selector.session import Session
from gemmtune.selector.stored_tables import stored_table
from gemmtune.settings import Settings
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Ranged, open_store
from gemmtune.timing.rounds import Ranked

N, K = 24, 16
W = torch.randn(N, K).t()


def problem(m: int, **options: object) -> Problem:
    return Problem.mm(m, N, K, dtype=torch.float32, device_type="cpu", **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Rowed(Fake):
    """A choice for every M from ``lo`` to ``hi``, with wrong results at ``wrong_at``."""

    lo: int = 1
    hi: int = 2**31
    wrong_at: int = 0
    varies: bool = False

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        if not self.lo <= problem.m <= self.hi:
            return f"{self.name}: m = {problem.m} is beyond {self.lo}..{self.hi}"
        return made(self.name.removeprefix("fake:"), problem)

    @property
    def batch_invariant(self) -> bool:
        return not self.baseline and not self.varies

    @property
    def compile_key(self) -> str | None:
        return self.name if VARIANTS else None

    @property
    def compiled(self) -> bool:
        return True

    def launch_variants(self) -> list[Choice]:
        return [made(kind, self.problem) for kind in VARIANTS.get(self.name.removeprefix("fake:"), ())]

    def bind(self, loaded: object) -> Kernel:
        return Kernel(run=RUNS["wrong" if self.problem.m == self.wrong_at else "multiply"])


KINDS: dict[str, dict[str, int]] = {
    "torch": {}, "low": {}, "high": {}, "raster": {},
    "narrow": {"lo": 6, "hi": 10}, "bad": {"wrong_at": 33}, "loose": {"varies": True},
}  # fmt: skip


VARIANTS: dict[str, tuple[str, ...]] = {}
"""Kinds that are launch variants of another kind."""


def made(kind: str, problem: Problem) -> Rowed:
    return Rowed(name=f"fake:{kind}", backend="triton", problem=problem, claims=CLAIMS, baseline=kind == "torch", **KINDS[kind])


class RowedBackend:
    """Backend that offers ``kinds`` where they are legal."""

    name = "triton"

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    def available(self, device: DeviceInfo) -> Availability:
        return Availability(ok=True, detail="always")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        offered = (made(kind, problem) for kind in self.kinds)
        return Offers(choices=tuple(c for c in offered if c.lo <= problem.m <= c.hi))


CROSSING = 20
TIMES_US: dict[str, Callable[[int], float]] = {
    "fake:torch": lambda m: 100.0,
    "aten:mm": lambda m: 100.0,
    "fake:low": lambda m: 10.0 if m < CROSSING else 50.0,
    "fake:high": lambda m: 40.0 if m < CROSSING else 20.0,
    "fake:narrow": lambda m: 5.0,
    "fake:raster": lambda m: 4.0,
    "fake:loose": lambda m: 7.0,
    "fake:bad": lambda m: 1.0,
}


def untimed(monkeypatch: pytest.MonkeyPatch, time_us: Callable[[str, int], float]) -> None:
    """Replace times by a function of the choice's name and M."""

    def rank(self: Session, choices: list[Choice], rounds_s: float | None = None) -> Ranking:
        return Ranking(times={c.name: Ranked(time_us=time_us(c.name, c.problem.m), margin_us=0.0) for c in choices})

    monkeypatch.setattr(Session, "rank", rank)
    monkeypatch.setattr(session, "short_measurement", lambda contender, best_us: 1.0)
    monkeypatch.setattr(session, "Timer", lambda *_, **__: types.SimpleNamespace(contender=lambda choice, kernel: None))
    monkeypatch.setattr(Session, "recheck", lambda *_: {})
    monkeypatch.setattr(MachineLimits, "ensure", lambda *_, **__: None)
    monkeypatch.setattr(MachineLimits, "too_fast", lambda *_: {})


@pytest.fixture
def backend(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RowedBackend]:
    forget_plans()
    backend = RowedBackend(("torch", "low", "high"))
    install(monkeypatch, backend)  # type: ignore[arg-type]

    untimed(monkeypatch, lambda name, m: TIMES_US.get(name, TIMES_US["aten:mm"])(m))
    with settings.patch(rows="shared"):
        yield backend
    forget_plans()


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the Ms that calls tune."""
    found: list[int] = []
    original = strategies.select

    def select(candidates, *args, **kwargs):
        found.append(candidates.problem.m)
        return original(candidates, *args, **kwargs)

    monkeypatch.setattr(strategies, "select", select)
    return found


def tuned(rows: range = range(1, 65)) -> gemmtune.selector.range_result.RangeResult:
    (result,) = gemmtune.tune(problem(2), m=rows, progress=False)
    return result


def intervals(result: gemmtune.selector.range_result.RangeResult) -> list[tuple[int, int, str]]:
    return [(x.lo, x.hi, x.name.removeprefix("fake:")) for x in result.table.segments]


def call(m: int) -> str:
    """Return the name of the choice that a call runs, after a check of its result."""
    a = torch.randn(m, K)
    torch.testing.assert_close(gemmtune.mm(a, W), a @ W)
    return plan_for(problem(m), -1).choice.name


def test_splits_a_range_at_the_crossover(backend: RowedBackend):
    result = tuned()
    assert intervals(result) == [(1, CROSSING - 1, "low"), (CROSSING, 64, "high")]
    assert result.source == "measured"
    assert 0 < result.seconds < 60
    low, high = result.table.segments
    assert {1, CROSSING - 1} <= set(low.checked)
    assert {CROSSING, 64} <= set(high.checked)
    assert "1..19" in str(result)


@pytest.mark.parametrize("stalls", [1, 2, 9])
def test_an_m_that_other_work_stalls_has_no_slow_pick(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch, stalls: int):
    """On a busy CPU all choices took a time slice of 4 ms at M = 4, torch 3 ms, between Ms of 25 µs."""
    left = [stalls * 3]

    def time_us(name: str, m: int) -> float:
        if m == 4 and left[0] > 0:
            left[0] -= 1
            return 3000.0 if name == "fake:torch" else 4000.0
        return TIMES_US[name](m)

    untimed(monkeypatch, time_us)
    assert intervals(tuned()) == [(1, CROSSING - 1, "low"), (CROSSING, 64, "high")]
    assert (left[0] <= 0) is (stalls < 3)


class Told(Progress):
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def begin(self, problem: Problem, total_problems: int) -> None:
        self.events.append(("begin", problem.m, total_problems))

    def stage(self, name: str, done: int, total: int) -> None:
        if name not in ("compile", "verify and measure", "final rounds"):
            self.events.append((name, done, total))

    def end(self, result: ProblemResult) -> None:
        self.events.append(("end", result.problem.m))


def test_progress_reports_every_stage(backend: RowedBackend):
    listener = Told()
    (result,) = gemmtune.tune(problem(2), m=range(1, 65), progress=listener)
    tuned = [x.problem.m for x in result.tuned_results]
    between = [m for m in sampled_rows(range(1, 65), lambda m: True) if m not in tuned]
    assert tuned == [1, 8, 64]
    assert listener.events == [
        *(event for m in tuned for event in (("begin", m, len(tuned)), ("end", m))),
        *(("sampled M", i, len(between)) for i in range(len(between) + 1)),
        ("crossovers", 0, 1), ("prove", 0, 2), ("prove", 2, 2),
    ]  # fmt: skip


def test_a_single_choice_is_not_compared_and_a_cpu_compiles_on_demand(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    ahead: list[int] = []

    class Spy(ranges.Compilation):
        def __init__(self, choices: Iterable[Choice], settings: Settings) -> None:
            ahead.append(len(list(choices)))
            super().__init__((), settings)

    monkeypatch.setattr(ranges, "Compilation", Spy)
    backend.kinds = ("torch",)
    assert sorted(tuned().times) == [1, 8, 64], "nothing between what is tuned"
    assert ahead == [0], "compilers would disturb what is measured"


def test_second_tuning_comes_from_the_store(backend: RowedBackend):
    first, second = tuned(), tuned(range(2, 30))
    assert second.source == "store"
    assert second.table == first.table
    assert 0 < second.seconds < 60
    assert tuned(range(1, 90)).source == "measured"
    with settings.patch(tune="force"):
        assert tuned().source == "measured"


def test_a_table_of_a_busy_machine_is_marked_and_measured_again_if_asked_for(
    backend: RowedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: "a neighbour")
    TIMES_US["fake:high"], kept = (lambda m: 40.0 if m < CROSSING else 90.0), TIMES_US["fake:high"]
    try:
        marked = tuned()
    finally:
        TIMES_US["fake:high"] = kept
    assert marked.table.disturbed == "a neighbour"
    [said] = [x.getMessage() for x in caplog.records if "busy machine" in x.getMessage()]
    rows = ", ".join(map(str, (result.problem.m for result in marked.tuned_results)))
    assert f"tuned Ms ({rows}) were measured on a busy machine (a neighbour): measure it again" in said
    assert {name for _, hi, name in intervals(marked) if hi == 64} == {"low"}, "twice as fast as torch"
    assert tuned().source == "store"
    monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: "")
    (again,) = gemmtune.tune(problem(2), m=range(1, 65), progress=False, again=True)
    assert (again.source, again.table.disturbed) == ("measured", "")
    assert intervals(again)[-1][2] == "high"


@pytest.mark.parametrize(("busy", "last"), [("", "low"), ("a neighbour", "torch")])
def test_a_table_of_a_busy_machine_leaves_torch_for_large_gains_only(
    busy: str, last: str, backend: RowedBackend, monkeypatch: pytest.MonkeyPatch
):
    backend.kinds = ("torch", "low")
    monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: busy)
    monkeypatch.setitem(TIMES_US, "fake:low", lambda m: 10.0 if m < CROSSING else 85.0)
    assert intervals(tuned())[-1][2] == last


def test_a_choice_that_is_wrong_after_the_timing_is_in_no_table(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    """It is wrong only where few choices compete, or impossibly fast there."""

    def recheck(self: Session, choices: list[Choice]) -> dict[str, Sample]:
        stale = Sample(status=Status.WRONG_RESULT, reason="stale")
        return {c.name: stale for c in choices if c.name == "fake:low" and c.problem.m not in (1, 8, 64)}

    monkeypatch.setattr(Session, "recheck", recheck)
    result = tuned()
    assert "low" not in {name for *_, name in intervals(result)}
    assert re.fullmatch(r"M = \d+: wrong_result: stale", result.wrong["fake:low"])
    monkeypatch.setattr(Session, "recheck", lambda *_: {})
    monkeypatch.setattr(
        MachineLimits,
        "too_fast",
        lambda self, session, at, times, torch_us: {x: "too fast" for x in times if x == "fake:high" and at.m == 16},
    )
    with settings.patch(tune="force"):
        assert tuned().wrong == {"fake:high": "M = 16: too_fast: too fast"}


def test_a_missing_choice_retunes_but_narrower_settings_do_not(backend: RowedBackend):
    tuned()
    with settings.patch(choice_denylist_regex="high"):
        assert tuned().source == "store", "it is there for who allows it"
    backend.kinds = ("torch", "low")
    result = tuned()
    assert (result.source, intervals(result)) == ("measured", [(1, 64, "low")])


def test_retuning_compiles_kernels_missing_from_the_cache(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    tuned()
    needed: list[tuple[str, int]] = []
    monkeypatch.setattr(ranges, "precompile", lambda choices, _: needed.extend((c.name, c.problem.m) for c in choices))
    assert tuned().source == "store"
    assert needed == [("fake:low", 1), ("fake:high", CROSSING)]


def test_calls_take_the_table_and_tune_nothing(backend: RowedBackend, tunings: list[int]):
    tuned()
    assert [call(m) for m in (1, 5, 19, 20, 37, 64)] == ["fake:low"] * 3 + ["fake:high"] * 3
    assert plan_for(problem(37), -1).origin == "range"
    assert not tunings


def test_beyond_the_table_the_last_segment_serves(backend: RowedBackend, tunings: list[int]):
    tuned(range(8, 65))
    assert call(1000) == "fake:high"
    assert call(3) == "aten:mm", "before the first segment torch does"
    assert not tunings


def test_a_partly_illegal_choice_serves_its_legal_ms(backend: RowedBackend):
    backend.kinds = ("torch", "low", "high", "narrow")
    assert intervals(tuned()) == [(1, 5, "low"), (6, 10, "narrow"), (11, 19, "low"), (20, 64, "high")]
    runs = list(legal_runs(made("narrow", problem(8)), range(1, 65), row_classes(problem(8))[0], detect("cpu")))
    assert [rows for rows, _ in runs] == [range(1, 6), range(6, 11), range(11, 65)]
    assert [reason is None for _, reason in runs] == [False, True, False]


def test_an_offer_for_one_sampled_m_competes_at_its_neighbours(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    class Library(RowedBackend):
        def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
            asked.append(settings.backends)
            found = super().enumerate(problem, device, settings).choices if problem.m in range(66, 74) else ()
            return Offers(choices=tuple(dataclasses.replace(choice, backend="cublaslt") for choice in found))

    asked: list[tuple[str, ...] | None] = []
    library, absent = Library(("narrow",)), types.SimpleNamespace(serves_by_default=lambda device: False)
    monkeypatch.setitem(KINDS, "narrow", {"lo": 60, "hi": 100})
    monkeypatch.setattr(offers, "load", lambda name: {"triton": backend, "cublaslt": library}.get(name, absent))
    result = tuned(range(64, 257))
    assert intervals(result) == [(64, 100, "narrow"), (101, 256, "high")]
    assert result.table.segments[0].sampled_m in range(66, 74), "where it will be found again"
    asked.clear()
    assert call(90) == "fake:narrow"
    assert asked == [("cublaslt",)], "of the others nothing is enumerated"


def test_excludes_a_choice_that_is_wrong_between_samples(backend: RowedBackend, caplog: pytest.LogCaptureFixture):
    backend.kinds = ("torch", "low", "high", "bad")
    with caplog.at_level(logging.WARNING, "gemmtune"):
        result = tuned()
    assert intervals(result) == [(1, CROSSING - 1, "low"), (CROSSING, 64, "high")]
    assert "M = 33: wrong_result" in result.wrong["fake:bad"]
    assert "excluding fake:bad, which fails for M = 33" in caplog.text


def test_the_first_m_is_tuned_and_the_next_uses_the_nearest(
    backend: RowedBackend, tunings: list[int], caplog: pytest.LogCaptureFixture
):
    gemmtune.tune(Problem.mm(9, N, K, dtype=torch.float32, layout="nn", device_type="cpu"), progress=False)
    with caplog.at_level(logging.INFO, "gemmtune"):
        assert call(8) == "fake:low", "rows of another layout do not count"
        assert call(40) == "fake:low", "that of M = 8, although another one is faster here"
        assert call(41) == "fake:low"
    assert tunings == [8]
    messages = [r.message for r in caplog.records if "was not tuned" in r.message]
    assert messages == [
        "mm Mx24x16 float32 nt on cpu: M = 40 was not tuned, fake:low runs it; for a table of every M: "
        "gemmtune tune 1..8192x24x16 --dtype float32 --layout nt --device cpu"
    ]
    assert plan_for(problem(40), -1).origin == "nearest"
    with settings.patch(rows="exact"):
        assert call(40) == "fake:high"
    assert tunings == [8, 40]


def test_requested_ms_are_stored_and_sampled(backend: RowedBackend):
    for m in (8, 40, 41, 43):
        call(m)
    save_asked()
    machine = fingerprint_text(detect("cpu"), "graph")
    (rows_class,) = row_classes(problem(8))
    assert asked_rows(rows_class, machine, open_store(settings.current())) == [40, 41, 43]
    assert {40, 41, 43} <= set(tuned().times)


def test_the_nearest_legal_choice_serves_or_torch(backend: RowedBackend, tunings: list[int]):
    backend.kinds = ("torch", "narrow")
    assert call(8) == "fake:narrow"
    assert call(9) == "fake:narrow"
    assert call(11) == "aten:mm"
    assert tunings == [8]


def test_an_m_tuned_after_the_table_overrides_it(backend: RowedBackend, tunings: list[int]):
    tuned()
    backend.kinds = ("torch", "low", "high", "narrow")
    gemmtune.tune(problem(7), progress=False)
    assert call(7) == "fake:narrow"
    assert call(8) == "fake:low"
    assert not tunings


def test_an_m_tuned_before_a_table_that_ends_below_it_keeps_its_pick(backend: RowedBackend, tunings: list[int]):
    kinds, backend.kinds = backend.kinds, ("torch", "low")
    gemmtune.tune(problem(100), progress=False)
    backend.kinds = kinds
    tuned()
    assert (call(100), call(101)) == ("fake:low", "fake:high")
    assert not tunings


@pytest.mark.parametrize("value", [{"version": 99}, {"version": 2, "seed": 0, "segments": "none"}])
def test_an_unusable_table_is_logged_and_skipped(backend: RowedBackend, caplog: pytest.LogCaptureFixture, value: dict[str, object]):
    tuned()
    machine, store = fingerprint_text(detect("cpu"), "graph"), open_store(settings.current())
    (rows_class,) = row_classes(problem(8))
    store.put_ranged(Ranged(key=rows_class.key, fingerprint=machine, kind=TABLE, value=value))
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert stored_table(rows_class, machine, store) is None
    assert "tune the range again" in caplog.text
    forget_plans()
    assert call(8) == "fake:low"


def test_torch_serves_segments_that_settings_exclude(backend: RowedBackend):
    tuned()
    with settings.patch(choice_denylist_regex="low"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(5) == "aten:mm"
        assert call(30) == "fake:high"


def test_a_table_of_another_version_is_as_good_as_none(backend: RowedBackend, tunings: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(absent, "_outdated", [])
    tuned()
    machine, store = fingerprint_text(detect("cpu"), "graph"), open_store(settings.current())
    (rows_class,) = row_classes(problem(8))
    fact = store.ranged(rows_class.key, machine)[TABLE]
    segments = [x | {"content_hash": x["content_hash"][::-1]} for x in fact.value["segments"]]
    store.put_ranged(dataclasses.replace(fact, value=fact.value | {"segments": segments}))
    forget_plans()
    remedy = r"another fake:low\. Make it again: gemmtune tune 1\.\.64x24x16 --dtype float32 --layout nt --device cpu"
    with pytest.warns(RuntimeWarning, match=remedy):
        assert call(5) == "fake:low"
    assert gemmtune.explain(problem(5)).origin == "of the nearest M that was tuned"
    assert call(70) == "fake:high"
    assert not tunings
    store.put_ranged(fact)
    forget_plans()
    monkeypatch.setattr(absent, "_outdated", [])
    with settings.patch(template_min_gemm_size=10**9), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(5) == "aten:mm"  # a setting leaves the choice out
    assert absent._outdated == []


def test_explain_shows_the_segments(backend: RowedBackend):
    tuned()
    explanation = gemmtune.explain(problem(37))
    assert (explanation.pick, explanation.origin) == ("fake:high", "from the table of its range")
    assert explanation.table is not None
    assert "20..64" in str(explanation)
    assert gemmtune.explain(problem(65)).origin == "of the last segment of the table, which ends before"


def test_wrong_ranges_are_refused(backend: RowedBackend):
    with pytest.raises(InvalidProblemError, match=r"m: got range\(8, 8\)"):
        gemmtune.tune(problem(2), m=range(8, 8))
    with pytest.raises(InvalidProblemError, match="got M = 0"):
        gemmtune.tune(problem(2), m=range(0, 8))


def test_the_command_line_makes_and_shows_tables(backend: RowedBackend, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["tune", "1..64x24x16", "--dtype", "float32", "--device", "cpu"]) == 0
    assert "1..19" in capsys.readouterr().out
    asked = ["5x24x16", "2..5x12x16"]
    assert cli.run(["tune", *asked, "--m", "1..64", "--dtype", "float32", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out.count("2 segments of M = 1..64") == len(asked)
    assert cli.run(["show"]) == 0
    assert "mm Mx24x16 float32 nt on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0..8x24x16"], "got M = 0"),
        (["9..8x24x16"], "shape: M of 9..8: rows: got the empty range 9..8"),
        (["8x24x16", "--m", "9..8"], "--m 9..8: rows: got the empty range 9..8"),
        (["1..8..9x24x16"], "expected LO..HIxNxK"),
        (["8x24x16", "--m", "1-8"], "--m: got '1-8', expected LO..HI"),
    ],
)
def test_the_command_line_rejects_wrong_ranges(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert cli.run(["tune", *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_requested_ms_are_exported_with_the_store(backend: RowedBackend, tmp_path: Path):
    tuned()
    store = open_store(settings.current())
    store.put_ranged(Ranged(key="{}", fingerprint="{}", kind=ASKED, value={"rows": [3]}))
    store.export_file(tmp_path / "store.json")
    with settings.patch(store_path=str(tmp_path / "other.sqlite")):
        other = open_store(settings.current())
        other.import_file(tmp_path / "store.json")
        assert {fact.identity: fact for fact in other.every_ranged()} == {fact.identity: fact for fact in store.every_ranged()}
        forget_plans()
        assert call(37) == "fake:high"


def test_a_launch_variant_may_be_the_batch_invariant_choice(backend: RowedBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VARIANTS, "low", ("raster",))
    monkeypatch.setattr(Session, "same_rows", lambda *_: Sample(status=Status.OK))
    (result,) = gemmtune.tune(problem(2), m=range(1, 65), batch_invariant=True, progress=False)
    assert [x.name for x in result.table.segments] == ["fake:raster"]


def test_a_first_call_looks_for_the_batch_invariant_choice(
    backend: RowedBackend, monkeypatch: pytest.MonkeyPatch, tunings: list[int]
):
    monkeypatch.setattr(Session, "same_rows", lambda *_: Sample(status=Status.OK))
    with settings.patch(batch_invariant=True):
        assert [call(m) for m in (7, 1, 300)] == ["fake:low", "fake:low", "fake:high"]
    assert not tunings


def test_only_a_batch_invariant_choice_runs(backend: RowedBackend):
    backend.kinds = ("torch",)
    with (
        settings.patch(batch_invariant=True),
        pytest.raises(NoValidChoicesError, match="fake:torch: refused: declares no reduction"),
    ):
        gemmtune.mm(torch.randn(3, K), W)
    with (
        settings.patch(batch_invariant=True, tune="never"),
        pytest.raises(NoValidChoicesError, match=r"1\.\.8192x24x16 .* --batch-invariant\. Torch is no way out"),
    ):
        gemmtune.mm(torch.randn(3, K), W)
    with pytest.raises(InvalidProblemError, match="batch_invariant without m"):
        gemmtune.tune(problem(3), batch_invariant=True)  # type: ignore[call-overload]


def test_a_choice_whose_rows_differ_is_not_batch_invariant(backend: RowedBackend):
    """The choice declares invariance, but torch computes its few rows and sums one row in another order."""
    a, w = torch.randn(64, 3000), torch.randn(3000, 24)
    if torch.equal((a @ w)[:1], a[:1] @ w):
        pytest.skip("torch gives one row the same bits here")
    with pytest.raises(NoValidChoicesError, match=r"rows 0 to \d+ have other bits alone than among 64 rows"):
        gemmtune.tune("mm", a, w, m=(1, 64), batch_invariant=True, progress=False)


def test_our_kernels_are_batch_invariant(own_store: Path, monkeypatch: pytest.MonkeyPatch):
    """The real backend keeps the bits of rows while its micro-tiles, panels and orientation change with M."""
    untimed(monkeypatch, lambda name, m: 1.0)
    a, w = torch.randn(40, 300), torch.randn(50, 300).t()
    with settings.patch(batch_invariant=True, search="quick", backends=("cpp",), rows="shared"):
        whole = gemmtune.mm(a, w)
        for m in (1, 2, 13, 14, 15, 29, 39):
            assert torch.equal(gemmtune.mm(a[:m], w), whole[:m])
            assert torch.equal(gemmtune.mm(a[-m:], w), whole[-m:])


def test_a_new_m_of_a_table_is_bound_without_being_stated(own_store: Path, monkeypatch: pytest.MonkeyPatch):
    """Each kind of call states only the first M of a segment. A key without M finds the next ones."""
    untimed(monkeypatch, lambda name, m: 1.0 if name.startswith("cpp") else 2.0)
    scale_b, bias = torch.rand(1, N), torch.randn(N)
    numbers = torch.randint(-9, 9, (K, N), dtype=torch.int8)

    def rows_of(m: int) -> torch.Tensor:
        return torch.randn(m, K)

    calls: dict[str, tuple[Callable[[int], tuple[torch.Tensor, ...]], Callable[..., torch.Tensor]]] = {
        "mm": (lambda m: (rows_of(m), W), gemmtune.mm),
        "addmm": (lambda m: (torch.randn(m, N), rows_of(m), W), gemmtune.addmm),
        "addmm ": (lambda m: (bias, rows_of(m), W), gemmtune.addmm),
        "mixed_mm": (lambda m: (rows_of(m), numbers, scale_b), lambda a, b, s: gemmtune.mixed_mm(a, b, scale_b=s)),
    }
    exact = {
        "mm": torch.mm,
        "addmm": torch.addmm,
        "addmm ": torch.addmm,
        "mixed_mm": lambda a, b, s: a @ (b.float() * s),
    }
    for name, (operands, function) in calls.items():
        with settings.patch(rows="shared", backends=("aten",)):
            words = {"scale_b": scale_b} if name == "mixed_mm" else {}
            gemmtune.tune(name.strip(), *operands(2)[: 2 if words else None], m=(1, 40), progress=False, **words)
            function(*operands(3))
            with monkeypatch.context() as patched:
                patched.setattr(plans, "make_plan", lambda *_: pytest.fail("a new M was stated"))
                for m in (2, 5, 24, 33, 40, 5):
                    given = operands(m)
                    torch.testing.assert_close(function(*given), exact[name](*given), atol=1e-4, rtol=1e-4)
            known = [plan for plan in plans.ready.values() if plan.plan.problem.op == name.strip()]
            assert {plan.plan.problem.m for plan in known} >= {2, 3, 5, 24, 33, 40}
            for plan in known:
                made = plan.plan.problem
                assert made == row_classes(made)[0].at(made.m), (
                    "a problem that is made without a check is what it would be with one"
                )
