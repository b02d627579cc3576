"""The steps of tuning a range, each in isolation: checked Ms, measurements, and replacements of illegal choices."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_choices import CLAIMS, Fake

from gemmtune.backends.table import load
from gemmtune.choice import Choice, Offers, Status
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.errors import NoValidChoicesError
from gemmtune.problem import Problem
from gemmtune.problem.rows import RowClass, row_classes
from gemmtune.selector import intervals, proof, range_work, ranges
from gemmtune.selector.crossover import MOST_SEGMENTS
from gemmtune.selector.proof import failures_of, kernels_of, legal_runs, rows_to_check, tile_rows
from gemmtune.selector.range_work import ROUNDS_S, Work, measured, segment_of, uncompiled, with_kernels
from gemmtune.selector.samples import Sample
from gemmtune.selector.segments import Segment
from gemmtune.settings import Settings

CPU = detect("cpu")
(EVERY,) = row_classes(Problem.mm(2, 24, 16, device_type="cpu"))
(TWOS,) = row_classes(Problem.mm(2, 24, 16, layout="tn", device_type="cpu"))
"""Classes of every M, and of those that 2 divides and 4 does not."""


@dataclass(frozen=True, kw_only=True)
class Stepped(Fake):
    """A choice that is legal for the Ms in ``legal`` (None: all), with one kernel for each ``kernel_rows`` of them."""

    legal: frozenset[int] | None = None
    kernel_rows: int = 0
    invariant: bool = True

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        if self.legal is not None and problem.m not in self.legal:
            return f"not for {problem.m}"
        kernel = f"kernel {problem.m // self.kernel_rows}" if self.kernel_rows else ""
        fields = {"legal": self.legal, "kernel_rows": self.kernel_rows, "baseline": self.baseline, "invariant": self.invariant}
        return stepped(self.name, problem, artifact=kernel, **fields)

    @property
    def batch_invariant(self) -> bool:
        return self.invariant


def stepped(name: str = "x", problem: Problem = EVERY.problem, **fields: Any) -> Stepped:
    return Stepped(name=name, backend="fake", problem=problem, claims=CLAIMS, **fields)


def test_legal_runs_cover_all_rows_with_the_first_reason() -> None:
    choice = stepped(legal=frozenset({3, 4, 5, 9}))
    assert list(legal_runs(choice, range(1, 11), EVERY, CPU)) == [
        (range(1, 3), "not for 1"), (range(3, 6), None), (range(6, 9), "not for 6"), (range(9, 10), None),
        (range(10, 11), "not for 10"),
    ]  # fmt: skip
    assert list(legal_runs(choice, range(3, 6), EVERY, CPU)) == [(range(3, 6), None)]


@dataclass(frozen=True, kw_only=True)
class Asked(Fake):
    """Wrapper of ``choice`` that is ``legal_between`` if ``between`` is set. ``seen`` are the checked Ms."""

    choice: Choice
    between: bool
    seen: list[int]

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        self.seen.append(problem.m)
        return self.choice.at(problem, device)

    @property
    def legal_between(self) -> bool:
        return self.between


def asked(choice: Choice, *, between: bool) -> Asked:
    return Asked(name="x", backend="x", problem=choice.problem, claims=CLAIMS, choice=choice, between=between, seen=[])


SM90 = preset("sm90")
LEGAL_BETWEEN = {
    "triton mm": ("triton", Problem.mm(300, 520, 256, dtype=torch.bfloat16), SM90),
    "triton mm of large tiles": ("triton", Problem.mm(2048, 3072, 512, dtype=torch.bfloat16), SM90),
    "triton mm by columns": ("triton", Problem.mm(304, 520, 256, dtype=torch.bfloat16, layout="tn"), SM90),
    "cuda mm": ("cuda", Problem.mm(136, 208, 8192, dtype=torch.bfloat16), SM90),
    "cuda mixed_mm": ("cuda", Problem.mixed_mm(48, 512, 1024, dtype=torch.bfloat16, layout="nt"), SM90),
    "cuda decoding": ("cuda", Problem.mm(3, 512, 1024, dtype=torch.bfloat16), SM90),
    "aten int_mm": ("aten", Problem.int_mm(32, 64, 64), SM90),
    "aten scaled_mm": ("aten", Problem.scaled_mm(32, 64, 64), SM90),
    "aten addmm": ("aten", Problem.addmm(32, 64, 64, bias="n"), SM90),
    "cpp narrow": ("cpp", Problem.mm(9, 12, 64, dtype=torch.float32, device_type="cpu"), CPU),
    "cpp": ("cpp", Problem.mm(300, 520, 2 << 20, dtype=torch.float32, device_type="cpu"), CPU),
}


@pytest.mark.parametrize("name", LEGAL_BETWEEN)
def test_legal_between_gives_the_runs_of_a_full_check(name: str) -> None:
    backend, problem, device = LEGAL_BETWEEN[name]
    offered = load(backend).enumerate(problem, device, Settings(search="quick")).choices
    found = [choice for choice in offered if choice.legal_between]
    assert found, "of those that are offered, some say so"
    (rows_class,) = row_classes(problem)
    generator = random.Random(name)
    templates = {choice.name.partition("_")[0]: choice for choice in generator.sample(found, len(found))}
    for choice in (*templates.values(), *generator.sample(found, min(4, len(found)))):
        low = generator.choice((1, 2, 15, 60))
        rows = range(low, low + generator.choice((1, 7, 40, 110)))
        fast, slow = (
            Asked(name="x", backend="x", problem=problem, claims=CLAIMS, choice=choice, between=x, seen=[]) for x in (True, False)
        )
        assert list(legal_runs(fast, rows, rows_class, device)) == list(legal_runs(slow, rows, rows_class, device)), choice.name


def test_legal_between_checks_few_ms() -> None:
    choice = Asked(
        name="x",
        backend="x",
        problem=EVERY.problem,
        claims=CLAIMS,
        choice=stepped(legal=frozenset(range(33, 9001))),
        between=True,
        seen=[],
    )
    assert list(legal_runs(choice, range(1, 8193), EVERY, CPU)) == [(range(1, 33), "not for 1"), (range(33, 8193), None)]
    assert len(choice.seen) < 80
    islands = stepped(legal=frozenset({40, 41, 7000}))
    choice = dataclasses.replace(choice, choice=islands, seen=[])
    assert [rows for rows, reason in legal_runs(choice, range(30, 60), EVERY, CPU) if reason is None] == [range(40, 42)]


def test_rows_outside_the_class_belong_to_the_previous_run() -> None:
    choice = stepped(legal=frozenset({6}))
    runs = list(legal_runs(choice, range(1, 13), TWOS, CPU))
    assert runs == [(range(1, 6), "not for 2"), (range(6, 10), None), (range(10, 13), "not for 10")]


def test_kernels_are_checked_at_ends_and_near_powers_of_two() -> None:
    class Asked(RowClass):
        def at(self, m: int) -> Problem:
            asked.append(m)
            return RowClass.at(self, m)

    asked: list[int] = []
    kernels_of(stepped(), range(1, 2001), Asked(problem=EVERY.problem), CPU)
    around = {power + step for power in (64, 128, 256, 512, 1024) for step in (-1, 0, 1, 2, 4, 8)}
    assert asked == sorted({*range(1, 49), *range(1953, 2001), *around})


def test_each_kernel_is_found_once_at_its_first_m() -> None:
    kernels = kernels_of(stepped(kernel_rows=10), range(5, 31), EVERY, CPU)
    assert [(c.compile_key, c.problem.m) for c in kernels] == [
        ("kernel 0", 5), ("kernel 1", 10), ("kernel 2", 20), ("kernel 3", 30),
    ]  # fmt: skip
    firsts = [c.problem.m for c in kernels_of(stepped(kernel_rows=300), range(1, 2001), EVERY, CPU)]
    assert firsts == [1, 300, 600, 1024, 1200, 1954], "exactly where one seen is the first other than the one before"
    assert [c.problem.m for c in kernels_of(stepped(kernel_rows=10), range(5, 31), TWOS, CPU)] == [6, 10, 22, 30]
    assert [c.problem.m for c in kernels_of(stepped(legal=frozenset({7})), range(5, 31), EVERY, CPU)] == [7]


class Drawn(random.Random):
    """Generator that draws these numbers in order."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def choice(self, seq: Any) -> Any:
        assert self.numbers[0] in seq
        return self.numbers.pop(0)


