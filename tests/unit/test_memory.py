"""Memory that operands need against what is free: of the host, of cgroups; and the errors of what is too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import Problem, cli
from gemmtune.bounded import Bounded
from gemmtune.device import detect
from gemmtune.errors import ShortMemoryError
from gemmtune.timing import cores, memory

GIB = 2**30
V1 = "memory/{}memory.limit_in_bytes", "memory/{}memory.usage_in_bytes"
CGROUPS = {
    "no limit": ("0::/j", {"j/memory.max": "max", "j/memory.current": "5"}, 8 * GIB),
    "v2": ("0::/j", {"j/memory.max": "99", "j/memory.current": "90", "j/memory.stat": "anon 7\ninactive_file 3"}, 12),
    "v2 around it": ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "20", "a/memory.current": "30"}, 0),
    "v1": ("4:memory:/j", {V1[0].format("j/"): "99", V1[1].format("j/"): "12"}, 87),
    "v1 seen from outside": ("4:memory:/elsewhere", {V1[0].format(""): "99", V1[1].format(""): "9"}, 90),
    "none": ("1:name=x:/", {}, 8 * GIB),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_free_bytes_of_host_and_cgroups(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup, files, free = CGROUPS[kind]
    written = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB", "proc/self/cgroup": cgroup}
    for name, text in (written | {f"cgroup/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    assert memory.free_bytes(detect("cpu")) == free


def test_free_bytes_are_unknown_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PROC", tmp_path)
    assert memory.free_bytes(detect("cpu")) is None
    memory.require_memory("anything", 2**60, detect("cpu"))


HUGE = Problem.mm(100_000, 100_000, 100_000, dtype=torch.float32, device_type="cpu")
CALLS: dict[str, Callable[[], object]] = {
    "a problem": lambda: gemmtune.tune(HUGE, progress=False),
    "a range": lambda: gemmtune.tune(HUGE, m=(1, 100_000), progress=False),
}


@pytest.mark.parametrize("call", CALLS)
def test_tune_refuses_what_does_not_fit(call: str, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20 * GIB)
    with pytest.raises(ShortMemoryError, match=r"got 21,474,836,480 bytes .* expected at least 360,000,000,000 for"):
        CALLS[call]()


def test_a_call_runs_by_torch_where_tuning_does_not_fit(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 9)
    monkeypatch.setattr(memory, "SMALL_BYTES", 8)
    a, b = torch.ones(4, 24), torch.ones(24, 8)
    with (
        gemmtune.settings.patch(tune="on_miss"),
        pytest.warns(UserWarning, match="cannot be tuned: .*free memory(?s:.)*torch runs instead"),
    ):
        assert torch.equal(gemmtune.mm(a, b), a @ b)


COMMANDS = {
    "tune": (["tune", "100000x100000x100000", "--device", "cpu"], 1),
    "perf-gate": (["perf-gate", "100000x100000x100000", "--device", "cpu"], 2),
    "conformance": (["conformance", "backend:aten", "--device", "cpu", "--repro", "bound:mm-f32-100000x100000x100000"], 2),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_what_does_not_fit(
    command: str, own_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20 * GIB)
    words, status = COMMANDS[command]
    assert cli.run(words) == status
    assert "got 21,474,836,480 bytes of free memory on cpu, expected at least" in "".join(capsys.readouterr())


def test_a_full_cache_is_emptied_by_a_further_entry() -> None:
    cache = Bounded[str, int](2)
    cache["a"], cache["b"] = 1, 2
    assert cache == {"a": 1, "b": 2}
    cache["c"] = 3
    assert cache == {"c": 3}
