"""Sessions: statuses of misbehaving choices, replacement of workers, ranking, and the caller's untouched state."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_choices
import filelock
import pytest
import torch
from fake_choices import LIMITS_S, PROBLEM, Fake, OutOfResources, fake, wait_until_gone
from rotation import rotated

from gemmtune.choice import Choice, Status
from gemmtune.device import detect, preset
from gemmtune.errors import CompileError
from gemmtune.problem import Problem
from gemmtune.problem.rows import with_groups, with_rows
from gemmtune.selector import samples
from gemmtune.selector import session as sessions
from gemmtune.selector.accidents import done_by_machine
from gemmtune.selector.offers import offers_for
from gemmtune.selector.recheck import AFTER
from gemmtune.selector.remote import RemoteSession, measuring_kind, open_session
from gemmtune.selector.samples import Ranking, Sample, failure_of
from gemmtune.selector.session import Session
from gemmtune.settings import Settings, use
from gemmtune.timing.rounds import Ranked
from gemmtune.timing.timer import device_to_itself
from gemmtune.workers.pool import WORKERS
from gemmtune.workers.worker import WorkerCrashed

DEVICE = dataclasses.replace(detect("cpu"), threads=1)
"""One thread: those of a parallel operation wait for each other, for milliseconds if the machine is busy."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path), choice_timeout_s=30, search="quick")


@pytest.fixture(params=["in this process", "in a worker"])
def session(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Session | RemoteSession]:
    kind = Session if request.param == "in this process" else RemoteSession
    with kind(PROBLEM, DEVICE, settings) as opened:
        yield opened


def running(run: str, problem: Problem = PROBLEM) -> Fake:
    return fake(run, problem, run=run)


def test_open_session_follows_the_setting() -> None:
    assert isinstance(open_session(PROBLEM, DEVICE, Settings()), RemoteSession)
    assert isinstance(open_session(PROBLEM, DEVICE, Settings(tune_in_subprocess=False)), Session)


def test_a_correct_choice_is_measured(session: Session | RemoteSession) -> None:
    sample = session.examine(running("multiply"), None)
    assert sample.status is Status.OK, sample.reason
    assert sample.time_us is not None
    assert 0.1 < sample.time_us < 100_000
    assert sample.error_over_bound is not None
    assert sample.error_over_bound <= 1


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        ("wrong", Status.WRONG_RESULT, ""),
        ("fail", Status.RUNTIME_ERROR, "ValueError: this kernel does not like its operands"),
        ("build_fails", Status.RUNTIME_ERROR, "RuntimeError: cannot load the artifact"),
        ("out_of_memory", Status.OUT_OF_RESOURCES, "tried to allocate more than there is"),
        ("out_of_resources", Status.OUT_OF_RESOURCES, "shared memory, Required: 300000"),
    ],
)
def test_failures_are_typed_and_the_next_choice_works(
    session: Session | RemoteSession, run: str, status: Status, reason: str
) -> None:
    sample = session.examine(running(run), None)
    assert sample.status is status
    assert reason in sample.reason
    assert sample.reason
    assert sample.time_us is None
    assert session.examine(running("multiply"), None).status is Status.OK


def test_crash_and_hang_cost_one_choice_each(settings: Settings) -> None:
    expected = [Status.OK, Status.CRASHED, Status.OK, Status.TIMED_OUT, Status.OK, Status.CRASHED, Status.OK]
    for limit_s in LIMITS_S:
        with RemoteSession(PROBLEM, DEVICE, dataclasses.replace(settings, choice_timeout_s=limit_s)) as session:
            runs = ("multiply", "segfault", "multiply", "hang", "multiply", "garble", "multiply")
            samples = [session.examine(running(run), None) for run in runs]
        if [sample.status for sample in samples] == expected:
            break
    assert [sample.status for sample in samples] == expected
    assert "SIGSEGV" in samples[1].reason
    assert samples[3].reason == f"no answer within {limit_s:g} s; the limit is the setting choice_timeout_s"
    assert done_by_machine(samples[5]) == "its answer was garbled"