@pytest.mark.parametrize(
    ("rows", "tile", "drawn", "expected"),
    [
        # ends, three edges with their neighbours, each alignment from 48 on, three random ones
        (
            range(10, 101), 16, (11, 12, 99),
            [10, 11, 12, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50, 52, 56, 99, 100],
        ),
        (range(10, 101), None, (10, 10, 77), [10, 48, 49, 50, 52, 56, 77, 100]),
        (range(32, 64), 32, (40, 41, 42), [32, 33, 34, 36, 40, 41, 42, 63]),
        (range(33, 65), 32, (40, 41, 42), [33, 40, 41, 42, 48, 49, 50, 52, 56, 64]),
        (range(7, 8), 4, (7, 7, 7), [7]),
    ],
)  # fmt: skip
def test_checked_rows(rows: range, tile: int | None, drawn: tuple[int, ...], expected: list[int]) -> None:
    generator = Drawn(*drawn)
    assert list(rows_to_check(segment(rows[0], rows[-1], "x"), EVERY, tile, generator)) == expected
    assert not generator.numbers, "three are drawn"


def test_rows_outside_the_class_are_not_checked() -> None:
    """The checked ends are members of the class."""
    assert rows_to_check(segment(1, 64, "x"), TWOS, 16, Drawn(6, 6, 10)) == (2, 6, 10, 34, 62)
    assert rows_to_check(segment(3, 5, "x"), TWOS, None, Drawn()) == ()


