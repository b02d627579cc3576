"""Devices of a Ray cluster as a roster of seats. Ray is imported when a fleet needs it."""

import contextlib
import dataclasses
import importlib
import logging
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..device import detect
from ..dispatch.asked import asked_rows
from ..errors import UnavailableError
from ..selector.crossover import sampled_rows
from ..settings import Settings
from ..store.exchange import from_json, to_json
from ..store.row import Limit, Ranged, Row
from ..store.store import Store
from ..version import __version__
from .dealer import Task
from .kernels import PREFIX, Kernels, unpack
from .seat import Device, JobFunction, LocalSeat, Report, Seat, SeatGone, compiling_share

log = logging.getLogger("gemmtune")

LOOK_S = 5.0
"""Interval at which the nodes of the cluster are looked at."""
COMPILING_CPUS = 4
"""Cores of a node that the compilation of one job takes."""
MOST_POSTS = 3
"""Times that a post is made for one device before the device counts as broken."""
CLOSE_S = 5.0
MOST_WAIT_S = 120.0
"""Longest wait for the kernels of a job. After it, no more are compiled ahead: the cluster has no idle cores."""
WAIT_S = 1.0
"""Interval at which a wait for kernels looks for an interruption."""
Stamp = tuple[str, ...]
"""Identity and time of a record."""


class RayRoster:
    """Roster of the GPUs of a Ray cluster, or with ``kind`` cpu of its nodes. Nodes may join and leave.

    ``compiler`` (see ``compiled_for``) compiles each job but the first on any node with idle cores, while earlier ones are
    measured. Without one, kernels are compiled where they run. Raises UnavailableError without Ray, a cluster, or such a device.
    """

    def __init__(
        self,
        address: str,
        kind: str,
        function: JobFunction,
        settings: Settings,
        store: Store,
        compiler: Callable[..., Kernels] | None = None,
    ) -> None:
        self.ray, self._joined = _connected(address)
        self._gpus = kind != "cpu"
        self._function = function
        self._settings = settings
        self._store = store
        self._run = uuid.uuid4().hex[:12]
        self._compiler: Any = self.ray.remote(num_cpus=COMPILING_CPUS, num_returns=2)(_named(compiler)) if compiler else None
        self._kernels: dict[Task, tuple[Any, Any]] = {}
        """References to the end of a compilation and to its files."""
        self._made: dict[tuple[str, int], int] = {}
        self._looked_s = -LOOK_S
        if not self._slots():
            self.close()
            what = "GPU" if self._gpus else "node"
            raise UnavailableError(f"ray: got a cluster without a {what}, expected at least one; see ray status")

    def joining(self, present: Collection[str]) -> Sequence[Seat]:
        """Return a seat for each device of the cluster without one, looked up every LOOK_S."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return []
        self._looked_s = time.monotonic()
        found: list[Seat] = []
        for host, node, index, count, cores in self._slots():
            names = [f"{host} {node[:6]} {'gpu' if self._gpus else 'cpu'}{index}"]
            names += [f"{names[0]} ({again})" for again in range(2, MOST_POSTS + 1)]
            made = self._made.get((node, index), 0)
            if made < MOST_POSTS and not any(name in present for name in names):
                self._made[node, index] = made + 1
                found.append(RaySeat(names[made], self.post(node, count, cores), self))
        return found

    def ahead(self, tasks: Sequence[Task], device: Device) -> None:
        """Compile the next tasks, each on a node with idle cores."""
        compiler, compiling = self._compiler, dataclasses.replace(self._settings, compile_threads=COMPILING_CPUS)
        for task in tasks if compiler is not None else ():
            if task not in self._kernels:
                self._kernels[task] = compiler.remote(task.job, device.info, compiling, self._run)

    def close(self) -> None:
        """Leave the cluster, unless the program has joined it."""
        if self._joined:
            self.ray.shutdown()

    def kernels_for(self, task: Task, sent: set[Any], stopped: Callable[[], bool]) -> list[Any]:
        """Wait for a task's kernels and return references to all not yet ``sent``. Uncompiled ones are compiled where they run."""
        ends = time.monotonic() + MOST_WAIT_S
        while (mine := self._kernels.get(task)) is not None and not stopped():
            if self.ray.wait([mine[0]], timeout=WAIT_S)[0]:
                break
            if time.monotonic() > ends:
                log.warning("no node has compiled %s within %g s: kernels are compiled where they run", task.job, MOST_WAIT_S)
                self._compiler = None
                self._kernels.clear()
        made = [pair for pair in list(self._kernels.values()) if pair[1] not in sent]
        return [files for ended, files in made if self.ray.wait([ended], timeout=0)[0] and self._succeeded(ended)]

    def _succeeded(self, ended: Any) -> bool:
        """Return True if a compilation has ended without an exception."""
        try:
            self.ray.get(ended)
        except self.ray.exceptions.RayError as error:
            log.warning("kernels are compiled where they run: %s", getattr(error, "cause", None) or error)
            return False
        return True

    def known(self, task: Task) -> dict[str, Any]:
        """Return what the fleet's store knows of a task, as ``store.exchange`` writes it."""
        job, kind, store = task.job, task.kind, self._store
        keys = [job.problem.key]
        if job.rows is not None:
            known = asked_rows(job.rows_class, kind, store)
            keys = [job.rows_class.at(m).key for m in sampled_rows(job.rows, job.rows_class.has, known)]
        rows = [row for key in keys for row in store.rows(key, kind).values()]
        ranged = store.ranged(job.problem.key, kind).values() if job.rows is not None else ()
        return to_json(rows, store.every_limit(), list(ranged))

    def post(self, node: str, count: int, cores: int) -> Any:
        """Start a post on a node, which has ``count`` devices. A CPU is taken whole: torch has a thread for each core of a post."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        resources = {"num_gpus": 1, "num_cpus": 1} if self._gpus else {"num_cpus": cores}
        actor = self.ray.remote(max_concurrency=2, max_restarts=0, scheduling_strategy=strategy, **resources)(Post)
        # Ray shows an actor its own GPU alone, as cuda:0.
        place = "cuda:0" if self._gpus else "cpu"
        return actor.remote(place, self._function, self._settings, count, probed=self._gpus)

    def get(self, reference: Any, timeout_s: float | None = None) -> Any:
        """Wait for an answer. Raises SeatGone if the actor or its node is gone."""
        try:
            return self.ray.get(reference, timeout=timeout_s)
        except self.ray.exceptions.RayError as error:
            raise SeatGone(" ".join(str(error).split())) from error

    def _slots(self) -> list[tuple[str, str, int, int, int]]:
        """Return host, node, index and the node's numbers of devices and cores, for each device of the living nodes."""
        found = []
        for node in self.ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            cores = int(resources.get("CPU", 0))
            count = int(resources.get("GPU", 0)) if self._gpus else min(cores, 1)
            found += [(node["NodeManagerHostname"], node["NodeID"], index, count, cores) for index in range(count)]
        return found