def test_choices_for_fewer_rows_are_timed_by_the_same_session(session: Session | RemoteSession) -> None:
    part = with_rows(PROBLEM, 2)
    assert session.examine(running("multiply"), None).status is Status.OK
    for problem in (part, PROBLEM, part):
        ranking = session.rank([running("multiply", problem), running("fail", problem)], 0.01)
        assert ranking.times.keys() == {"fake:multiply"}
        assert "does not like" in ranking.failures["fake:fail"].reason


def test_a_clearly_slower_choice_keeps_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    first_us = {"fake:a": 10.0, "fake:b": 14.0, "fake:c": 40.0, "fake:torch": 30.0}
    playing: list[list[str]] = []

    def play(contenders: dict[str, Any], **_: object) -> dict[str, Ranked]:
        playing.append(list(contenders))
        return {name: Ranked(time_us=1.2 * first_us[name], margin_us=0.1) for name in contenders}

    monkeypatch.setattr(sessions, "play", play)
    monkeypatch.setattr(Session, "_time", lambda self, problem: types.SimpleNamespace(
        contender=lambda choice, kernel: types.SimpleNamespace(rough_us=first_us[choice.name])
    ))  # fmt: skip
    choices = [fake(name.removeprefix("fake:"), baseline=name == "fake:torch") for name in first_us]
    with Session(PROBLEM, DEVICE, Settings()) as session:
        times = session.rank(choices, 0.01).times
        assert session.rank(choices).times.keys() == first_us.keys()
    assert playing == [["fake:a", "fake:b", "fake:torch"], list(first_us)], "torch's own is compared whatever it takes"
    assert times["fake:c"].time_us == pytest.approx(48.0), "as it was beside the fastest"


def test_an_unpicklable_choice_fails_alone(settings: Settings) -> None:
    with RemoteSession(PROBLEM, DEVICE, settings) as session:
        sample = session.examine(fake("stuck", info={"a lambda": lambda: None}), None)
        assert sample.status is Status.RUNTIME_ERROR
        assert "pickle" in sample.reason
        assert session.examine(running("multiply"), None).status is Status.OK


TUNING = """
    import dataclasses, sys
    sys.path.insert(0, {tests!r})
    from fake_choices import PROBLEM, fake
    from gemmtune.device import detect, preset
    from gemmtune.selector.precompile import precompile
    from gemmtune.selector.remote import RemoteSession
    from gemmtune.settings import Settings
    settings = Settings(cache_dir=sys.argv[1], compile_threads=1)
    precompile([fake(str(i), artifact=sys.argv[1] + str(i)) for i in range(4)], settings)
    with RemoteSession(PROBLEM, dataclasses.replace(detect("cpu"), threads=1), settings) as session:
        session.examine(fake("multiply"), None)
        print("measuring", flush=True)
        while True:
            session.rank([fake("multiply"), fake("slow", run="slow")])
"""


@pytest.mark.turn(4, 8)
@pytest.mark.parametrize("how", rotated([signal.SIGINT, signal.SIGKILL], 2, "stopped"), ids=lambda s: s.name)
def test_a_tuning_that_is_stopped_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    """Neither an idle compile worker nor a measuring worker survives. The program has no ``__main__`` guard."""
    script = tmp_path / "tuning.py"
    script.write_text(textwrap.dedent(TUNING.format(tests=str(Path(__file__).parent))))
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "measuring\n"
    children = [int(p) for task in Path(f"/proc/{parent.pid}/task").iterdir() for p in (task / "children").read_text().split()]
    assert len(children) == 2
    parent.send_signal(how)
    _, stderr = parent.communicate(timeout=60)
    assert not wait_until_gone(*children)
    assert stderr.count("Traceback") == (1 if how is signal.SIGINT else 0), stderr