def test_each_kernel_is_checked() -> None:
    x = dataclasses.replace(segment(10, 100, "x"), kernels=(10, 23, 90, 101))
    assert {23, 90} < set(rows_to_check(x, EVERY, None, Drawn(10, 10, 10))) < set(range(10, 101))


@pytest.mark.parametrize(
    ("info", "rows"),
    [
        ({"tile": (128, 64)}, 128), ({"tile": [2, 8]}, 2), ({"tile": 32}, 32), ({"mr": 6}, 6), ({"tile": 1}, None),
        ({"tile": "128x64"}, None), ({}, None),
    ],
)  # fmt: skip
def test_rows_of_a_tile(info: dict[str, Any], rows: int | None) -> None:
    assert tile_rows(stepped(info=info)) == rows


@dataclass
class Sessions:
    """Fake sessions of any M. They record their calls and answer by name and M."""

    asked: list[tuple[str, str, int]]
    wrong: dict[tuple[str, int], str]
    times: dict[str, float]

    def open(self, problem: Problem, *_: object) -> contextlib.nullcontext[Any]:
        self.asked.append(("open", "", problem.m))

        def prove(choice: Choice) -> Sample:
            self.asked.append(("prove", choice.name, choice.problem.m))
            reason = self.wrong.get((choice.name, choice.problem.m))
            return Sample(status=Status.OK) if reason is None else Sample(status=Status.WRONG_RESULT, reason=reason)

        def rank(choices: Sequence[Choice], seconds: float) -> Any:
            assert seconds == ROUNDS_S
            (m,) = {c.problem.m for c in choices}
            self.asked.append(("rank", " ".join(c.name for c in choices), m))
            return SimpleNamespace(times={c.name: SimpleNamespace(time_us=x) for c in choices if (x := self.times.get(c.name))})

        session = contextlib.nullcontext(SimpleNamespace(prove_rows=prove, rank=rank))
        session.rank, session.recheck = rank, lambda _: {}  # type: ignore[attr-defined]
        return session


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """Replace sessions and compilation. A choice named ``uncompilable`` does not compile."""
    made = Sessions(asked=[], wrong={}, times={})

    def precompile(choices: list[Choice], _: Settings) -> dict[str, Any]:
        made.asked += [("compile", c.compile_key, c.problem.m) for c in choices if c.compile_key]
        return {c.name: SimpleNamespace(reason="a syntax error") for c in choices if c.name == "uncompilable"}

    for module in (proof, range_work):
        monkeypatch.setattr(module, "open_session", made.open)
        monkeypatch.setattr(module, "precompile", precompile)
    return made


