"""Timing: planted differences are found, operands rotate, rounds are fair. No values are judged here."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from gemmtune.device import MIB, detect
from gemmtune.problem import Problem
from gemmtune.problem.rows import with_rows
from gemmtune.timing.contenders import Contender, CpuContender, _later
from gemmtune.timing.rotation import Rotation, cache_bytes, set_count
from gemmtune.timing.rounds import TIE, Ranked, play
from gemmtune.timing.timer import median_margin

SHIPPED_COUNT = inspect.unwrap(set_count)
"""Function without the limit of the other tests (``worker_server.MOST_SETS``)."""


@pytest.fixture(autouse=True)
def _as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.timing.rotation.set_count", SHIPPED_COUNT)


def busy(seconds: float) -> Callable[[], None]:
    """Work of a fixed length by the clock, whatever else the machine does."""

    def work() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return work


def test_a_call_begins_after_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(10_000, 1000)
    monkeypatch.setattr("gemmtune.timing.contenders.time", SimpleNamespace(perf_counter_ns=clock.__next__))
    assert _later(clock.__next__, host_us=5.0)() == 16_000


def test_a_planted_difference_of_20_percent_is_found() -> None:
    ranked = play({"slow": CpuContender([busy(120e-6)]), "fast": CpuContender([busy(100e-6)])}, warm_up_s=0.02, budget_s=0.4)
    assert ranked["slow"].time_us / ranked["fast"].time_us == pytest.approx(1.2, rel=0.05)
    assert ranked["slow"].time_us - ranked["fast"].time_us > ranked["slow"].margin_us + ranked["fast"].margin_us


def test_a_planted_difference_of_3_percent_is_found() -> None:
    ranked = play({f"{100 + extra}": CpuContender([busy((100 + extra) * 1e-6)]) for extra in (3, 0)}, warm_up_s=0.02, budget_s=0.4)
    assert ranked["103"].time_us > ranked["100"].time_us


def test_equal_contenders_tie_within_their_margins_or_one_percent() -> None:
    ranked = play({name: CpuContender([busy(100e-6)]) for name in "abcd"}, warm_up_s=0.02, budget_s=0.4)
    times = [r.time_us for r in ranked.values()]
    assert max(times) / min(times) - 1 < 0.01 + max(r.margin_us for r in ranked.values()) / min(times)


def test_time_of_a_call_in_microseconds() -> None:
    contender = CpuContender([busy(500e-6)])
    assert min(contender.sample_us() for _ in range(30)) == pytest.approx(500, rel=0.05)


def test_a_batch_of_short_calls_takes_the_operand_sets_in_turn() -> None:
    seen: list[int] = []
    contender = CpuContender([lambda i=i: seen.append(i) for i in range(3)])  # type: ignore[misc]
    contender.sample_us()
    assert len(seen) > 100
    assert seen == [i % 3 for i in range(len(seen))]


class Planned(Contender):
    """Times from a list, with the order of the calls written down."""

    def __init__(self, name: str, times: list[float], order: list[str]) -> None:
        self.name, self.times, self.order = name, times, order
        self.rough_us = times[0]
        self.count = 0

    def begin(self) -> None:
        self.order.append(self.name)

    def result_us(self) -> float:
        self.count += 1
        return self.times[(self.count - 1) % len(self.times)]


def played(contenders: Mapping[str, Contender], **words: Any) -> dict[str, Ranked]:
    """Play rounds by a clock of its own, whatever else the machine does: a millisecond passes at each look."""
    looks = itertools.count()
    with mock.patch("gemmtune.timing.rounds.time", SimpleNamespace(perf_counter=lambda: next(looks) * 1e-3)):
        return play(contenders, **words)


def test_rounds_reverse_their_order_and_come_in_pairs() -> None:
    order: list[str] = []
    played({n: Planned(n, [1.0, 1.2, 0.9, 1.1, 1.3], order) for n in "abc"}, budget_s=0)
    assert "".join(order) == "abccba"


def test_shared_clock_drift_cancels() -> None:
    """Clocks fall by half during the rounds, and the 2% difference stays exact."""
    drift = [1 + i / 20 for i in range(20)]
    order: list[str] = []
    contenders = {"a": Planned("a", [100 * d for d in drift], order), "b": Planned("b", [102 * d for d in drift], order)}
    ranked = played(contenders, budget_s=0.01)
    assert ranked["b"].time_us / ranked["a"].time_us == pytest.approx(1.02, rel=1e-9)
    assert ranked["b"].margin_us == pytest.approx(0, abs=1e-9)


def test_losers_drop_out_unless_kept() -> None:
    times = {"best": [100, 101, 99, 102, 98.0], "kept": [300, 301, 299.0], "lost": [200, 201, 199.0]}
    order: list[str] = []
    ranked = played({n: Planned(n, t, order) for n, t in times.items()}, budget_s=0.02, keep={"kept"})
    assert order.count("lost") == 4
    assert order.count("kept") == order.count("best") == 10
    assert ranked["lost"].time_us == pytest.approx(200, rel=0.05)


def test_undecided_contenders_play_on_after_the_first_rounds() -> None:
    times = {f"{t}": [float(t), t + 0.1, t - 0.1] for t in (100, 101, 102, 104, 105)}
    order: list[str] = []
    ranked = played({n: Planned(n, t, order) for n, t in times.items()}, budget_s=0.02)
    assert [order.count(n) > 4 for n in times] == [True, True, True, False, False]
    assert ranked["105"].time_us == pytest.approx(105, rel=0.01)
    order.clear()
    noisy = {"a": [100, 130, 90, 110, 95.0], "b": [106, 100, 120, 96, 115.0]}
    played({n: Planned(n, t, order) for n, t in noisy.items()}, budget_s=0.02)
    assert order.count("b") == order.count("a") > 4


def test_disturbed_samples_do_not_count() -> None:
    times = {"fast": [100, 1700, 101, 2500, 99, 1600, 100.5, 1900, 900.0], "slow": [110, 111, 109, 112, 108.0]}
    ranked = played({n: Planned(n, t, []) for n, t in times.items()}, budget_s=0.02)
    assert ranked["slow"].time_us / ranked["fast"].time_us == pytest.approx(1.1, rel=0.02)
    assert ranked["fast"].time_us == pytest.approx(100, rel=0.02)
    assert ranked["fast"].spread > 0.5


@pytest.mark.turn(6, 8)
@pytest.mark.parametrize("disturbed", [0.0, 0.3])
def test_repeated_rounds_pick_the_same(disturbed: float) -> None:
    """Samples vary by 2%, some are ten times longer, and the pick among close contenders is the first of a tie."""
    true_us = {"aten": 150.0, "a": 109.0, "b": 101.0, "c": 100.0, "d": 104.0}
    picks = []
    for seed in range(30):
        chance = random.Random(seed)

        def samples(middle: float, chance: random.Random = chance) -> list[float]:
            burst = (10.0 if chance.random() < disturbed else 1.0 for _ in range(400))
            return [middle * chance.lognormvariate(0, 0.02) * factor for factor in burst]

        ranked = played({n: Planned(n, samples(t), []) for n, t in true_us.items()}, budget_s=0.05)
        best_us = min(r.time_us for r in ranked.values())
        picks.append(next(n for n in true_us if ranked[n].time_us <= (1 + TIE) * best_us))
    assert picks.count("b") >= 28, picks


def test_dropout_at_higher_clocks_is_not_the_fastest() -> None:
    """Its first rounds took less time than the last rounds of faster contenders."""
    drift = [1.0, 1.0, 1.0, 1.0] + [1.2] * 40
    order: list[str] = []
    contenders = {n: Planned(n, [t * d for d in drift], order) for n, t in (("a", 100.0), ("b", 101.0), ("c", 110.0))}
    ranked = played(contenders, budget_s=0.01)
    assert order.count("c") < order.count("a")
    assert ranked["c"].time_us == pytest.approx(1.1 * ranked["a"].time_us)


def test_dropout_is_no_faster_than_it_ever_was() -> None:
    """The later reference waited for another process in all rounds of the dropout."""
    samples = {"a": [100.0], "b": [150.0], "late": [5000.0] * 4 + [50.0] * 400}
    ranked = played({n: Planned(n, times, []) for n, times in samples.items()}, budget_s=0.02, keep=["late"])
    assert ranked["b"].time_us >= 120 > ranked["late"].time_us
    with_host = played({n: Planned(n, times, []) for n, times in samples.items()}, budget_s=0.02, keep=["late"], host_us=140.0)
    assert with_host["b"].time_us == pytest.approx(148), "a fifth of its 10 µs, and none of the host's"


def test_rounds_end_early_when_all_is_settled() -> None:
    order: list[str] = []
    played({n: Planned(n, [t], order) for n, t in (("a", 100.0), ("b", 110.0))}, budget_s=60)
    assert order.count("a") == 10


def test_median_margin() -> None:
    assert median_margin([1.0, 2.0]) == (1.5, 1.0)
    assert median_margin([3.0]) == (3.0, 3.0)
    generator = torch.Generator().manual_seed(0)
    medians, margins = zip(*(median_margin(torch.randn(25, generator=generator).tolist()) for _ in range(400)), strict=True)
    covered = sum(abs(middle) <= margin for middle, margin in zip(medians, margins, strict=True)) / 400
    assert 0.92 < covered <= 1


@pytest.mark.parametrize(
    ("set_bytes", "least_bytes", "budget_bytes", "count"),
    [
        (6 * MIB, 120 * MIB, 4096 * MIB, 21),
        (900 * MIB, 120 * MIB, 4096 * MIB, 1),
        (1, 120 * MIB, 4096 * MIB, 256),
        (6 * MIB, 120 * MIB, 32 * MIB, 5),
        (900 * MIB, 120 * MIB, 100 * MIB, 1),
        (0, 120 * MIB, 4096 * MIB, 256),
    ],
)
def test_set_count(set_bytes: int, least_bytes: int, budget_bytes: int, count: int) -> None:
    assert SHIPPED_COUNT(set_bytes, least_bytes, budget_bytes) == count


def test_operand_sets_share_values_and_no_memory() -> None:
    device = detect("cpu")
    problem = Problem.addmm(256, 512, 1024, dtype=torch.float32, layout="nt", device_type="cpu")
    sets = Rotation(problem, device).sets
    assert len(sets) * problem.bytes > 4 * cache_bytes(device)
    for other in sets[1:]:
        assert torch.equal(other.a, sets[0].a)
        assert torch.equal(other.b, sets[0].b)
        assert other.inp is not None
        assert other.b.stride() == sets[0].b.stride()
    pointers = {t.data_ptr() for s in sets for t in (s.a, s.b, s.out, s.inp) if t is not None}
    assert len(pointers) == 4 * len(sets)
    assert float(sets[0].a.std()) > 0.1


def test_problems_with_fewer_rows_share_common_operands() -> None:
    device = detect("cpu")
    whole = Problem.addmm(64, 512, 1024, dtype=torch.float32, bias="n", device_type="cpu")
    part = with_rows(whole, 3)
    rotation = Rotation(whole, device)
    found = rotation.of_rows(part)
    assert len(found) * part.bytes > 4 * cache_bytes(device) or len(found) == 256
    for few, many in zip(found, rotation.sets, strict=False):
        assert (few.b is many.b, few.inp is many.inp) == (True, True)
        assert (few.a.shape, few.out.shape) == ((3, 1024), (3, 512))
        assert torch.equal(few.a, many.a[:3])
    assert len({s.a.data_ptr() for s in (*found, *rotation.sets)}) == len(found) + len(rotation.sets), "of a each set has its own"
    pack = mock.Mock(side_effect=lambda b: b.t().contiguous())
    packed = [rotation.packed(sets, mock.Mock(packed_format="turned", pack=pack)) for sets in (found, rotation.sets, found[:1])]
    assert pack.call_count == 1, "a weight is packed once, whatever the rows"
    assert packed[0][0].b is packed[1][0].b is packed[2][0].b
    assert torch.equal(packed[0][-1].b, found[0].b.t())


def test_operand_sets_of_repeated_and_offset_layouts() -> None:
    problem = Problem.mm(64, 32, 16, dtype=torch.float32, layout="nn", device_type="cpu")
    repeated = dataclasses.replace(problem, a=dataclasses.replace(problem.a, stride=(0, 1), offset=1))
    first, second = Rotation(repeated, detect("cpu")).sets[:2]
    assert first.a.stride() == second.a.stride() == (0, 1)
    assert torch.equal(first.a, second.a)
    assert first.a.data_ptr() % 16 == second.a.data_ptr() % 16 == 4