def test_ranks_the_survivor_of_two_choices_that_die_together(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = fake("multiply"), fake("segfault")

    died = Sample(status=Status.CRASHED, reason="it crashed")

    def rank(choices: Sequence[Choice], _rounds_s: float | None) -> Ranking | Sample:
        return died if bad in choices else Ranking(times={c.name: Ranked(time_us=1.0, margin_us=0.1) for c in choices})

    session = RemoteSession(PROBLEM, DEVICE, settings)
    monkeypatch.setattr(session, "_rank", rank)
    both, alone = session.rank([good, bad]), session.rank([bad])
    assert (set(both.times), both.failures) == ({good.name}, {bad.name: died})
    assert (alone.times, alone.failures) == ({}, {bad.name: died})


def test_a_worker_that_dies_after_the_timing_costs_only_the_choice(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are checked in new workers."""
    good, bad, stale = fake("multiply"), fake("segfault"), fake("wrong")
    wrong = Sample(status=Status.WRONG_RESULT, reason="stale")

    def call(_do: object, method: str, choices: Sequence[Choice], *, timeout_s: float) -> tuple[dict[str, Sample], bool]:
        if bad in choices:
            raise WorkerCrashed("died by SIGSEGV")
        return {c.name: wrong for c in choices if c == stale}, False

    session = RemoteSession(PROBLEM, DEVICE, settings)
    monkeypatch.setattr(session, "_opened", lambda: types.SimpleNamespace(call=call))
    died = Sample(status=Status.CRASHED, reason=f"{AFTER}: died by SIGSEGV")
    assert session.recheck([good, bad, stale]) == {bad.name: died, stale.name: wrong}
    assert session.recheck([]) == {}


def test_memory_that_is_short_after_the_timing_refuses_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with Session(PROBLEM, DEVICE, settings) as session:
        session.rank([running("multiply")])
        monkeypatch.setattr(sessions, "recheck_all", none_left)
        assert session.recheck([running("multiply")]) == {}
    assert "was not checked after the timing: OutOfMemoryError" in caplog.text


def test_the_worker_stays_warm_for_the_next_session(settings: Settings) -> None:
    pids = []
    for _ in range(2):
        with RemoteSession(PROBLEM, DEVICE, settings) as session:
            session.examine(running("multiply"), None)
        worker = WORKERS.take(measuring_kind(DEVICE))
        pids.append(worker.pid)
        WORKERS.give(measuring_kind(DEVICE), worker)
    assert pids[0] == pids[1]


def test_rank_orders_by_time(session: Session | RemoteSession) -> None:
    ranked = session.rank([running("slow"), running("multiply")]).times
    assert set(ranked) == {"fake:slow", "fake:multiply"}
    assert ranked["fake:slow"].time_us > 2 * ranked["fake:multiply"].time_us


def test_rank_gives_packed_choices_their_own_operand(session: Session | RemoteSession) -> None:
    ranked = session.rank([running("packed"), running("multiply")]).times
    assert set(ranked) == {"fake:packed", "fake:multiply"}


def test_rank_leaves_out_what_fails(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with Session(PROBLEM, DEVICE, settings) as session, caplog.at_level(logging.WARNING, "gemmtune"):
        assert set(session.rank([running("fail"), running("multiply")]).times) == {"fake:multiply"}
    assert "fake:fail failed in the final rounds" in caplog.text


def test_a_late_failure_costs_only_itself(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_choices, "FAILING", failing := [])
    whole = sessions.play

    def play(*contenders: Any, **words: Any) -> dict[str, Ranked]:
        failing.append(True)
        return whole(*contenders, **words)

    monkeypatch.setattr(sessions, "play", play)
    with Session(PROBLEM, DEVICE, settings) as session:
        ranking = session.rank([running("fail_later"), running("multiply")])
    assert set(ranking.times) == {"fake:multiply"}
    failure = Sample(status=Status.RUNTIME_ERROR, reason="ValueError: this kernel does not like its operands")
    assert ranking.failures == {"fake:fail_later": failure}


def test_choices_for_fewer_rows_share_the_operands_of_all_rows(session: Session | RemoteSession) -> None:
    some = Problem.mm(5, 48, 32, dtype=torch.float32, device_type="cpu")
    for run, status in (("multiply", Status.OK), ("wrong", Status.WRONG_RESULT), ("fail", Status.RUNTIME_ERROR)):
        for problem in (some, PROBLEM):
            sample = session.prove_rows(running(run, problem))
            assert sample.status is status, sample.reason
            assert sample.time_us is None
            assert (sample.error_over_bound is None) == (run == "fail")


def test_operands_are_made_once_except_for_groups(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def spy(kind: str) -> Any:
        verdict = Sample(status=Status.OK, error_over_bound=0.0)
        return lambda problem, _: made.append((kind, problem.m)) or types.SimpleNamespace(check=lambda *_: verdict)

    monkeypatch.setattr(sessions, "RowsVerifier", spy("all"))
    monkeypatch.setattr(sessions, "Verifier", spy("own"))
    for at in (
        lambda m: Problem.mm(m, 48, 32, dtype=torch.float32, device_type="cpu"),
        lambda m: Problem.grouped_mm(m, 48, 32, groups=3, dtype=torch.float32, device_type="cpu"),
    ):
        with Session(at(64), DEVICE, settings) as session:
            for m in (5, 64):
                assert session.prove_rows(running("multiply", at(m))).status is Status.OK
    assert made == [("all", 64), ("own", 5), ("own", 64)]


@pytest.mark.parametrize(
    ("wrong_call", "status", "reason"),
    [
        (0, Status.OK, ""),
        (3, Status.WRONG_RESULT, "M = 5: random rows 0 to 4 have other bits alone than among 64 rows, first row 0"),
        (4, Status.WRONG_RESULT, "M = 5: random rows 59 to 63 have other bits alone than among 64 rows, first row 59"),
        (10, Status.WRONG_RESULT, "M = 32: hard rows 32 to 63 have other bits alone than among 64 rows, first row 32"),
    ],
)
def test_bits_of_rows_are_compared_at_both_ends(
    wrong_call: int, status: Status, reason: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls cover all rows, random and hard ones; each part then has two for the first and two for the last rows."""
    sizes: list[int] = []

    def packed(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        a, b = tensors
        for row in range(len(a)):  # a product of several rows may sum in another order
            torch.mv(b, a[row], out=out[row])
        sizes.append(len(a))
        if len(sizes) == wrong_call:
            out[0, 0] += 1

    monkeypatch.setitem(fake_choices.RUNS, "packed", packed)
    parts = [running("packed", Problem.mm(m, 48, 32, dtype=torch.float32, device_type="cpu")) for m in (5, 32)]
    with Session(PROBLEM, DEVICE, settings) as session:
        sample = session.same_rows(running("packed"), parts)
        assert (sample.status, sample.reason) == (status, reason)
        assert session.same_rows(running("fail"), parts).status is Status.RUNTIME_ERROR
    assert sizes == [64, 64, 5, 5, 5, 5, 32, 32, 32, 32][: wrong_call or 10]


class FakeContender:
    """Contender that returns its samples in order and repeats the last one."""

    def __init__(self, *samples_us: float, rough_us: float = 0.0, takes_capture: bool = True) -> None:
        self.samples_us, self.rough_us, self.takes_capture, self.taken = samples_us, rough_us, takes_capture, 0

    def sample_us(self) -> float:
        self.taken += 1
        return self.samples_us[min(self.taken, len(self.samples_us)) - 1]


@pytest.mark.parametrize(
    ("contender", "best_us", "time_us", "taken"),
    [
        (FakeContender(9, 1, 5), None, 5, 15),
        (FakeContender(9, 1, 5, takes_capture=False), None, 1, 15),
        (FakeContender(9, 1, 5, rough_us=116), 10.0, 116, 0),
        (FakeContender(9, 1, 5, rough_us=115), 10.0, 5, 15),
        (FakeContender(9, 1, 5, rough_us=116, takes_capture=False), 10.0, 1, 15),
        (FakeContender(23, 24, 25), 20.0, 25, 15),
        (FakeContender(24, 30, 25), 20.0, 25, 3),
    ],
)
def test_a_short_measurement_ends_early_for_a_slow_choice(
    contender: FakeContender, best_us: float | None, time_us: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "STAGE_S", 100.0)
    contender.taken = 0
    assert samples.short_measurement(contender, best_us) == time_us  # type: ignore[arg-type]
    assert contender.taken == taken


def test_a_stage_of_samples_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((1.0, 1.01, 1.03, 1.05))
    monkeypatch.setattr(samples.time, "perf_counter", lambda: next(clock))
    assert samples.samples_of(FakeContender(1, 2, 3, 4), 9) == [1, 2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "rounds_s", "budget_s", "warm_up_s"),
    [("cpu", 2.0, 5.0, 0.0), ("sm90", 2.0, 2.0, 0.2), ("sm90", 0.3, 0.3, 0.15), ("sm90", None, None, None)],
)
def test_final_rounds_on_a_gpu_start_at_sustained_clocks(
    arch: str, rounds_s: float | None, budget_s: float | None, warm_up_s: float | None, settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    played: list[dict[str, Any]] = []

    def contender(choice: Choice, kernel: object) -> FakeContender:
        return FakeContender(*(() if choice.name == "fake:fail" else (1.0,)))

    def play(contenders: dict[str, FakeContender], **words: Any) -> dict[str, Ranked]:
        assert callable(words.pop("failed"))
        played.append(words | {"sampled": {name: x.taken for name, x in contenders.items()}})
        return {}

    monkeypatch.setattr(sessions, "CPU_ROUNDS", 2.5)
    for name in ("conditions", "device_to_itself"):
        monkeypatch.setattr(sessions, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(sessions, "Timer", lambda *_, **__: types.SimpleNamespace(contender=contender))
    monkeypatch.setattr(sessions, "play", play)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    choices = [running("multiply"), dataclasses.replace(running("slow"), baseline=True), running("fail")]
    with Session(PROBLEM, DEVICE if arch == "cpu" else preset(arch), settings, host_us=3.0) as session:
        session.rank(choices, rounds_s)
    quick = sessions.EFFORT["quick"].rounds_s
    assert played == [
        {
            "budget_s": quick if budget_s is None else budget_s,
            "warm_up_s": min(0.2, quick / 2) if warm_up_s is None else warm_up_s,
            "keep": {"fake:slow"},
            "host_us": 3.0,
            "sampled": {"fake:multiply": 0, "fake:slow": 0, "fake:fail": 0}
            if arch == "cpu"
            else {"fake:multiply": 1, "fake:slow": 1},
        }
    ]


def test_rank_survives_a_crash(settings: Settings) -> None:
    with RemoteSession(PROBLEM, DEVICE, settings) as session:
        ranking = session.rank([running("multiply"), running("segfault"), running("slow")])
    assert set(ranking.times) == {"fake:multiply", "fake:slow"}
    assert [(name, one.status) for name, one in ranking.failures.items()] == [("fake:segfault", Status.CRASHED)]


def test_final_rounds_that_corrupt_the_process_are_logged_and_repeated(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(
        _do: object, _method: str, choices: Sequence[Choice], _rounds_s: object, *, timeout_s: float
    ) -> tuple[Ranking | None, bool]:
        names = [choice.name for choice in choices]
        ruined = "fake:slow" in names
        return None if ruined else Ranking(times={name: Ranked(time_us=5.0, margin_us=0.1) for name in names}), ruined

    logged = caplog.at_level(logging.WARNING, "gemmtune")
    with RemoteSession(PROBLEM, DEVICE, settings) as session, logged, monkeypatch.context() as patched:
        patched.setattr(session._opened(), "call", call)
        patched.setattr(session, "_discard", lambda: None)
        ranking = session.rank([running("multiply"), running("slow")])
    assert set(ranking.times) == {"fake:multiply"}
    assert "the final rounds of fake:multiply, fake:slow ended the measuring process: the GPU context is lost" in caplog.text


def test_a_discarded_worker_is_closed_and_replaced(settings: Settings) -> None:
    with RemoteSession(PROBLEM, DEVICE, settings) as session:
        worker = session._opened()
        session._discard()
        assert not worker.alive
        assert session.examine(running("multiply"), None).status is Status.OK


def test_a_closed_session_holds_no_memory(settings: Settings) -> None:
    with Session(PROBLEM, DEVICE, settings) as session:
        session.examine(running("multiply"), None)
        verifier = weakref.ref(session._verifier)
        assert verifier() is not None
    gc.collect()
    assert verifier() is None


def test_limits_of_the_problems_dtype(session: Session | RemoteSession) -> None:
    found, _disturbance = session.limits({})
    assert set(found) == {"bandwidth_gbps", "float32_gflops"}
    assert session.limits({"bandwidth_gbps": 1.0, "float32_gflops": 1.0})[0] == {}


def test_without_verification_a_wrong_choice_is_measured(settings: Settings) -> None:
    with Session(PROBLEM, DEVICE, Settings(cache_dir=settings.cache_dir, verify=False)) as session:
        sample = session.examine(running("wrong"), None)
    assert sample.status is Status.OK
    assert sample.error_over_bound is None


def test_the_callers_state_is_untouched(settings: Settings) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    with Session(PROBLEM, DEVICE, settings) as session:
        session.examine(running("multiply"), None)
        session.rank([running("multiply"), running("slow")])
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)


def test_a_session_runs_on_the_devices_threads(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        seen.append(torch.get_num_threads())
        torch.mm(a, b, out=out)

    monkeypatch.setitem(fake_choices.RUNS, "multiply", multiply)
    before = torch.get_num_threads()
    with Session(PROBLEM, dataclasses.replace(DEVICE, threads=3), settings) as session:
        session.examine(running("multiply"), None)
    assert set(seen) == {3}
    assert torch.get_num_threads() == before


def test_measuring_waits_for_the_lock_but_not_for_ever(settings: Settings) -> None:
    """A process that never releases the lock delays a measurement but does not prevent it."""
    folder = settings.folder / "locks"
    folder.mkdir()
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with filelock.FileLock(folder / "measure-cpu0.lock"):
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with Session(PROBLEM, DEVICE, Settings(cache_dir=settings.cache_dir, choice_timeout_s=0.5)) as session:
            assert session.examine(running("multiply"), None).status is Status.OK
    finally:
        done.set()
        holder.join()


def test_the_lock_of_a_gpu_is_the_same_under_each_index(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees the second GPU alone calls it cuda:0."""
    gpus = [types.SimpleNamespace(uuid=f"GPU-{i}") for i in range(2)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for visible in (gpus, gpus[1:]):
        monkeypatch.setattr("torch.cuda.get_device_properties", visible.__getitem__)
        with use(settings), device_to_itself(settings, dataclasses.replace(preset("sm90"), index=len(visible) - 1)):
            pass
    assert [path.name for path in (settings.folder / "locks").iterdir()] == ["measure-GPU-1.lock"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_measuring_works_without_a_cache_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with Session(PROBLEM, DEVICE, Settings(cache_dir=str(tmp_path))) as session:
        assert session.examine(running("multiply"), None).status is Status.OK


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (CompileError("x", "bad line"), Status.COMPILE_ERROR, "bad line"),
        (torch.OutOfMemoryError("no memory"), Status.OUT_OF_RESOURCES, "OutOfMemoryError: no memory"),
        (OutOfResources("smem"), Status.OUT_OF_RESOURCES, "OutOfResources: smem"),
        (KeyError("x"), Status.RUNTIME_ERROR, "KeyError: 'x'"),
    ],
)
def test_failure_of(error: Exception, status: Status, reason: str) -> None:
    assert failure_of(error) == (status, reason)


def test_many_groups_are_checked_by_fewer_on_a_cpu(monkeypatch):
    problem = Problem.mixed_grouped_mm(96, 32, 64, groups=12, dtype=torch.float32, scales="column", device_type="cpu")
    fewer = with_groups(problem, 4)
    assert (fewer.m, fewer.groups, fewer.b.size, fewer.scale_b.size) == (96, 4, (4, 64, 32), (4, 1, 32))
    assert with_groups(fewer, 12) == problem
    here, checked = detect("cpu"), []
    monkeypatch.setattr(sessions.Verifier, "check", lambda self, choice, _: checked.append(choice.problem))
    [choice] = offers_for(problem, here, Settings(backends=("cpp",), search="quick", max_profiling_configs=1)).choices
    monkeypatch.setattr(type(choice), "build", lambda _: None)
    with Session(problem, here, Settings()) as session:
        for groups in (12, 4, 2):
            session.prove_rows(choice.at(with_groups(problem, groups), here))
    assert [x.groups for x in checked] == [4, 4, 2]