def test_a_wrong_choice_is_not_tried_at_the_next_m(sessions: Sessions) -> None:
    x, y, broken = stepped("x"), stepped("y", legal=frozenset({5, 7})), stepped("uncompilable")
    sessions.wrong["x", 5] = "off by one"
    failed = failures_of([(x, (1, 5, 7)), (y, (1, 5)), (broken, (1, 9))], EVERY, CPU, Settings())
    assert failed == {"uncompilable": "M = 9: a syntax error", "x": "M = 5: wrong_result: off by one"}
    assert sessions.asked == [("open", "", 9), ("prove", "x", 1), ("prove", "x", 5), ("prove", "y", 5)]


def test_what_the_machine_stalls_is_tried_once_more(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    late, right = Sample(status=Status.TIMED_OUT, reason="no answer within 60 s"), Sample(status=Status.OK)
    for answers, failed in (([late, right, right], {}), ([late, late], {"x": "M = 1: timed_out: no answer within 60 s"})):
        session = SimpleNamespace(prove_rows=lambda _, left=answers: left.pop(0))
        monkeypatch.setattr(proof, "open_session", lambda *_, it=session: contextlib.nullcontext(it))
        assert failures_of([(stepped("x"), (1, 5))], EVERY, CPU, Settings()) == failed


def work_of(times: dict[int, dict[str, float]], rows: range = range(1, 65), **choices: Stepped) -> Work:
    """Return a range with known samples and times. Each choice was found at the first M that has its time."""
    names = {name for here in times.values() for name in here}
    made = {name: choices.get(name, stepped(name)) for name in sorted(names)}
    work = Work(EVERY, rows, CPU, Settings(), 0.0, None)  # type: ignore[arg-type]
    work.results.update(dict.fromkeys(times))  # type: ignore[arg-type]
    work.choices.update(made)
    work.found_at.update({name: next(m for m, here in times.items() if name in here) for name in made})
    work.times.update({m: dict(here) for m, here in times.items()})
    return work


def test_a_segment_has_the_time_of_the_last_sample_inside() -> None:
    work = work_of({2: {"x": 1.0, "y": 8.0}, 4: {"x": 2.0}, 8: {"x": 3.0}})
    found = segment_of(work, "x", 2, 7)
    assert (found.lo, found.hi, found.name, found.content_hash) == (2, 7, "x", "fake-x")
    assert (found.sampled_m, found.time_us, found.checked) == (2, 2.0, ())
    assert [segment_of(work, "x", lo, hi).time_us for lo, hi in ((8, 20), (1, 2), (5, 7), (4, 8))] == [3.0, 1.0, 1.0, 3.0]
    assert segment_of(work, "y", 3, 9).time_us == 8.0


def test_choices_are_ranked_at_an_m_where_they_are_legal(sessions: Sessions) -> None:
    sessions.times |= {"x": 3.0, "y": 5.0, "uncompilable": 1.0, "wrong": 1.0}
    names = ("x", "narrow", "uncompilable", "wrong", "dead", "y")
    work = work_of({4: dict.fromkeys(names, 1.0)}, narrow=stepped(legal=frozenset()))
    work.wrong["wrong"] = "NaN"
    assert measured(work, 6, names) == {"x": 3.0, "y": 5.0}
    assert work.wrong == {"wrong": "NaN", "uncompilable": "M = 6: a syntax error"}
    assert measured(work, 6, ("narrow", "wrong")) == {}
    assert measured(work, 7, ("x", "y")) == {"x": 3.0, "y": 5.0}
    assert sessions.asked == [("open", "", 64), ("rank", "x dead y", 6), ("rank", "x y", 7)], "one session, for the most rows"


def test_compiles_the_kernels_of_segments(sessions: Sessions) -> None:
    work = work_of(
        {1: {"x": 1.0, "plain": 1.0, "uncompilable": 1.0}},
        x=stepped("x", kernel_rows=4),
        uncompilable=stepped("uncompilable", kernel_rows=8),
    )
    wanted = (("x", 1, 9), ("plain", 10, 11), ("uncompilable", 12, 18))
    segments = [with_kernels(work, segment_of(work, name, lo, hi)) for name, lo, hi in wanted]
    assert [x.kernels for x in segments] == [(1, 4, 8), (10,), (12, 16)]
    assert uncompiled(work, segments) == {"uncompilable": "a syntax error"}
    asked = [("kernel 0", 1), ("kernel 1", 4), ("kernel 2", 8), ("kernel 1", 12), ("kernel 2", 16)]
    assert sessions.asked == [("compile", *x) for x in asked]


def test_neighbours_torch_and_compiled_choices_compete_between_tuned_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: 1.0 + i for i, name in enumerate("abcdefg")}
    times = {1: {"x": 1.0}, 4: few, 64: {"z": 1.0, "a": 2.0, "y": 3.0, "torch": 9.0}, 256: {"x": 1.0}}
    work = work_of(times, b=stepped("b", legal=frozenset({4})), torch=stepped("torch", baseline=True))
    work.wrong["z"] = "off"
    work.sampled += [*times, 8]
    work.times[8] = {"g": 1.0}
    ready = [stepped("k"), stepped("a")]
    assert ranges._entrants(work, 16, ready) == ["torch", "g", "a", "c", "d", "y", "k"], "three of each, once"
    assert work.found_at["k"] == 16
    assert work.found_at["a"] == 4


