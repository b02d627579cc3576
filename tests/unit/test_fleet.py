"""Fleet: jobs dealt to devices, whose processes may die, and one store for all of them."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import fleet_jobs as pretended
import pytest
import torch

import gemmtune
from gemmtune import Problem, cli, settings
from gemmtune.device import detect
from gemmtune.errors import FleetError, InvalidProblemError, StoreError, UnavailableError
from gemmtune.fleet.dealer import MOST_KILLS, MOST_LOST_SEATS, Dealer, Task, makespan
from gemmtune.fleet.estimate import GPU, STORED_S, Estimator, is_stored, remember
from gemmtune.fleet.host import HostRoster, devices_of, writable
from gemmtune.fleet.job import Job
from gemmtune.fleet.kernels import compiled_for, tuned_problems, unpack
from gemmtune.fleet.probe import disagreements, measured_twice
from gemmtune.fleet.ray_roster import Post
from gemmtune.fleet.result import FleetResult, duration
from gemmtune.fleet.run import Fleet
from gemmtune.fleet.seat import Device, LocalSeat, Report, SeatGone
from gemmtune.selector.offers import offers_for
from gemmtune.selector.progress import Progress
from gemmtune.store.exchange import to_json
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Store, open_store

KIND = fingerprint_text(pretended.DEVICE, "graph")


def tasks(times: Sequence[float], kind: str = KIND) -> list[Task]:
    return [Task(job=job, kind=kind, expected_s=t) for job, t in zip(pretended.jobs(len(times)), times, strict=True)]


class Messages(Progress):
    """Listener that keeps the messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file to which each process that measures a job adds a line, with a store of the test's own."""
    file = tmp_path / "log"
    file.touch()
    with settings.patch(store_path=str(tmp_path / "store.sqlite"), cache_dir=str(tmp_path / "cache"), log_file=str(file)):
        yield file
        open_store(settings.current()).close()


def run(jobs: Sequence[Job], seats: int = 2, progress: Progress | None = None) -> FleetResult:
    """Run jobs on several worker processes, whose measurements are pretended."""
    chosen = settings.current()
    made = [LocalSeat(f"device {i}", pretended.DEVICE, pretended.pretend, chosen, probed=False) for i in range(seats)]
    roster = HostRoster([], pretended.pretend, chosen)
    roster._seats = list(made)
    return Fleet(jobs, roster, open_store(chosen), chosen, progress or Progress()).run()


def measured(log: Path) -> dict[str, int]:
    """Return how many processes began to measure each job, by N and K."""
    return collections.Counter(line.split()[0] for line in log.read_text().splitlines())


