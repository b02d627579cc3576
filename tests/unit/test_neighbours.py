"""What is noticed of other processes beside a measurement."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from gemmtune.device import preset
from gemmtune.timing import cores, neighbours
from gemmtune.timing.neighbours import Watch, disturbance
from gemmtune.timing.rounds import DISTURBED, TIE, spread_of, tie

CPU = preset("avx512")
GPU = preset("sm90")


def test_a_measurement_is_disturbed_by_others_or_by_a_wide_spread() -> None:
    assert disturbance(CPU, "", 0.03) == ""
    assert disturbance(CPU, "", 0.5) == "times of torch spread by 50%"
    assert disturbance(GPU, "2 processes used the GPU", 0.05) == "2 processes used the GPU; times of torch spread by 5%"
    assert disturbance(CPU, "", 0.0, 2700.0) == "a choice took 2700 times as long as when it was ranked"
    assert (disturbance(CPU, "", 0.0, 0.5), disturbance(GPU, "", 0.0, 2700.0)) == ("", "")


def test_torch_is_left_for_a_larger_gain_on_a_busy_machine() -> None:
    assert (tie(), tie(""), tie("a neighbour")) == (TIE, TIE, DISTURBED - 1)


def test_spread_ignores_outliers() -> None:
    assert spread_of([100.0, 100.0, 100.0, 9000.0]) == 0
    assert spread_of([90.0, 100.0, 110.0, 95.0, 105.0]) == pytest.approx(1.4826 * 0.05)


TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Files of /proc and of the cgroups, whose counters a test moves on."""

    def __init__(self, folder: Path, cores: int, cgroup: str = "0::/job") -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.busy_s = dict.fromkeys(range(cores), 5.0)
        self.processes: dict[int, tuple[int, float, float]] = {}
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text(f"{cgroup}\n")
        self.cgroups.mkdir()

    def work(self, seconds: float, *cores: int) -> None:
        for core in cores:
            self.busy_s[core] += seconds

    def process(self, number: int, parent: int, own_s: float, children_s: float = 0.0) -> None:
        self.processes[number] = (parent, own_s, children_s)

    def cgroup(self, path: str, **files: str) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def write(self) -> None:
        lines = [f"cpu{core} {round(s * TICKS)} 0 0 900 7 0 0 0 55 0" for core, s in self.busy_s.items()]
        total = f"cpu  {round(sum(self.busy_s.values()) * TICKS)} 0 0 900 7 0 0 0 55 0"
        (self.proc / "stat").write_text("\n".join([total, *lines, "intr 3 0"]) + "\n")
        for number, (parent, own_s, children_s) in self.processes.items():
            (self.proc / str(number)).mkdir(exist_ok=True)
            times = f"{round(own_s * TICKS)} 0 {round(children_s * TICKS)} 0"
            (self.proc / str(number) / "stat").write_text(f"{number} (a) b) S {parent} 1 1 0 -1 0 0 0 0 0 {times} 20 0\n")


@dataclasses.dataclass(kw_only=True)
class Case:
    """What happens within two seconds. ``affinity`` are the cores of this process, number 10."""

    seen: str
    affinity: set[int]
    others: dict[int, float] = dataclasses.field(default_factory=dict)
    """Seconds of other processes by core."""
    ours_s: float = 0.0
    children_s: float = 0.0
    ended_s: float = 0.0
    quota: str = ""
    throttled: tuple[int, int] = (0, 0)


FOUR, NEIGHBOURS = set(range(4)), dict.fromkeys(range(4, 16), 2.0)
CASES = {
    "quiet": Case(seen="", affinity=FOUR),
    "all cores and half of them busy": Case(seen="other processes used 50% of the cores", affinity=FOUR, others={0: 2, 1: 2}),
    "a little work": Case(seen="", affinity=FOUR, others={0: 1}),
    "a pinned job whose core is shared": Case(seen="other processes used 75% of the cores", affinity={3}, others={3: 1.5}),
    "a pinned job on a busy host": Case(seen="", affinity={2, 3}, others=NEIGHBOURS),
    "our own threads": Case(seen="", affinity=FOUR, ours_s=8),
    "our children": Case(seen="", affinity=FOUR, ours_s=2, children_s=6),
    "our children that have ended": Case(seen="", affinity=FOUR, ours_s=1, ended_s=6.5),
    "ours and others": Case(seen="other processes used 25% of the cores", affinity=FOUR, others={0: 2}, ours_s=2, children_s=4),
    "a quota of two cores, others beside them": Case(seen="", affinity=set(range(16)), others=NEIGHBOURS, quota="200000 100000"),
    "a quota without room": Case(
        seen="other processes used 50% of the cores", affinity=FOUR, others={0: 2, 1: 2, 2: 2}, quota="200000 100000"
    ),
    "a quota that is used up": Case(
        seen="the CPU quota was used up in 40% of its periods", affinity=FOUR, ours_s=4, quota="200000 100000", throttled=(20, 8)
    ),
    "a quota that is hardly ever used up": Case(seen="", affinity=FOUR, quota="200000 100000", throttled=(20, 2)),
    "no quota": Case(seen="", affinity=FOUR, quota="max 100000", throttled=(20, 20)),
}


