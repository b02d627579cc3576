"""Fleet on a Ray cluster: several nodes on this machine, one of which dies. Run by ``tox -e fleet``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fleet_jobs as pretended
import pytest
import torch
from extras import needs

import gemmtune
from gemmtune import Problem, settings
from gemmtune.errors import UnavailableError
from gemmtune.fleet.job import Job
from gemmtune.fleet.ray_roster import RayRoster
from gemmtune.fleet.result import FleetResult
from gemmtune.fleet.run import Fleet
from gemmtune.selector.progress import Progress
from gemmtune.store.store import open_store

NODES = 3
SMALL = Problem.mm(16, 64, 64, dtype=torch.float32, device_type="cpu")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose head has no cores, and whose nodes have one each, and a pretended GPU."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        # Nodes find the package and the stand-ins where this process finds them.
        patch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other work of this machine must not end nodes
        made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def nodes(cluster: Any) -> list[Any]:
    """The nodes."""
    return [cluster.add_node(num_cpus=1) for _ in range(NODES)]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file to which each process that measures a job adds a line, with a store and a cache folder of the test's own."""
    file = tmp_path / "log"
    file.touch()
    with settings.patch(store_path=str(tmp_path / "store.sqlite"), cache_dir=str(tmp_path / "cache"), log_file=str(file)):
        yield file
        open_store(settings.current()).close()


def run(cluster: Any, jobs: Sequence[Job], progress: Progress | None = None, compiler: Any = None) -> FleetResult:
    """Run jobs on each node's CPU, whose measurements are pretended."""
    chosen = settings.current()
    store = open_store(chosen)
    roster = RayRoster(cluster.address, "cpu", pretended.pretend, chosen, store, compiler)
    return Fleet(jobs, roster, store, chosen, progress or Progress()).run()


def node_of(pid: int, nodes: Sequence[Any]) -> Any:
    """Return the node below whose raylet a process runs."""
    raylets = {info.process.pid: node for node in nodes for info in node.all_processes["raylet"]}
    while pid not in raylets:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return raylets[pid]


@needs("fleet")
def test_kernels_are_compiled_on_nodes_and_unpacked_where_they_run(
    cluster: Any, nodes: list[Any], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.fleet.ray_roster.COMPILING_CPUS", 0)
    result = run(cluster, pretended.jobs(5), compiler=pretended.compiled)
    assert not result.failures
    assert {one.task.job.problem.n for one in result.done} == {1, 2, 3, 4, 5}, "a kernel that cannot be compiled stops its job"
    found = sorted((settings.current().folder / pretended.KERNEL).parent.iterdir())
    assert [path.suffix for path in found] == [".1", ".2", ".4"], "the first job compiles its own kernels"
    assert len({path.read_bytes() for path in found}) == 1


@needs("fleet")
def test_compilers_that_find_no_cores_hold_up_no_job(
    cluster: Any, nodes: list[Any], log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gemmtune.fleet.ray_roster.COMPILING_CPUS", 64)
    monkeypatch.setattr("gemmtune.fleet.ray_roster.MOST_WAIT_S", 2.0)
    result = run(cluster, pretended.jobs(8), compiler=pretended.compiled)
    assert not result.failures
    assert len(result.done) == 8
    assert "within 2 s: kernels are compiled where they run" in caplog.text


@needs("fleet")
def test_an_interruption_keeps_the_rows_of_running_jobs(
    cluster: Any, nodes: list[Any], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtune.fleet.run.SHOW_S", 0.0)

    class Interrupting(Progress):
        """Interrupts once jobs wait on all nodes."""

        def stage(self, name: str, done: int, total: int) -> None:
            if len(log.read_text().splitlines()) == NODES:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cluster, pretended.jobs(NODES, pretended.SLOW), Interrupting())
    rows = open_store(settings.current()).every_row()
    assert [row.name for row in rows] == ["part cpu"] * NODES
    assert len({row.key for row in rows}) == NODES


@needs("fleet")
def test_a_node_that_dies_loses_its_job_alone_and_nothing_is_stored_twice(cluster: Any, nodes: list[Any], log: Path) -> None:
    class Killing(Progress):
        """Kills the node of the job that waits, once all others are done."""

        killed = False

        def stage(self, name: str, done: int, total: int) -> None:
            waiting = [line.split()[1] for line in log.read_text().splitlines() if line.startswith(f"{pretended.WAITING}x")]
            if done == total - 1 and not self.killed:
                self.killed = True
                cluster.remove_node(node_of(int(waiting[0]), nodes), allow_graceful=False)

    said, jobs = Killing(), pretended.jobs(pretended.WAITING, pretended.WAITS_ONCE)
    result = run(cluster, jobs, said)
    assert said.killed
    assert not result.failures
    assert (len(result.done), result.measured, result.dealt_again, len(result.left)) == (len(jobs), len(jobs), 1, 1)
    rows = open_store(settings.current()).every_row()
    assert len(rows) == len({row.key for row in rows}) == len(jobs)
    before = log.read_text()
    again = run(cluster, jobs)
    assert (again.measured, log.read_text()) == (0, before), "a second run measures again"


@needs("fleet")
def test_without_a_cluster_or_its_devices_the_error_says_what_to_do(cluster: Any, nodes: list[Any], log: Path) -> None:
    chosen = settings.current()
    with pytest.raises(UnavailableError, match="ray: got a cluster without a GPU, expected at least one"):
        RayRoster(cluster.address, "cuda", pretended.pretend, chosen, open_store(chosen))


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, own_store: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableError, match=r"expected Ray: pip install 'gemmtune\[fleet\]'"):
        gemmtune.tune(SMALL, devices="cpu", ray="auto", progress=False)
    with pytest.raises(UnavailableError, match="got '0' with a Ray cluster, expected all"):
        gemmtune.tune(SMALL, devices="0", ray="auto", progress=False)