class TestDealer:
    """The dealer alone, which knows no clock and no process."""

    def test_the_longest_task_is_dealt_first_and_once(self) -> None:
        dealer = Dealer()
        dealer.join("a", KIND)
        dealer.join("b", KIND)
        dealer.join("c", "another kind")
        dealer.add(tasks([1.0, 3.0, 2.0]))
        first, second = dealer.next("a", 0.0), dealer.next("b", 0.0)
        assert first is not None
        assert second is not None
        assert [first.task.expected_s, second.task.expected_s] == [3.0, 2.0]
        assert dealer.next("c", 0.0) is None
        assert dealer.done(first, 3.0)
        assert not dealer.done(first, 3.0), "a second answer counts"

    def test_a_lost_task_goes_to_another_seat_and_a_late_answer_is_refused(self) -> None:
        dealer = Dealer()
        for seat in "ab":
            dealer.join(seat, KIND)
        dealer.add(tasks([1.0]))
        deal = dealer.next("a", 0.0)
        assert deal is not None
        assert dealer.lost(deal, killed=True)
        assert dealer.next("a", 1.0) is None, "the seat that lost it gets it again"
        again = dealer.next("b", 1.0)
        assert again is not None
        assert again.task == deal.task
        assert dealer.dealt_again == 1
        assert not dealer.done(deal, 9.0)
        assert dealer.done(again, 1.0)
        assert dealer.finished

    @pytest.mark.parametrize(("killed", "most"), [(True, MOST_KILLS), (False, MOST_LOST_SEATS)])
    def test_a_task_is_lost_so_often_and_no_more(self, killed: bool, most: int) -> None:
        dealer = Dealer()
        dealer.join("a", KIND)
        dealer.add(tasks([1.0]))
        for count in range(1, most + 1):
            deal = dealer.next("a", 0.0)
            assert deal is not None
            assert dealer.lost(deal, killed=killed) == (count < most)
        assert dealer.finished

    def test_tasks_without_a_seat_of_their_kind_are_orphans(self) -> None:
        dealer = Dealer()
        dealer.join("a", KIND)
        dealer.add(tasks([1.0]))
        assert dealer.orphans() == []
        dealer.leave("a")
        assert len(dealer.orphans()) == 1
        assert dealer.finished

    def test_the_rest_of_the_time_follows_the_pace(self) -> None:
        dealer = Dealer()
        for seat in "ab":
            dealer.join(seat, KIND)
        dealer.add(tasks([4.0, 4.0, 4.0, 4.0]))
        assert dealer.remaining_s(0.0) == 8.0
        deal = dealer.next("a", 0.0)
        assert deal is not None
        dealer.next("b", 0.0)
        assert dealer.done(deal, 8.0)  # twice as long as expected, like the others now
        assert dealer.remaining_s(4.0) == pytest.approx(12.0)
        assert dealer.remaining_s(32.0) == pytest.approx(20.0), "a task that takes long slows the expected pace"
        assert makespan([3, 3, 2, 2, 2], [0.0, 0.0]) == 7


def simulated(count: int, seats: int, failing: float, spread: float, seed: int) -> tuple[float, collections.Counter[Job], int]:
    """Run tasks of random length on seats that fail at random, by events, without a clock.

    Return the time it takes, the accepted answers to each job, and the number of answers that were refused.
    """
    rng = random.Random(seed)
    expected = [rng.uniform(15.0, 45.0) for _ in range(count)]
    actual = {task.job: task.expected_s * rng.lognormvariate(0, spread) for task in tasks(expected)}
    dealer, events, number = Dealer(), list[tuple[float, int, str, object]](), itertools.count()
    dealer.add(tasks(expected))
    answers: collections.Counter[Job] = collections.Counter()
    refused, now_s = 0, 0.0
    for i in range(seats):
        dealer.join(f"seat {i}", KIND)
    while not dealer.finished:
        for seat in dealer.seats:
            if dealer.running_on(seat) is None and (deal := dealer.next(seat, now_s)) is not None:
                length = actual[deal.task.job]
                if rng.random() < failing:  # half of the failing nodes are only cut off, and answer late
                    heapq.heappush(events, (now_s + rng.random() * length, next(number), "dies", deal))
                    if rng.random() < 0.5:
                        heapq.heappush(events, (now_s + 3 * length, next(number), "answers", deal))
                else:
                    heapq.heappush(events, (now_s + length, next(number), "answers", deal))
        now_s, _, what, deal = heapq.heappop(events)
        if what == "dies":
            dealer.leave(deal.seat)
            assert dealer.lost(deal, killed=False), f"{deal.task.job} counts as failed"
            dealer.join(f"seat {next(number)} again", KIND)
        elif dealer.done(deal, now_s - deal.begun_s):
            answers[deal.task.job] += 1
        else:
            refused += 1
    return now_s, answers, refused


def test_200_nodes_of_which_some_die_lose_and_double_nothing() -> None:
    _, answers, refused = simulated(2000, 200, failing=0.05, spread=0.3, seed=1)
    assert len(answers) == 2000
    assert set(answers.values()) == {1}
    assert refused > 10


def test_four_devices_tune_60_weights_3_5_times_as_fast_as_one() -> None:
    """Each weight takes between half and twice as long as expected."""
    ratios = [simulated(60, 1, 0, 0.3, seed)[0] / simulated(60, 4, 0, 0.3, seed)[0] for seed in range(20)]
    assert min(ratios) > 3.5