def test_ready_choices_are_limited_for_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of({4: {"x": 1.0}})
    offered = (
        stepped("torch", baseline=True), *(dataclasses.replace(stepped(f"lib{i}"), backend="library") for i in range(9)),
        *(stepped(name, artifact=artifact) for name, artifact in (("a", "kernel"), ("b", ""), ("c", ""), ("d", ""))),
    )  # fmt: skip
    asked: list[Sequence[str] | None] = []
    monkeypatch.setattr(range_work, "libraries_of", lambda *_: ("library",))
    monkeypatch.setattr(range_work, "enabled_backends", lambda *_: ("library", "triton", "fake"))
    monkeypatch.setattr(range_work, "offers_for", lambda p, d, s: (asked.append(s.backends), Offers(choices=offered))[1])
    assert [choice.name for choice in work.ready(16)] == [*(f"lib{i}" for i in range(6)), "b", "c"]
    assert asked == [("library", "fake")], "Triton's configs would be searched for each M"
    work.source = lambda problem: pytest.fail("what is not of the settings has no more than it gave")
    assert work.ready(16) == []


def segment(lo: int, hi: int, name: str) -> Segment:
    return Segment(lo=lo, hi=hi, name=name, backend="fake", content_hash=f"fake-{name}", sampled_m=lo)


def test_replaces_an_illegal_choice_by_the_fastest_at_the_nearest_sample() -> None:
    slow = {f"slow{i}": 10.0 + i for i in range(3)}
    times = {4: {"x": 1.0, "y": 2.0, "torch": 9.0}, 32: {"x": 1.0, "y": 3.0, "z": 2.0, **slow, "torch": 30.0}}
    work = work_of(times, x=stepped("x", legal=frozenset({4})), torch=stepped("torch", baseline=True))
    assert intervals._replacement(work, range(5, 8)) == "y"
    assert intervals._replacement(work, range(11, 14)) == "y", "11 is nearer to 4 than to 32 by its ratio"
    assert intervals._replacement(work, range(12, 14)) == "z"
    assert intervals._replacement(work, range(12, 14), ("x", "slow2", "slow1")) == "slow2", "the first legal one of its neighbours"
    work.choices |= {name: stepped(name, legal=frozenset()) for name in ("y", "z")}
    assert intervals._replacement(work, range(12, 14)) == "slow0", "the fourth"
    work.choices["slow0"] = stepped("slow0", legal=frozenset())
    assert intervals._replacement(work, range(12, 14)) == "torch", "four are checked"
    work.wrong["torch"] = "off"
    with pytest.raises(NoValidChoicesError, match=r"none of them is legal for each M of 12\.\.13"):
        intervals._replacement(work, range(12, 14))


