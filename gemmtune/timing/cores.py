"""Cores that this process may use, and the work of others on them: affinity, CPU quota and throttling, as Linux counts them."""

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..foreign import text_of

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters of the cores at one moment. Their differences describe the time between two readings."""

    wall_s: float
    cores: int
    """Number of cores that the affinity allows."""
    quota: float
    """Number of cores that the cgroups allow, infinite without a limit."""
    busy_s: float
    """Seconds that the allowed cores worked for anyone, with those that a hypervisor took."""
    ours_s: float
    """Seconds that the process tree worked."""
    periods: tuple[tuple[int, int], ...] = field(default=())
    """Periods of each cgroup with a quota, and those in which it was throttled."""

    def others_share(self, before: "Reading") -> float:
        """Return the share that others had of the cores usable at a time: a quota below the allowed cores leaves them room."""
        wall_s = max(self.wall_s - before.wall_s, 1e-9)
        usable = min(self.cores, self.quota)
        others = max((self.busy_s - before.busy_s) - (self.ours_s - before.ours_s), 0.0) / wall_s
        return min(max(others - (self.cores - usable), 0.0) / max(usable, 1e-9), 1.0)

    def throttled_share(self, before: "Reading") -> float:
        """Return the largest share of its periods in which a cgroup was throttled."""
        parts = [(n - n0, x - x0) for (n, x), (n0, x0) in zip(self.periods, before.periods, strict=False)]
        return max((throttled / count for count, throttled in parts if count > 0), default=0.0)


def read(root: int) -> Reading:
    """Read the counters. ``root`` is the process whose tree counts as ours, and to which this process belongs."""
    allowed = os.sched_getaffinity(0)
    cgroups = list(_cgroups())
    return Reading(
        wall_s=time.monotonic(),
        cores=len(allowed),
        quota=min((cores for cores, _ in cgroups), default=math.inf),
        busy_s=_busy_s(allowed),
        ours_s=sum(tree(root).values()) or time.process_time(),
        periods=tuple(periods for _, periods in cgroups),
    )


def _busy_s(allowed: set[int]) -> float:
    """Return the seconds that these cores worked. Where /proc/stat numbers the cores differently, all of its cores count."""
    lines = [line.split() for line in text_of(PROC / "stat").splitlines() if line.startswith("cpu")]
    cores = {int(words[0][3:]): [int(word) for word in words[1:9]] for words in lines if words[0] != "cpu"}
    wanted = [cores[number] for number in allowed if number in cores] or cores.values()
    # user, nice and system; irq, softirq and stolen. Between them it is idle or waits.
    ticks = sum(sum(fields[:3]) + sum(fields[5:8]) for fields in wanted)
    return ticks / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> dict[int, float]:
    """Return ``root`` and its descendants with the seconds that each and its reaped children worked; empty if unknown."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            words = text_of(folder / "stat").rpartition(")")[2].split()
            parent, ticks = int(words[1]), sum(map(int, words[11:15]))
        except (ValueError, IndexError):
            continue  # it has ended
        number = int(folder.name)
        children.setdefault(parent, []).append(number)
        seconds[number] = ticks / os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    pending = [root]
    while pending:
        number = pending.pop()
        if number in seconds and number not in found:
            found[number] = seconds[number]
            pending += children.get(number, ())
    return found


def _cgroups() -> Iterator[tuple[float, tuple[int, int]]]:
    """Yield the quota in cores and the periods of each cgroup of this process that has a quota, the innermost first."""
    for folder in folders("cpu"):
        of_v1 = f"{text_of(folder / 'cpu.cfs_quota_us')} {text_of(folder / 'cpu.cfs_period_us')}"
        words = (text_of(folder / "cpu.max") or of_v1).split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # "max" and -1 are no quota
            stat = text_of(folder / "cpu.stat").split()
            facts = dict(zip(stat[::2], stat[1::2], strict=False))
            yield int(words[0]) / int(words[1]), (int(facts.get("nr_periods", 0)), int(facts.get("nr_throttled", 0)))


def folders(controller: str) -> Iterator[Path]:
    """Yield the folders of a controller, such as ``cpu``, for the cgroup of this process and those around it.

    In a container /proc may name the cgroup as the host sees it. Its folder is then the root of the mount.
    """
    for line in text_of(PROC / "self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (CGROUPS / controllers, CGROUPS / controller) if controllers else (CGROUPS, CGROUPS / "unified")
        mount = next((folder for folder in mounts if folder.is_dir()), None)
        if mount is None:
            continue
        here = mount / path.strip("/")
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mount) and folder.is_dir())


def clock_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, or 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of a process by its number, as clock_getcpuclockid(3) has it
    except OSError:
        return 0.0


def parent_of(pid: int) -> int:
    """Return the parent of a process, or 0 if it has ended."""
    try:
        return int(text_of(PROC / str(pid) / "stat").rpartition(")")[2].split()[1])
    except (ValueError, IndexError):
        return 0


def started_by(pid: int, without: Collection[int] = ()) -> list[int]:
    """Return a process's living descendants, but for those ``without`` and theirs, by the kernel's lists if it has them."""
    if not (PROC / "thread-self" / "children").exists():
        hidden = {each for other in without for each in tree(other)}
        return [each for each in tree(pid) if each != pid and each not in hidden]
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError, ValueError):
            for thread in (PROC / str(each) / "task").iterdir():
                children = map(int, (thread / "children").read_text(encoding="ascii").split())
                found += [child for child in children if child not in without]
    return found[1:]