@pytest.mark.parametrize("kind", ["v2", "v2 seen from outside", "v1", "no cgroups"])
def test_a_watch_looks_at_the_cores_of_this_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = {
        "v2": "0::/job/inner",
        "v2 seen from outside": "0::/docker/1f0",
        "v1": "3:cpu,cpuacct:/job",
        "no cgroups": "1:name=x:/",
    }
    folders = {"v2": "job", "v2 seen from outside": "", "v1": "cpu,cpuacct/job", "no cgroups": "elsewhere"}
    clock = [100.0]
    monkeypatch.setattr(cores.time, "monotonic", lambda: clock[0])
    for number, (name, case) in enumerate(CASES.items()):
        if kind == "no cgroups" and case.quota:
            continue  # nothing says that there is one
        machine = Machine(tmp_path / f"{kind} {number}", 16, cgroup[kind])
        monkeypatch.setattr(cores, "PROC", machine.proc)
        monkeypatch.setattr(cores, "CGROUPS", machine.cgroups)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _, case=case: case.affinity)
        if case.quota and kind == "v1":
            limit, period = case.quota.replace("max", "-1").split()
            machine.cgroup(
                folders[kind], cpu__cfs_quota_us=limit, cpu__cfs_period_us=period, cpu__stat="nr_periods 3\nnr_throttled 1"
            )
        elif case.quota:
            machine.cgroup(folders[kind], cpu__max=case.quota, cpu__stat="usage_usec 4\nnr_periods 3\nnr_throttled 1")
        machine.process(10, 1, 3.0)
        machine.process(11, 10, 1.0)
        machine.process(12, 11, 1.0)
        machine.process(77, 1, 1.0)
        machine.write()
        watch = Watch(CPU, 10)
        machine.work((case.ours_s + case.children_s + case.ended_s) / len(case.affinity), *case.affinity)
        for core, seconds in case.others.items():
            machine.work(seconds, core)
        machine.process(10, 1, 3.0 + case.ours_s, case.ended_s)
        machine.process(12, 11, 1.0 + case.children_s)
        machine.process(77, 1, 1.0 + sum(case.others.values()))
        if case.quota:
            periods, throttled = case.throttled
            machine.cgroup(folders[kind], cpu__stat=f"nr_periods {3 + periods}\nnr_throttled {1 + throttled}")
        machine.write()
        clock[0] += 2.0
        assert watch.seen() == case.seen, (kind, name)


def test_where_linux_tells_nothing_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROC", "CGROUPS"):
        monkeypatch.setattr(cores, name, tmp_path / "missing")
    assert Watch(CPU).seen() == ""
    machine = Machine(tmp_path / "renumbered", 2)  # as in a container that shows its own cores alone
    monkeypatch.setattr(cores, "PROC", machine.proc)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {40, 41})
    machine.write()
    before = cores.read(10)
    machine.work(1.5, 0, 1)
    machine.write()
    after = dataclasses.replace(cores.read(10), wall_s=before.wall_s + 2, ours_s=before.ours_s)
    assert after.others_share(before) == pytest.approx(0.75)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_a_process_may_end_while_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path, **words: Any) -> os.stat_result:
        if path.parent.name.isdecimal():
            raise ProcessLookupError(errno.ESRCH, "No such process", str(path))
        return os.stat(path, **words)

    monkeypatch.setattr(Path, "stat", stat)
    assert os.getpid() in cores.tree(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_children_of_this_process_are_no_others() -> None:
    before = cores.read(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while (alive := cores.read(os.getpid())).ours_s - before.ours_s < 0.1:
            time.sleep(0.02)
        assert child.pid in cores.tree(os.getpid())
        child.kill()
    ended = cores.read(os.getpid())
    assert ended.ours_s >= alive.ours_s - 0.02, "the time of a child that has ended stays ours"


def test_the_wait_for_a_quiet_machine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when the machine is quiet, or after its bound, and says once what it waits for."""
    for quiet_after, waits, told in ((0, 0, 0), (3, 3, 1), (10**9, 120, 1)):
        clock, texts = [0.0], []
        busy = iter([True] * min(quiet_after, 1000) + [False])
        monkeypatch.setattr(
            neighbours, "Watch", lambda _, busy=busy: types.SimpleNamespace(seen=lambda: "a neighbour" * next(busy))
        )
        monkeypatch.setattr(neighbours.time, "monotonic", lambda clock=clock: clock[0])
        monkeypatch.setattr(neighbours.time, "sleep", lambda s, clock=clock: clock.__setitem__(0, clock[0] + s))
        neighbours.wait_until_quiet(CPU, texts.append)
        assert (clock[0], len(texts)) == (waits, told)
        assert all(text == "waiting up to 120 s for a quiet machine: a neighbour" for text in texts)


OWN, CHILD = 21, 22


class _Sample(types.SimpleNamespace):
    pid: int
    smUtil: int


@pytest.mark.parametrize(
    ("samples", "seen"),
    [
        ([(7, 90)], ""),
        ([(7, 90), (8, 3)], ""),
        ([(7, 90), (8, 30), (8, 20)], "2 processes used the GPU"),
        ([], ""),
        ([(OWN, 90), (CHILD, 90)], ""),
        ([(OWN, 90), (CHILD, 90), (8, 90)], "2 processes used the GPU"),
    ],
)
def test_several_processes_on_a_gpu_are_seen(samples: list[tuple[int, int]], seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetProcessUtilization=lambda handle, since: [_Sample(pid=pid, smUtil=share) for pid, share in samples],
    )
    monkeypatch.setattr(cores, "tree", lambda root: {OWN: 1.0, CHILD: 1.0})
    monkeypatch.setattr(neighbours.importlib, "import_module", lambda name: nvml)
    monkeypatch.setattr(neighbours.torch.cuda, "_get_pynvml_handler", lambda index: index, raising=False)
    assert Watch(GPU).seen() == seen


def test_without_nvml_nothing_is_seen_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Watch(GPU).seen() == ""