class RaySeat:
    """Seat in a post on a node of the cluster."""

    def __init__(self, name: str, actor: Any, roster: RayRoster) -> None:
        self.name = name
        self._roster = roster
        self._actor = actor
        self._sent: set[Any] = set()
        self._stopping = False

    def open(self) -> Device:
        """Wait for the post. Raises SeatGone if it cannot start, or has another version of gemmtune."""
        device = cast(Device, self._roster.get(self._actor.open.remote()))
        if device.version != __version__:
            raise SeatGone(f"got gemmtune {device.version} on the node, expected {__version__}, the version here: install it there")
        return device

    def run(self, task: Task) -> Report:
        """Run a task in the post, with what the fleet's store knows of it."""
        roster = self._roster
        kernels = roster.kernels_for(task, self._sent, lambda: self._stopping)
        if self._stopping:
            return Report(status="stopped", seconds=0.0)
        self._sent |= set(kernels)
        return cast(Report, roster.get(self._actor.run.remote(task, roster.known(task), *kernels)))

    def stop(self) -> None:
        self._stopping = True
        self._actor.stop.remote()

    def abort(self) -> None:
        self._roster.ray.kill(self._actor)

    def close(self) -> None:
        """Let a post that still lives remove its files, then end it."""
        with contextlib.suppress(SeatGone):
            self._roster.get(self._actor.close.remote(), CLOSE_S)
        self._roster.ray.kill(self._actor)


class Post:
    """Local seat behind its own store, in a process that Ray makes on the node, whose ``seats`` posts share its cores.

    It tunes into that store, and answers with the store's new rows.
    """

    def __init__(self, place: str, function: JobFunction, settings: Settings, seats: int, *, probed: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        path = Path(self._folder.name, "store.sqlite")
        self._settings = dataclasses.replace(compiling_share(settings, seats), store_path=str(path))
        self._store = Store.open(path)
        self._sent: set[Stamp] = set()
        name = f"{socket.gethostname()} {place}"
        self._seat = LocalSeat(name, detect(place), function, self._settings, probed=probed)

    def open(self) -> Device:
        return self._seat.open()

    def run(self, task: Task, known: Mapping[str, Any], *kernels: Kernels) -> Report:
        """Run a task, given what the fleet's store knows of it and kernels that other nodes have compiled."""
        for archive in kernels:
            unpack(archive, self._settings)
        seeds = from_json(known, "the fleet's store")
        self._store.absorb(*seeds)
        self._sent |= {stamp for records in seeds for stamp in map(_stamp, records)}
        report = self._seat.run(task)
        return dataclasses.replace(report, rows=self._news())

    def stop(self) -> None:
        self._seat.stop()

    def close(self) -> None:
        """End the process of the seat, and remove the store."""
        self._seat.abort()
        self._seat.close()
        self._store.close()
        self._folder.cleanup()

    def _news(self) -> dict[str, Any]:
        """Return the records that the fleet does not have yet. They count as sent."""
        rows, limits, ranged = self._store.every_row(), self._store.every_limit(), self._store.every_ranged()
        fresh = [[x for x in records if _stamp(x) not in self._sent] for records in (rows, limits, ranged)]
        self._sent |= {_stamp(x) for records in fresh for x in records}
        return to_json(*fresh)  # type: ignore[arg-type] # the lists keep their types


def _stamp(record: Row | Limit | Ranged) -> Stamp:
    """Return what tells a record from others, and from the same one measured at another time."""
    return (*record.identity, record.measured_at)


def _named(compiler: Callable[..., Kernels]) -> Callable[..., tuple[int, Kernels]]:
    """Return a function that returns the number of files too, which tells of the end of the compilation without its files."""

    def compiled(*arguments: Any) -> tuple[int, Kernels]:
        files = compiler(*arguments)
        return len(files), files

    return compiled


def _connected(address: str) -> tuple[Any, bool]:
    """Return Ray's module, connected to a cluster, and True unless it was connected before."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise UnavailableError(f"ray: got {error}, expected Ray: pip install 'gemmtune[fleet]'") from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        why = " ".join(str(error).split())[:200]
        raise UnavailableError(
            f"ray: got {address!r}, which reaches no cluster ({why}), expected auto or the address of one (ray start --head)"
        ) from error
    return ray, True
