"""The measured limits of the machine, and the least time of a problem that follows from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rotation import rotated

from gemmtune import settings
from gemmtune.device import detect
from gemmtune.problem import Precision, Problem
from gemmtune.selector.progress import Progress
from gemmtune.selector.select import ensure_limits
from gemmtune.settings import Settings
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Store
from gemmtune.timing.fma import fma_gflops
from gemmtune.timing.limits import limit_names, limit_us, measure_limits

LIMITS = {"bandwidth_gbps": 50.0, "float32_gflops": 500.0}


@pytest.mark.parametrize(
    ("m", "n", "k", "expected_us"),
    [
        (1, 4096, 4096, (4096 * 4096 + 2 * 4096) * 4 / 50e9 * 1e6),
        (4096, 4096, 4096, 2 * 4096**3 / 500e9 * 1e6),
    ],
    ids=["memory-bound", "compute-bound"],
)
def test_limit_us_is_the_slower_of_memory_and_arithmetic(m: int, n: int, k: int, expected_us: float) -> None:
    assert limit_us(Problem.mm(m, n, k, dtype=torch.float32, device_type="cpu"), LIMITS) == pytest.approx(expected_us)


def test_limit_us_without_a_measurement_is_none() -> None:
    assert limit_us(Problem.mm(8, 8, 8, dtype=torch.bfloat16, device_type="cpu"), LIMITS) is None
    assert limit_us(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"), {}) is None


def test_tf32_has_a_separate_limit() -> None:
    problem = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))
    assert limit_names(problem.dtype_label) == ("bandwidth_gbps", "tf32_gflops")


LABELS = ("float32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("label", rotated(LABELS, 3, "limits"))
def test_measure_limits_gives_plausible_numbers_quickly(label: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with settings.patch(cache_dir=str(tmp_path)):
        begun = time.perf_counter()
        found = measure_limits(detect("cpu"), label)
    assert time.perf_counter() - begun < 20
    assert set(found) == set(limit_names(label))
    assert 0.5 < found["bandwidth_gbps"] < 5000
    assert 0.5 < found[f"{label}_gflops"] < 500_000
    assert torch.equal(torch.get_rng_state(), before)


def test_known_limits_are_not_measured_again() -> None:
    assert measure_limits(detect("cpu"), "float32", LIMITS) == {}


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


def test_limits_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Session:
        def limits(self, known: Mapping[str, float]) -> dict[str, float]:
            return {"bandwidth_gbps": 12.0, "float32_gflops": 34.0}

    class Told(Progress):
        stages: ClassVar[list[tuple[str, int, int]]] = []

        def stage(self, name: str, done: int, total: int) -> None:
            self.stages.append((name, done, total))

    monkeypatch.setattr("gemmtune.selector.select.open_session", lambda *_: contextlib.nullcontext(Session()))
    problem, device, chosen = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"), detect("cpu"), Settings()
    store = Store.open(tmp_path / "store.sqlite")
    for _ in range(2):
        ensure_limits(problem, device, chosen, store, Told())
    assert store.limits(fingerprint_text(device, "limits")) == {"bandwidth_gbps": 12.0, "float32_gflops": 34.0}
    assert Told.stages == [("limits of this machine", 0, 1), ("limits of this machine", 1, 1)]
