"""Tables of segments, the sampled Ms that they come from, and crossovers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from itertools import pairwise

import pytest

from gemmtune.errors import InvalidProblemError, StoreError
from gemmtune.problem import Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector.crossover import MOST_SEGMENTS, assigned, find_crossover, sampled_rows, spread
from gemmtune.selector.range_result import RangeResult, RangesResult, bar, table_lines
from gemmtune.selector.segments import Segment, Table, merged, rows_of
from gemmtune.store.row import Ranged


def segment(lo: int, hi: int, name: str = "x", **fields: object) -> Segment:
    return Segment(lo=lo, hi=hi, name=name, backend="fake", content_hash=f"hash of {name}", sampled_m=lo, **fields)  # type: ignore[arg-type]


def test_the_segment_of_an_m():
    table = Table(segments=(segment(2, 4), segment(5, 5, "y"), segment(9, 20)))
    assert [table.index(m) for m in (1, 2, 4, 5, 6, 8, 9, 20, 21)] == [None, 0, 0, 1, None, None, 2, 2, None]
    assert (table.lo, table.hi, table.seed) == (2, 20, 0)
    assert list(map(str, table.segments[:2])) == ["M = 2..4: x", "M = 5: y"]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "got a table without segments"),
        ((segment(1, 8), segment(8, 9)), r"got segments 1\.\.8 and 8\.\.9, which overlap"),
        ((segment(5, 8), segment(1, 2)), "overlap or are out of order"),
        ((segment(5, 4),), r"got the empty range 5\.\.4"),
        ((segment(0, 4),), "got M = 0, expected a whole number from 1"),
    ],
)
def test_wrong_segments_are_refused(segments: tuple[Segment, ...], message: str):
    with pytest.raises(InvalidProblemError, match=message):
        Table(segments=segments)


@pytest.mark.parametrize("m", [range(8, 8), range(1, 9, 2), (4, 2), (0, 4), (1, 2, 3), "1..8", 7, (1, 2.5), range(0, 4)])
def test_wrong_ranges_are_refused(m: object):
    with pytest.raises(InvalidProblemError, match="expected"):
        rows_of(m)


def test_ranges_are_python_ranges_or_ends():
    assert rows_of(range(1, 9)) == rows_of((1, 8)) == rows_of([1, 8]) == range(1, 9)
    assert rows_of(range(5, 6)) == range(5, 6)
    assert rows_of((1, 2**31 - 1)) == range(1, 2**31)
    with pytest.raises(InvalidProblemError, match="got M = 2147483648, expected a whole number from 1 to 2147483647"):
        rows_of((1, 2**31))


def test_a_table_survives_the_store():
    segments = (segment(1, 4, time_us=1.5, checked=(1, 4)), segment(5, 9, "y"))
    table = Table(segments=segments, seed=7, disturbed="a neighbour")
    fact = Ranged(key="{}", fingerprint="{}", kind="segments", value=table.to_json())
    assert Table.of(Ranged.of_record("{}", "{}", *fact.record)) == table
    assert [line.endswith("on a busy machine)") for line in table_lines(table)] == [False, True, False, False]
    assert table_lines(table)[-1].startswith("  measured on a busy machine (a neighbour): measure it again")
    unmarked = {name: value for name, value in table.to_json().items() if name != "disturbed"}
    assert Table.of(Ranged(key="{}", fingerprint="{}", kind="segments", value=unmarked)).disturbed == ""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"version": 99, "seed": 0, "segments": []}, "got a table of version 99, expected 3; tune the range again"),
        ({}, "version None"),
        ({"version": 3, "seed": 0, "segments": [{"lo": 1}]}, "damaged"),
        ({"version": 3, "seed": 0, "segments": []}, "damaged .got a table|damaged"),
    ],
)
def test_a_stored_table_of_another_format_is_rejected(value: dict[str, object], message: str):
    with pytest.raises(StoreError, match=message):
        Table.of(Ranged(key="{}", fingerprint="{}", kind="segments", value=value))


def test_equal_neighbours_are_merged():
    parts = (segment(1, 4, checked=(1,)), segment(5, 6, checked=(5, 6)), segment(7, 7, "y"), segment(9, 9, "y"))
    first, *rest = merged(parts)
    assert (first.lo, first.hi, first.checked) == (1, 6, (1, 5, 6))
    assert [(x.lo, x.hi) for x in rest] == [(7, 7), (9, 9)], "there is a gap between these"
    last = merged((segment(1, 4), segment(5, 6, "y"), segment(7, 8, "y")))
    assert [(x.lo, x.hi, x.sampled_m) for x in last] == [(1, 4, 1), (5, 8, 5)]


def test_samples_powers_middles_ends_and_recorded_ms():
    assert sampled_rows(range(1, 41), lambda m: True, (37, 99)) == [1, 2, 3, 4, 6, 8, 11, 16, 20, 24, 28, 32, 37, 40]
    assert sampled_rows(range(48, 129), lambda m: True) == [48, 56, 64, 67, 73, 80, 84, 96, 100, 112, 120, 128]
    assert sampled_rows(range(2000, 4097), lambda m: True) == [2000, 2048, 2130, 2560, 3154, 3584, 4096]
    assert sampled_rows(range(5, 6), lambda m: True) == [5]
    assert sampled_rows(range(1, 41), lambda m: m % 16 == 0) == [16, 32]
    assert sampled_rows(range(1, 49), lambda m: m % 16 == 0) == [16, 32, 48]
    assert sampled_rows(range(1, 48), lambda m: m % 16 == 0) == [16, 32]
    assert sampled_rows(range(3, 9), lambda m: True, (2, 5, 9)) == [3, 4, 5, 6, 8]


def test_ties_add_no_segments():
    times = {m: {"x": 1.0, "y": 0.995 if m % 2 else 1.005} for m in range(1, 9)}
    assert set(assigned(times).values()) in ({"x"}, {"y"})


def test_all_choices_compete_at_samples_far_apart():
    sampled = sampled_rows(range(1, 8193), lambda m: True, (37,))
    assert spread(sampled, 8.0) == [1, 8, 64, 256, 2048]
    assert spread(sampled, 8.0, narrow=True) == [1, 8, 16, 64, 256, 2048]
    assert spread(sampled, 1.0) == sampled
    assert spread([5], 8.0) == [5]
    assert spread([3, 5, 7], 8.0) == [3, 7]


def test_a_faster_choice_gets_its_samples():
    times = {m: {"x": float(m), "y": 4.5} for m in range(1, 9)}
    assert list(assigned(times).values()) == ["x"] * 4 + ["y"] * 4


def test_a_loss_against_torch_counts_more():
    """Keeping y, the best at the neighbouring samples, costs less than two changes of choice."""
    times = {m: {"torch": 1.0, "y": 1.03 if m == 3 else 0.97} for m in range(1, 5)}
    assert assigned(times)[3] == "y"
    assert assigned(times, "torch")[3] == "torch"


def test_torch_wins_ties_in_the_assignment():
    times = {m: {"torch": 1.0, "y": 0.985} for m in range(1, 9)}
    assert set(assigned(times).values()) == {"y"}
    assert set(assigned(times, "torch").values()) == {"torch"}


def test_small_gains_over_torch_add_no_cost_unless_the_machine_is_busy():
    """On a quiet machine one gain of 4% decides, since those of 1% may be none and cost nothing. On a busy one 30% is needed."""
    gains = (0.99, 0.99, 0.99, 0.99, 0.96)
    times = {m: {"torch": 1.0, "y": y} for m, y in enumerate(gains)}
    assert set(assigned(times, "torch").values()) == {"y"}
    assert set(assigned(times, "torch", 0.25).values()) == {"torch"}
    assert set(assigned({m: {"torch": 1.0, "y": 0.7} for m in range(5)}, "torch", 0.25).values()) == {"y"}


def test_unmeasured_choices_are_not_assigned():
    assert assigned({1: {"x": 1.0}, 2: {"y": 5.0, "z": 6.0}, 3: {"x": 1.0, "y": 9.0}}) == {1: "x", 2: "y", 3: "x"}


def test_the_number_of_segments_is_limited():
    times = {m: {"x": 1.0 + m % 2, "y": 2.0 - m % 2} for m in range(60)}
    changes = sum(x != y for x, y in zip(assigned(times).values(), list(assigned(times).values())[1:], strict=False))
    assert changes < MOST_SEGMENTS


def test_the_limit_of_segments_is_reached():
    times = {m: {"x": 1.0 + m % 2, "y": 2.0 - m % 2} for m in range(17)}
    for count, most in ((16, 16), (17, 15)):
        names = list(assigned({m: times[m] for m in range(count)}).values())
        assert 1 + sum(x != y for x, y in pairwise(names)) <= most
    assert list(assigned({m: times[m] for m in range(16)}).values()) == ["x", "y"] * 8


def test_assigned_choices_minimize_losses_and_changes():
    """The result equals the best of all possible sequences."""

    def cost(times: dict[int, dict[str, float]], names: tuple[str, ...]) -> float:
        losses = (math.log(here[name] / min(here.values())) for here, name in zip(times.values(), names, strict=True))
        return sum(losses) + 0.02 * sum(x != y for x, y in pairwise(names))

    generator = random.Random(3)
    for _ in range(60):
        times = {m: {name: 1 + generator.random() / 20 for name in "xyz"} for m in range(5)}
        del times[generator.randrange(5)]["z"]
        least = min(cost(times, names) for names in itertools.product(*times.values()))
        assert cost(times, tuple(assigned(times).values())) == pytest.approx(least)


@pytest.mark.parametrize("crossing", [17, 20, 31])
def test_finds_a_crossover_by_bisection(crossing: int):
    asked: list[int] = []

    def measure(m: int, names: tuple[str, str]) -> dict[str, float]:
        asked.append(m)
        return {"low": 1.0 if m < crossing else 2.0, "high": 2.0 if m < crossing else 1.0}

    known = {16: {"low": 1.0, "high": 2.0}, 32: {"low": 2.0, "high": 1.0}}
    assert find_crossover(16, 32, ("low", "high"), known, measure) == crossing
    assert len(asked) <= 4


@pytest.mark.parametrize(
    ("lower", "upper", "apart", "asked", "found"),
    [
        (1024, 1536, 1, [1281, 1409, 1345, 1313], 1313),  # above multiples of a tile, until there is none in between
        (512, 532, 1, [513], 513),
        (508, 640, 8, [580, 516], 516),  # the first ones of the class above 576 and 512
        (96, 128, 1, [112, 104, 108, 106], 108),  # 3
        (4, 6, 1, [5], 5),
        (4, 5, 1, [], 5),
        (4, 44, 8, [20, 12], 12),  # odd multiples of 4
    ],
)
def test_bisection_stops_at_a_fraction_of_m(lower: int, upper: int, apart: int, asked: list[int], found: int):
    crossing = {1024: 1300, 512: 513, 508: 513, 96: 107, 4: 5}[lower]
    measured: list[int] = []

    def measure(m: int, names: tuple[str, str]) -> dict[str, float]:
        measured.append(m)
        return {"low": 1.0, "high": 1.5} if m < crossing else {"low": 1.5, "high": 1.0}

    known = {lower: {"low": 1.0, "high": 1.5}, upper: {"low": 1.5, "high": 1.0}}
    assert (find_crossover(lower, upper, ("low", "high"), known, measure, apart), measured) == (found, asked)


def test_remaining_ms_go_to_the_choice_that_loses_less():
    known = {1984: {"x": 1.0, "y": 1.1}, 2040: {"x": 1.4, "y": 1.0}}
    assert find_crossover(1984, 2040, ("x", "y"), known, lambda m, names: {"x": 1.4, "y": 1.0}) == 1985
    known = {1985: {"x": 1.0, "y": 1.4}, 2040: {"x": 1.1, "y": 1.0}}
    assert find_crossover(1985, 2040, ("x", "y"), known, lambda *_: pytest.fail("it is near enough")) == 2040


def test_the_first_choice_keeps_ties_and_illegal_ms():
    def measured(here: dict[int, dict[str, float]]) -> int:
        known = {16: {"x": 1.0, "y": 2.0}, 20: {"x": 2.0, "y": 1.0}}
        return find_crossover(16, 20, ("x", "y"), known, lambda m, names: here[m])

    assert measured({18: {"x": 1.0, "y": 1.0}, 19: {"x": 1.2, "y": 1.0}}) == 19
    assert measured({18: {"x": 1.0}, 19: {"x": 5.0}}) == 20
    assert measured({18: {"y": 1.0}, 17: {"y": 9.0}}) == 17


def test_skips_bisection_of_a_cheap_crossover():
    def measure(m: int, names: tuple[str, str]) -> dict[str, float]:
        raise AssertionError("nothing has to be measured")

    assert find_crossover(16, 32, ("x", "y"), {16: {"x": 1.0, "y": 2.0}, 32: {"x": 1.02, "y": 1.0}}, measure) == 32
    assert find_crossover(16, 32, ("x", "y"), {16: {"x": 1.0, "y": 1.01}, 32: {"x": 3.0, "y": 1.0}}, measure) == 17
    assert find_crossover(16, 32, ("x", "y"), {16: {"x": 1.0, "y": 1.01}, 32: {"x": 1.01, "y": 1.0}}, measure) == 32


@pytest.mark.parametrize(("first", "second", "found"), [("x", "torch", 17), ("torch", "x", 18), ("x", "y", 18), ("y", "x", 17)])
def test_torch_wins_ties_at_a_crossover(first: str, second: str, found: int):
    known = {16: {first: 1.0, second: 2.0}, 18: {first: 2.0, second: 1.0}}
    assert find_crossover(16, 18, (first, second), known, lambda *_: {"x": 0.99, "torch": 1.0, "y": 1.0}, baseline="torch") == found


def test_times_of_another_session_are_scaled_to_the_first():
    times = {16: {"x": 10.0, "other": 12.0}, 32: {"x": 20.0, "y": 10.0}}
    find_crossover(16, 32, ("x", "y"), times, lambda m, names: {"x": 20.0, "y": 40.0} if m == 16 else {"x": 2.0, "y": 1.0})
    assert times[16] == {"x": 10.0, "other": 12.0, "y": 20.0}
    times = {16: {"x": 10.0, "z": 40.0}, 32: {"x": 2.0, "y": 1.0}}
    find_crossover(16, 32, ("x", "y"), times, lambda m, names: {"x": 20.0, "z": 5.0, "y": 7.0})
    assert times[16] == {"x": 10.0, "z": 40.0, "y": pytest.approx(14.0)}, "by the mean of the ratios 1/2 and 8"


def test_a_bar_shows_every_segment():
    table = Table(segments=(segment(1, 1), segment(2, 2, "y"), segment(3, 8192, "z", time_us=12.5)))
    assert bar(table, 32) == "██▓▓" + "▒" * 28
    assert bar(table, 4) == "█▓▒▒"
    assert bar(Table(segments=(segment(1, 3),)), 8) == "█" * 8
    lines = table_lines(table)
    assert lines[0].startswith("  1 █")
    assert lines[0].endswith(" 8192")
    assert lines[3].split() == ["▒", "3..8192", "z", "12.50", "µs"]


def test_a_bar_is_logarithmic_in_m():
    table = Table(segments=(segment(8, 15), segment(16, 63, "y")))
    assert bar(table, 30) == "█" * 10 + "▓" * 20
    assert table_lines(table) == [f"  8 {bar(table)} 63", "  █         8..15  x", "  ▓        16..63  y"]


def test_range_results_name_their_source():
    (rows_class,) = row_classes(Problem.mm(2, 24, 16, device_type="cpu"))
    stored = RangeResult(rows_class=rows_class, table=Table(segments=(segment(7, 7),)))
    head, *lines = str(stored).splitlines()
    assert head == "mm Mx24x16 bfloat16 nt on cpu: from the store"
    assert lines == table_lines(stored.table)
    measured = dataclasses.replace(stored, source="measured", seconds=1.25)
    assert str(measured).startswith("mm Mx24x16 bfloat16 nt on cpu: 0 tuned values of M in 1.2 s\n")
    assert str(RangesResult((stored, measured))) == f"{stored}\n\n{measured}"
    assert RangesResult((measured,)).to_json()[0]["source"] == "measured"