def test_splits_a_segment_where_its_choice_is_illegal() -> None:
    work = work_of({1: {"x": 1.0, "y": 2.0}, 8: {"x": 1.0, "y": 2.0}}, x=stepped("x", legal=frozenset({1, 2, 6, 7, 8})))
    found = intervals.legal_segments(work, [segment(1, 7, "x"), segment(8, 8, "x"), segment(9, 64, "y")])
    assert [(x.lo, x.hi, x.name) for x in found] == [(1, 2, "x"), (3, 5, "y"), (6, 8, "x"), (9, 64, "y")]


def test_merges_the_neighbours_with_the_least_ratio() -> None:
    work = work_of({1: {"x": 1.0, "y": 2.0}})

    def fewer(*segments: Segment) -> list[tuple[int, int, str]]:
        return [(x.lo, x.hi, x.name) for x in intervals._fewer(work, list(segments))]

    four = (segment(1, 4, "x"), segment(5, 9, "y"), segment(10, 15, "x"), segment(16, 40, "y"))
    assert fewer(*four) == [(1, 4, "x"), (5, 40, "y")], "16/5 is less than 10/1 and 41/10"
    three = (segment(1, 1, "x"), segment(2, 3, "y"), segment(4, 6, "x"))
    assert fewer(*three) == [(1, 1, "x"), (2, 6, "y")], "7/2 is less than 4/1"
    assert fewer(segment(5, 6, "x"), segment(7, 30, "y")) == [(5, 30, "y")], "the longer one's choice"
    assert fewer(segment(2, 3, "x"), segment(4, 8, "y")) == [(2, 8, "y")], "9/4 is more than 4/2"
    assert fewer(segment(1, 9, "x"), segment(10, 19, "y")) == [(1, 19, "x")]
    assert fewer(segment(1, 1, "x"), segment(2, 3, "y")) == [(1, 3, "x")], "2/1 both"
    work = work_of({1: {"x": 1.0, "y": 2.0}}, x=stepped("x", legal=frozenset({5, 6})))
    assert fewer(segment(5, 6, "x"), segment(7, 8, "y")) == [(5, 8, "y")]


@pytest.mark.parametrize(("most", "count"), [(31, 15), (32, 16), (33, 16), (64, 16)])
def test_limits_segments_for_often_illegal_choices(most: int, count: int) -> None:
    work = work_of({1: {"x": 1.0, "y": 2.0}}, x=stepped("x", legal=frozenset(m for m in range(1, 65) if m % 4)))
    found = intervals.legal_segments(work, [segment(1, most, "x")])
    assert len(found) == count
    assert (found[0].lo, found[-1].hi) == (1, most)
    assert all(x.hi + 1 == y.lo for x, y in pairwise(found))
    assert MOST_SEGMENTS == 16


def test_a_choice_of_one_kernel_has_it_for_every_m() -> None:
    device, given = preset("sm90"), {"device_type": "cuda", "dtype": torch.bfloat16}
    problems = [Problem.mixed_mm(m, 512, 512, scales="group_128", encoding="int4", **given) for m in (1, 16, 512)]
    problems += [Problem.mm(1, 512, 512, **given), Problem.grouped_mm(64, 256, 256, groups=4, **given)]
    seen = set()
    for problem in problems:
        (rows_class, *_) = row_classes(problem)
        backends = ("cuda",) if problem.groups else ("cuda", "aten")
        for choice in (c for x in backends for c in load(x).enumerate(problem, device, Settings()).choices):
            assert choice.one_kernel
            [first] = kernels_of(choice, range(problem.m, problem.m + 600), rows_class, device)
            assert first.problem.m == problem.m
            there = [at for m in (problem.m + 1, problem.m + 600) if isinstance(at := choice.at(rows_class.at(m), device), Choice)]
            assert {at.compile_key for at in (*there, first)} == {choice.compile_key}
            seen.add(choice.name.split("_")[0])
    assert seen == {"cuda:gemv", "cuda:skinny", "cuda:wgmma", "cuda:grouped", "aten:mm", "aten:mixed"}
