"""What is noticed of other processes beside a measurement."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest

from gemmtune.device import detect, preset
from gemmtune.timing import neighbours
from gemmtune.timing.neighbours import Watch, disturbance
from gemmtune.timing.rounds import spread_of

CPU = preset("avx512")
GPU = preset("sm90")


def test_a_measurement_is_disturbed_by_others_or_by_a_wide_spread() -> None:
    assert disturbance(CPU, "", 0.03) == ""
    assert disturbance(CPU, "", 0.5) == "times of torch spread by 50%"
    assert disturbance(GPU, "2 processes used the GPU", 0.05) == "2 processes used the GPU; times of torch spread by 5%"
    assert disturbance(CPU, "", 0.0, 2700.0) == "a choice took 2700 times as long as when it was ranked"
    assert (disturbance(CPU, "", 0.0, 0.5), disturbance(GPU, "", 0.0, 2700.0)) == ("", "")


def test_spread_ignores_outliers() -> None:
    assert spread_of([100.0, 100.0, 100.0, 9000.0]) == 0
    assert spread_of([90.0, 100.0, 110.0, 95.0, 105.0]) == pytest.approx(1.4826 * 0.05)


def test_watch_counts_other_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 100.0, "others": 50.0}
    monkeypatch.setattr(neighbours, "_times", lambda: (clock["wall"], clock["others"]))
    monkeypatch.setattr(neighbours.os, "cpu_count", lambda: 4)
    watch = Watch(CPU)
    clock |= {"wall": 102.0, "others": 51.0}
    assert watch.seen() == ""
    clock["others"] = 54.0
    assert watch.seen() == "other processes used 50% of the cores"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_watch_reads_the_system() -> None:
    before = neighbours._times()
    own = time.process_time()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        while time.process_time() - own < 0.3:
            pass
        time.sleep(0.5)
        other.kill()
    wall_s, others_s = (now - then for now, then in zip(neighbours._times(), before, strict=True))
    assert others_s > 0.1
    assert wall_s > 0.7


class _Sample(types.SimpleNamespace):
    pid: int
    smUtil: int


@pytest.mark.parametrize(
    ("samples", "seen"),
    [([(7, 90)], ""), ([(7, 90), (8, 3)], ""), ([(7, 90), (8, 30), (8, 20)], "2 processes used the GPU"), ([], "")],
)
def test_several_processes_on_a_gpu_are_seen(samples: list[tuple[int, int]], seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetProcessUtilization=lambda handle, since: [_Sample(pid=pid, smUtil=share) for pid, share in samples],
    )
    monkeypatch.setattr(neighbours.importlib, "import_module", lambda name: nvml)
    monkeypatch.setattr(neighbours.torch.cuda, "_get_pynvml_handler", lambda index: index, raising=False)
    assert Watch(GPU).seen() == seen


def test_without_nvml_nothing_is_seen_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Watch(GPU).seen() == ""


def test_a_watch_over_nothing_sees_no_more_than_there_was() -> None:
    assert Watch(detect("cpu")).seen() in ("", *(f"other processes used {share}% of the cores" for share in range(16, 101)))