class NodeSeat:
    """Stand-in for a node of a cluster: it answers with rows, and one in twenty dies."""

    def __init__(self, name: str, rng: random.Random, deaths: list[str]) -> None:
        self.name = name
        self._rng = rng
        self._deaths = deaths

    def open(self) -> Device:
        return Device(info=pretended.DEVICE, fingerprint=KIND)

    def run(self, task: Task) -> Report:
        time.sleep(self._rng.random() * 0.01)
        if self._rng.random() < 0.05:
            self._deaths.append(self.name)
            raise SeatGone("the node is gone")
        row = pretended.row_of(task.job, KIND, self.name)
        return Report(status="done", seconds=0.01, result=pretended.result_of(task.job), rows=to_json([row], []))

    def stop(self) -> None:
        """Nothing runs."""

    def abort(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is held."""


class NodeRoster:
    """Roster in which a node joins for each that has died."""

    def __init__(self, count: int) -> None:
        self.deaths: list[str] = []
        self._numbers = itertools.count()
        self._count = count

    def joining(self, present: Sequence[str]) -> list[NodeSeat]:
        numbers = itertools.islice(self._numbers, self._count - len(present))
        return [NodeSeat(f"node {i}", random.Random(i), self.deaths) for i in numbers]

    def ahead(self, upcoming: Sequence[Task], device: Device) -> None:
        assert all(task.kind == device.fingerprint for task in upcoming)

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.turn(5, 8)
def test_rows_of_200_nodes_are_stored_once(log: Path) -> None:
    roster, store = NodeRoster(200), open_store(settings.current())
    result = Fleet(pretended.jobs(400), roster, store, settings.current(), Progress(), keep=False).run()
    assert not result.failures
    assert result.dealt_again == len(roster.deaths) > 10
    assert sorted(result.left) == sorted(roster.deaths)
    assert len(result.done) == len(store.every_row()) == len({row.key for row in store.every_row()}) == 400


class StubSeat(NodeSeat):
    """Stand-in for a seat that answers each task with ``report``, or leaves if that is None."""

    def __init__(self, name: str, report: Report | None, kind: str = KIND) -> None:
        super().__init__(name, random.Random(0), [])
        self._report = report
        self._kind = kind

    def open(self) -> Device:
        return Device(info=pretended.DEVICE, fingerprint=self._kind)

    def run(self, task: Task) -> Report:
        if self._report is None:
            raise SeatGone("no power")
        if self._report.status != "done":
            return self._report
        rows = self._report.rows or to_json([pretended.row_of(task.job, self._kind, self.name)], [])
        return dataclasses.replace(self._report, result=pretended.result_of(task.job), rows=rows)


DONE = Report(status="done", seconds=0.01)


def run_on(seats: Sequence[StubSeat], jobs: Sequence[Job]) -> FleetResult:
    chosen = settings.current()
    roster = HostRoster([], pretended.pretend, chosen)
    roster._seats = list(seats)
    return Fleet(jobs, roster, open_store(chosen), chosen, Progress()).run()


def test_a_device_on_which_every_process_dies_leaves_if_it_has_equals(log: Path) -> None:
    broken = Report(status="died", seconds=0.01, reason="worker process died by SIGSEGV")
    result = run_on([StubSeat("good", DONE), StubSeat("bad", broken)], pretended.jobs(40))
    assert 0 < result.seconds < 60
    assert not result.failures
    assert result.left == {"bad": "its last 3 jobs ended with the death of their process: worker process died by SIGSEGV"}
    assert result.dealt_again == 3
    alone = run_on([StubSeat("bad", broken)], pretended.jobs(3))
    assert not alone.left
    assert len(alone.failures) == 3


def test_jobs_of_a_kind_of_device_that_is_gone_fail_at_the_end(log: Path) -> None:
    result = run_on([StubSeat("a", DONE), StubSeat("b", None, kind='{"device":"another"}')], pretended.jobs(3))
    assert {one.seat for one in result.done if one.result is not None} == {"a"}
    assert [one.reason for one in result.failures] == ["no device of its kind is left"] * 3
    assert result.left == {"b": "no power"}

    class Closed(StubSeat):
        """Seat that cannot be opened."""

        def open(self) -> Device:
            raise SeatGone("no driver")

    with pytest.raises(UnavailableError, match=r"got no device that can be opened \(a: no driver\), expected at least one"):
        run_on([Closed("a", DONE)], pretended.jobs(1))


def test_rows_that_cannot_have_been_measured_fail_their_job(log: Path) -> None:
    [job] = pretended.jobs(1)
    row = dataclasses.replace(pretended.row_of(job, KIND, "aten:mm"), measured_at="2999-01-01T00:00:00.000000+00:00")
    result = run_on([StubSeat("a", dataclasses.replace(DONE, rows=to_json([row], [])))], [job])
    assert [re.search(r"set the clock of the machine", one.reason) is not None for one in result.failures] == [True]
    assert not open_store(settings.current()).every_row()


def test_an_answer_that_is_not_in_the_store_is_a_failure(log: Path) -> None:
    """The disk of a process may be full."""
    [job] = pretended.jobs(1)
    result = run_on([StubSeat("a", dataclasses.replace(DONE, rows=to_json([], [])))], [job])
    [failed] = result.failures
    assert failed.reason.startswith(f"its results are not in the store {log.parent / 'store.sqlite'}: see that")


def test_a_node_answers_with_what_the_fleet_does_not_have(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the first run of a job that the fleet's store knows measures nothing."""
    monkeypatch.setattr("gemmtune.fleet.seat.measured_twice", pretended.limits)
    first, second = tasks([1.0, 1.0])
    post = Post("cpu", pretended.pretend, settings.current(), 1, probed=True)
    try:
        device = post.open()
        assert (device.fingerprint, device.limits) == (KIND, {"bandwidth_gbps": (1.0, 2.0)})
        known = to_json([pretended.row_of(first.job, KIND, "known")], [])
        report = post.run(first, known)
        assert (report.status, report.rows["measurements"]) == ("done", [])
        report = post.run(second, to_json([], []), {"some/kernel.so": b"x"})
        [group] = report.rows["measurements"]
        assert (group["key"], len(group["rows"])) == (second.job.problem.key, 1)
        assert post.run(second, to_json([], [])).rows["measurements"] == []
        assert measured(log) == {f"{second.job.problem.n}x{second.job.problem.k}": 1}
        assert (settings.current().folder / "some" / "kernel.so").read_bytes() == b"x"
    finally:
        post.close()
    assert not open_store(settings.current()).every_row()


class TestLocal:
    """Real worker processes of this machine, whose measurements are pretended."""

    def test_a_killed_process_loses_its_job_alone_and_a_second_run_measures_nothing(self, log: Path) -> None:
        jobs, said = [*pretended.jobs(6), *pretended.jobs(1, pretended.ONCE)], Messages()
        result = run(jobs, progress=said)
        assert not result.failures
        assert (len(result.done), result.dealt_again, result.measured) == (7, 1, 7)
        assert sum(measured(log).values()) == 8, "only the killed job is measured again"
        assert sum("died by SIGKILL; dealt again" in text for text in said.texts) == 1
        store = open_store(settings.current())
        assert len({row.key for row in store.every_row()}) == 7
        before = log.read_text()
        again = run(jobs)
        assert (again.measured, log.read_text()) == (0, before)
        assert {one.task.expected_s for one in again.done} == {STORED_S}

    def test_failures_name_their_reason_and_all_others_are_done(self, log: Path) -> None:
        jobs, said = [*pretended.jobs(3), *pretended.jobs(1, pretended.KILL), *pretended.jobs(1, pretended.FAIL)], Messages()
        result = run(jobs, progress=said)
        assert sum(text.endswith(": it will fail") for text in said.texts) == 1, "a warning of the process is lost"
        reasons = {one.task.job.problem.k: one.reason for one in result.failures}
        assert reasons.keys() == {pretended.KILL, pretended.FAIL}
        assert reasons[pretended.FAIL] == "no such product: N = 1"
        assert reasons[pretended.KILL].startswith("ended its process again: worker process died by SIGKILL")
        assert len(result.done) == 5
        assert sum(k == pretended.KILL for k in (one.task.job.problem.k for one in result.done)) == 1

    def test_an_interruption_keeps_what_was_measured(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gemmtune.fleet.run.SHOW_S", 0.0)

        class Interrupting(Progress):
            """Interrupts once both processes measure the slow jobs."""

            def stage(self, name: str, done: int, total: int) -> None:
                if len(measured(log)) == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(pretended.jobs(2, pretended.SLOW), progress=Interrupting())
        rows = open_store(settings.current()).every_row()
        assert [row.name for row in rows] == ["part cpu"] * 2
        assert not [t for t in threading.enumerate() if t.name.startswith("gemmtune-device")]


def test_words_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    [cpu] = devices_of("cpu")
    assert cpu.type == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnavailableError, match=r"got 'all', but torch sees no GPU .* use devices cpu .* or ray"):
        devices_of("all")
    for words in ("gpu", "0,,1", "cuda:x", ["cpu", "0"]):
        with pytest.raises(UnavailableError, match="expected all, cpu, or numbers of GPUs such as 0,1"):
            devices_of(words)
    with pytest.raises(UnavailableError, match="expected each GPU once"):
        devices_of("0,cuda:0")
    monkeypatch.setattr("gemmtune.fleet.host.detect", lambda place: place)
    assert devices_of("0, cuda:1") == devices_of([0, 1]) == ["cuda:0", "cuda:1"]


def test_a_store_that_only_this_process_has_is_refused() -> None:
    with pytest.raises(StoreError, match="expected one that every process can write"):
        writable(Store())


class TestEstimate:
    """Expected durations."""

    JOB = Job(problem=Problem.mm(16, 4096, 4096, device_type="cpu"))

    def test_a_formula_then_the_durations_in_the_store(self, own_store: Path) -> None:
        chosen, store = settings.current(), open_store(settings.current())
        other = dataclasses.replace(self.JOB, problem=Problem.mm(32, 4096, 4096, device_type="cpu"))
        before = Estimator(pretended.DEVICE, chosen, store)
        assert "by a formula" in before.source
        slow = dataclasses.replace(pretended.result_of(self.JOB), seconds=10 * before.seconds(self.JOB))
        remember(store, self.JOB, dataclasses.replace(slow, source="store"), KIND, chosen.search)
        assert Estimator(pretended.DEVICE, chosen, store).seconds(other) == before.seconds(other)
        remember(store, self.JOB, slow, KIND, chosen.search)
        after = Estimator(pretended.DEVICE, chosen, store)
        assert after.source == "from 1 durations in the store"
        assert after.seconds(self.JOB) == pytest.approx(slow.seconds, abs=0.01)
        assert after.seconds(other) == pytest.approx(10 * before.seconds(other), rel=0.01)

    def test_a_table_of_a_larger_weight_takes_longer(self) -> None:
        small, large = (Job.tables([Problem.mm(16, n, 4096)], range(1, 8193))[0] for n in (4096, 128256))
        chosen = settings.Settings()
        assert 20 < GPU.seconds(small, chosen) < 30 < GPU.seconds(large, chosen) < 60
        assert GPU.seconds(small, dataclasses.replace(chosen, search="exhaustive")) > 5 * GPU.seconds(small, chosen)

    def test_a_stored_answer_is_seen(self, own_store: Path) -> None:
        chosen, store = settings.current(), open_store(settings.current())
        assert not is_stored(self.JOB, KIND, chosen, store)
        store.put([pretended.row_of(self.JOB, KIND, "aten:mm")])
        assert is_stored(self.JOB, KIND, chosen, store)
        assert not is_stored(self.JOB, KIND, dataclasses.replace(chosen, tune="force"), store)


def test_the_limits_of_a_device_are_measured_twice(own_store: Path) -> None:
    found = measured_twice("cpu", settings.current())
    assert found.keys() == {"bandwidth_gbps", "bfloat16_gflops"}
    assert all(min(pair) > 0 for pair in found.values())
    assert not open_store(settings.current()).every_limit()


def test_devices_that_are_slower_than_their_equals_are_named() -> None:
    quick, noisy, slow = ({"bandwidth_gbps": pair} for pair in ((3000.0, 3010.0), (3000.0, 2700.0), (2700.0, 2690.0)))
    assert disagreements({"a": ("x", quick), "b": ("x", quick), "c": ("y", slow)}) == []
    [line] = disagreements({"a": ("x", quick), "b": ("x", slow), "c": ("x", quick)})
    assert line.startswith("b: got bandwidth_gbps 2700, expected about 3010, the median of 3 equal devices: it is 10% slower")
    assert len(disagreements({"a": ("x", quick), "b": ("x", slow)})) == 1
    assert disagreements({"a": ("x", noisy), "b": ("x", slow), "c": ("x", quick)}) == []


def test_durations_as_text() -> None:
    assert [duration(s) for s in (0.5, 12.4, 200, 9000)] == ["0.5 s", "12 s", "3 min", "2.5 h"]


def test_kernels_of_another_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled in one folder needs no compiler in another one. Folders of a week ago are removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age_s in (("old", 8 * 24 * 3600), ("new", 3600)):
        (folder := tmp_path / f"gemmtune-fleet-{name}").mkdir()
        os.utime(folder, (time.time() - age_s,) * 2)
    job = Job(problem=Problem.mm(16, 64, 64, dtype=torch.float32, device_type="cpu"))
    changes = {"search": "quick", "backends": ("cpp",), "max_profiling_configs": 1}
    with settings.patch(cache_dir=str(tmp_path / "here"), **changes) as here:
        run = "this"
        kernels = compiled_for(job, detect("cpu"), here, run)
        choices = [c for c in offers_for(job.problem, detect("cpu"), here).choices if c.compile_key]
        assert kernels
        assert not any(c.compiled for c in choices)
        assert compiled_for(job, detect("cpu"), here, run) == {}, "what this run has compiled is sent again"
        assert unpack(kernels, here) == len(kernels)
        assert all(c.compiled for c in choices)
        assert unpack(kernels, here) == 0
        for name in ("../x.so", "/x.so", "", "a/\n"):
            with pytest.raises(UnavailableError, match="expected one below the cache folder"):
                unpack({name: b""}, here)
    assert not (tmp_path / "x.so").exists()
    assert [(tmp_path / f"gemmtune-fleet-{name}").exists() for name in ("old", "new")] == [False, True]


def test_tables_are_compiled_at_the_rows_where_all_choices_compete() -> None:
    [job] = Job.tables([Problem.mm(16, 4096, 4096)], range(1, 8193))
    assert [p.m for p in tuned_problems(job, settings.Settings())] == [1, 8, 64, 256, 2048]


class TestTune:
    """``tune`` on several devices, on this machine's CPU as one."""

    SMALL = tuple(Problem.mm(m, 64, 64, dtype=torch.float32, device_type="cpu") for m in (16, 32, 16))

    @pytest.fixture(autouse=True)
    def _quick(self, own_store: Path) -> Iterator[None]:
        with settings.patch(search="quick", backends=("aten",)):
            yield

    @pytest.mark.turn(2, 8)
    def test_results_are_those_of_one_device_in_order(self) -> None:
        found = gemmtune.tune(self.SMALL, devices="cpu", progress=False)
        assert tuple(result.problem for result in found) == self.SMALL
        assert {result.source for result in found} == {"measured"}
        assert {result.source for result in gemmtune.tune(self.SMALL, progress=False)} == {"store"}
        [table] = gemmtune.tune(self.SMALL[0], m=range(1, 65), devices="cpu", progress=False)
        assert (table.source, table.table.lo, table.table.hi) == ("measured", 1, 64)

    def test_bad_calls(self) -> None:
        for more in ({"device": "cpu"}, {"budget_s": 1.0}):
            with pytest.raises(InvalidProblemError, match="got device or budget_s beside devices or ray"):
                gemmtune.tune(self.SMALL, devices="cpu", **more)
        with pytest.raises(InvalidProblemError, match="expected one for cpu, the type of the devices"):
            gemmtune.tune(Problem.mm(16, 64, 64, device_type="cuda"), devices="cpu")
        with pytest.raises(FleetError, match=r"got 1 jobs that failed(.|\n)*mm 16x1x1002 .*: no such product: N = 1"):
            run(pretended.jobs(1, pretended.FAIL), 1).refuse_failures()


class TestCommand:
    """``gemmtune fleet`` and ``gemmtune tune --devices``."""

    @pytest.fixture(autouse=True)
    def _quick(self, own_store: Path) -> Iterator[None]:
        with settings.patch(search="quick", backends=("aten",)):
            yield

    @pytest.mark.turn(1, 8)
    def test_a_dry_run_says_what_is_stored_and_a_run_says_what_was_measured(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        words = ["fleet", "16x64x64", "32x64x64", "--dtype", "float32", "--devices", "cpu"]
        assert cli.run([*words, "--dry-run"]) == 0
        before = capsys.readouterr().out
        assert re.search(r"^1 × .*: 2 jobs, 0 stored\n", before)
        assert re.search(r"mm 32x64x64 .* 4\.0 s\n(.|\n)*by a formula.*\nabout 8\.0 s on 1 device", before)
        assert not open_store(settings.current()).every_row()
        assert cli.run(words) == 0
        assert "2 jobs on 1 device in" in (said := capsys.readouterr()).out
        assert "2 measured, 0 from the store, 0 dealt again, 0 failed" in said.out
        assert "[2/2] cpu: mm 16x64x64 float32 nt on cpu: pick: aten:mm" in said.err
        assert cli.run([*words, "8x64x64", "--dry-run", "--json", str(tmp_path / "dry.json")]) == 0
        assert "3 jobs, 2 stored" in (dry := capsys.readouterr().out)
        assert "from 2 durations in the store" in dry
        listed = {job["job"].split()[1]: job["stored"] for job in json.loads((tmp_path / "dry.json").read_text())["jobs"]}
        assert listed == {"16x64x64": True, "32x64x64": True, "8x64x64": False}

    @pytest.mark.turn(6, 8)
    def test_tune_on_devices_prints_results_and_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["tune", "16x64x64", "1..32x96x64", "--dtype", "float32", "--devices", "cpu"]) == 0
        said = capsys.readouterr().out
        assert "mm 16x64x64 float32 nt on cpu: 1 choice tried" in said
        assert "mm Mx96x64 float32 nt on cpu: " in said

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ("fleet 16x64x64", "got neither --devices nor --ray, expected one: --devices all"),
            ("fleet --devices cpu", "got nothing to tune, expected shapes such as 16x4096x4096"),
            ("fleet --models nobody --devices cpu", "models: got 'nobody', expected all"),
            ("fleet --models bert-base --dtypes int3 --devices cpu", "--dtypes: got 'int3', expected some of bf16"),
            ("fleet 16x64x64 --devices 0,0", "expected each GPU once"),
            ("tune 16x64x64 --devices cpu --device cpu", "got --device or --budget too"),
            ("tune 16x64x64 --devices cpu --budget 9", "got --device or --budget too"),
        ],
    )
    def test_wrong_usage(self, words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(words.split()) in (1, 2)
        assert expected in capsys.readouterr().err

    def test_failures_are_listed_and_the_status_says_so(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gemmtune.cli.fleet.run_job", pretended.refuse)
        assert cli.run(["fleet", "16x64x64", "--dtype", "float32", "--devices", "cpu"]) == 1
        assert "failed: mm 16x64x64 float32 nt on cpu: no such product" in capsys.readouterr().out
