"""The measured limits of the machine, and the least time of a problem that follows from them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.device import MIB, detect, preset
from gemmtune.problem import Precision, Problem
from gemmtune.selector import machine_limits
from gemmtune.selector.machine_limits import LIMITS, MachineLimits
from gemmtune.selector.progress import Progress
from gemmtune.settings import Settings
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Store
from gemmtune.timing.limits import Limits, fma_gflops, least_work, limit_names, limit_us, measure_limits

VALUES = {"bandwidth_gbps": 50.0, "float32_gflops": 500.0}


@pytest.mark.parametrize(
    ("m", "n", "k", "expected_us"),
    [
        (1, 4096, 4096, (4096 * 4096 + 2 * 4096) * 4 / 50e9 * 1e6),
        (4096, 4096, 4096, 2 * 4096**3 / 500e9 * 1e6),
    ],
    ids=["memory-bound", "compute-bound"],
)
def test_limit_us_is_the_slower_of_memory_and_arithmetic(m: int, n: int, k: int, expected_us: float) -> None:
    assert limit_us(Problem.mm(m, n, k, dtype=torch.float32, device_type="cpu"), VALUES) == pytest.approx(expected_us)


def test_limit_us_without_a_measurement_is_none() -> None:
    assert limit_us(Problem.mm(8, 8, 8, dtype=torch.bfloat16, device_type="cpu"), VALUES) is None
    assert limit_us(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"), {}) is None


def test_tf32_has_a_separate_limit() -> None:
    problem = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))
    assert limit_names(problem.dtype_label) == ("bandwidth_gbps", "tf32_gflops")


LABELS = ("float32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.turn(3, 8)
@pytest.mark.parametrize("label", rotated(LABELS, 3, "limits"))
def test_measure_limits_gives_plausible_numbers_quickly(label: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with settings.patch(cache_dir=str(tmp_path)):
        begun = time.process_time()
        found = measure_limits(detect("cpu"), label)
    assert time.process_time() - begun < 20
    assert set(found) == set(limit_names(label))
    assert 0.5 < found["bandwidth_gbps"] < 5000
    assert 0.5 < found[f"{label}_gflops"] < 500_000
    assert torch.equal(torch.get_rng_state(), before)


def test_known_limits_are_not_measured_again() -> None:
    assert measure_limits(detect("cpu"), "float32", VALUES) == {}


def test_fma_loop_is_compiled_once(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        first = fma_gflops(detect("cpu"), "float")
        made = list(tmp_path.glob("limits/*.so"))
        second = fma_gflops(detect("cpu"), "float")
    assert first is not None
    assert second is not None
    assert [p.stat().st_mtime_ns for p in made] == [p.stat().st_mtime_ns for p in tmp_path.glob("limits/*.so")]
    assert len(made) == 1


def test_rate_comes_from_torch_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with settings.patch(cache_dir=str(tmp_path)):
        assert fma_gflops(detect("cpu"), "float") is None
        assert measure_limits(detect("cpu"), "float32", {"bandwidth_gbps": 1.0})["float32_gflops"] > 0.5


class FakeSession:
    """Session that measures given limits, in the order of its calls, on a machine that is busy or not."""

    def __init__(self, *found: tuple[float, float, str]) -> None:
        self.found = list(found)
        self.asked: list[set[str]] = []

    def limits(self, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
        bandwidth, rate, why = self.found.pop(0)
        values = {"bandwidth_gbps": bandwidth, "float32_gflops": rate}
        self.asked.append(values.keys() - known.keys())
        return {name: value for name, value in values.items() if name not in known}, why


CPU = dataclasses.replace(detect("cpu"), type="cpu", l3_bytes=32 * MIB, isa=("avx2", "fma"))
PROBLEM = Problem.mm(1, 4096, 4096, dtype=torch.float32, device_type="cpu")
BOTH = {"bandwidth_gbps", "float32_gflops"}


def machine(monkeypatch: pytest.MonkeyPatch, store: Store, session: FakeSession, seen: str = "", **changes: Any) -> MachineLimits:
    """Return the limits of a new tuning. ``seen`` is what others do while it looks at the machine."""
    monkeypatch.setattr(machine_limits, "open_session", lambda *_: contextlib.nullcontext(session))
    monkeypatch.setattr(machine_limits, "Watch", lambda *_: types.SimpleNamespace(seen=lambda: seen))
    return MachineLimits(CPU, Settings(**changes), store)


def test_limits_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Told(Progress):
        stages: ClassVar[list[tuple[str, int, int]]] = []

        def stage(self, name: str, done: int, total: int) -> None:
            self.stages.append((name, done, total))

    store, session = Store.open(tmp_path / "store.sqlite"), FakeSession((12.0, 34.0, ""))
    for _ in range(2):
        machine(monkeypatch, store, session).ensure(PROBLEM, Told())
    assert store.limits(fingerprint_text(CPU, LIMITS)) == {"bandwidth_gbps": 12.0, "float32_gflops": 34.0}
    assert Told.stages == [("limits of this machine", 0, 1), ("limits of this machine", 1, 1)]


def test_disturbed_limits_are_marked_and_measured_again_once_it_is_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, session = Store.open(tmp_path / "store.sqlite"), FakeSession((2.9, 40.0, "a neighbour"), (30.0, 100.0, ""))
    first = machine(monkeypatch, store, session)
    first.ensure(PROBLEM, Progress())
    assert first.known() == Limits(values={"bandwidth_gbps": 2.9, "float32_gflops": 40.0}, disturbed=frozenset(BOTH))
    first.ensure(PROBLEM, Progress())
    for seen, changes in (("a neighbour", {}), ("", {"busy": "accept"})):
        machine(monkeypatch, store, session, seen, **changes).ensure(PROBLEM, Progress())
    machine(monkeypatch, store, session).ensure(PROBLEM, Progress(), again=False)
    assert len(session.asked) == 1, "not in the same tuning, on a busy machine, if busy ones are accepted, or if all else is stored"
    later = machine(monkeypatch, store, session)
    later.ensure(PROBLEM, Progress())
    assert later.known() == Limits(values={"bandwidth_gbps": 30.0, "float32_gflops": 100.0})
    assert not later.known().disturbed_for(PROBLEM)


def test_force_measures_limits_again_once_a_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store.sqlite")
    session = FakeSession((30.0, 100.0, ""), (20.0, 90.0, ""), (5.0, 120.0, "a neighbour"))
    machine(monkeypatch, store, session).ensure(PROBLEM, Progress())
    forced = machine(monkeypatch, store, session, tune="force")
    for _ in range(2):
        forced.ensure(PROBLEM, Progress())
    assert forced.known().values == {"bandwidth_gbps": 20.0, "float32_gflops": 90.0}
    busy = machine(monkeypatch, store, session, tune="force")
    busy.ensure(PROBLEM, Progress())
    assert busy.known() == Limits(values={"bandwidth_gbps": 20.0, "float32_gflops": 120.0}), "other work only lowers a limit"
    assert session.asked == [BOTH] * 3


SURE_US = limit_us(PROBLEM, {"bandwidth_gbps": 30.0, "float32_gflops": 100.0}) or 0.0


@pytest.mark.parametrize(
    ("found", "times", "torch_us", "refused", "bandwidth"),
    [
        # A time at the limit is right, and one that beats it a little raises it.
        ([(30, 100, "")], {"a": SURE_US}, 2 * SURE_US, [], 30),
        ([(30, 100, "")], {"a": SURE_US / 1.5}, 2 * SURE_US, [], 45),
        # Far below, the limits are measured again, once.
        ([(30, 100, ""), (31, 100, "")], {"a": SURE_US / 10, "b": SURE_US}, 2 * SURE_US, ["a"], 31),
        ([(30, 100, ""), (200, 100, "")], {"a": SURE_US / 5}, 2 * SURE_US, [], 200),
        # Limits of a busy machine have a larger margin.
        ([(30, 100, "x"), (30, 100, "x")], {"a": SURE_US / 15}, 2 * SURE_US, [], 450),
        ([(30, 100, "x"), (30, 100, "x")], {"a": SURE_US / 30}, 2 * SURE_US, ["a"], 30),
        # Torch's own operation is believed.
        ([(3, 100, "")], {"a": SURE_US}, SURE_US, [], 30),
        ([(30, 100, ""), (30, 100, "")], {"a": 0.01}, None, ["a"], 30),
    ],
)
def test_times_below_the_limits_are_refused_and_others_raise_them(
    found: list[tuple[float, float, str]], times: dict[str, float], torch_us: float | None, refused: list[str], bandwidth: float,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    store, session = Store.open(tmp_path / "store.sqlite"), FakeSession(*found)
    machine(monkeypatch, store, session).ensure(PROBLEM, Progress())
    limits = machine(monkeypatch, store, session)
    reasons = limits.too_fast(session, PROBLEM, times, torch_us)  # type: ignore[arg-type]
    assert list(reasons) == refused
    for reason in reasons.values():
        assert re.search(r"took .* µs, which no hardware with these limits can: at least .* µs by bandwidth_gbps", reason)
    assert limits.known().values["bandwidth_gbps"] == pytest.approx(bandwidth, rel=1e-3)


def test_without_limits_only_a_suspect_time_has_them_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, session = Store.open(tmp_path / "store.sqlite"), FakeSession((30.0, 100.0, ""))
    limits = machine(monkeypatch, store, session)
    assert limits.too_fast(session, PROBLEM, {"a": SURE_US}, 1.5 * SURE_US) == {}  # type: ignore[arg-type]
    assert session.asked == []
    assert list(limits.too_fast(session, PROBLEM, {"a": SURE_US / 100}, 3 * SURE_US)) == ["a"]  # type: ignore[arg-type]
    assert session.asked == [BOTH], "measured in this tuning, so not again"


def test_no_limit_rules_out_what_a_product_does_not_need() -> None:
    """Bandwidth of operands in a cache, of groups without rows and of absent blocks, and rates of other instructions."""
    gpu = preset("sm90")
    small, large = (Problem.mm(64, 64, k, dtype=torch.float32, device_type="cpu") for k in (64, 65536))
    assert (limit_us(small, VALUES, CPU), limit_us(small, VALUES)) == (
        pytest.approx(small.flops / 500e3), pytest.approx(max(small.bytes / 50e3, small.flops / 500e3))
    )  # fmt: skip
    assert limit_us(large, VALUES, CPU) == limit_us(large, VALUES)
    grouped = Problem.grouped_mm(16, 768, 2048, groups=128, dtype=torch.bfloat16, device_type="cuda")
    assert least_work(grouped)[0] < grouped.bytes / 7
    sparse = Problem.bsr_mm(64, 256, 256, dtype=torch.float32, block=64, density=0.05, device_type="cpu")
    assert least_work(sparse)[1] == 0
    zero = dataclasses.replace(Problem.addmm(64, 64, 64, dtype=torch.float32, device_type="cpu"), alpha="zero")
    assert least_work(zero) == (0, 0)
    known = Limits(values={"bandwidth_gbps": 50.0, "float32_gflops": 500.0, "int8_gflops": 500.0, "bfloat16_gflops": 500.0})
    square = Problem.mm(1024, 1024, 1024, dtype=torch.float32, device_type="cpu")
    assert known.least_us(square, CPU) == pytest.approx(square.flops / 1e6)
    assert known.least_us(square, gpu) == pytest.approx(square.flops / 2e6), "tensor cores by parts"
    integers = Problem.int_mm(1024, 1024, 1024, device_type="cpu")
    fast = dataclasses.replace(CPU, isa=("avx512_vnni",))
    assert known.least_us(integers, fast) == pytest.approx((known.least_us(integers, CPU) or 0) / 4)


def test_only_a_tuning_that_measures_measures_disturbed_limits_again(own_store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(MachineLimits, "ensure", lambda *_, again: asked.append(again))
    with settings.patch(backends=("aten",), tune_in_subprocess=False):
        for _ in range(2):
            gemmtune.tune([Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu")], progress=False)
    assert asked == [True, False]
