"""Worker processes: results, exceptions, crashes, hangs, and that none is left behind."""

from __future__ import annotations

import functools
import operator
import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_choices as jobs
import pytest
from rotation import rotated

from gemmtune.errors import GemmtuneError
from gemmtune.workers.pool import Pool
from gemmtune.workers.worker import GARBLED, NoWorkerError, Worker, WorkerCrashed, WorkerTimedOut


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One for the tests that leave it alive, started as users start it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemmtune.workers.worker.subprocess", subprocess)
        one = Worker()
    yield one
    one.close()


def test_call_returns_the_result(worker: Worker) -> None:
    assert worker.call(jobs.add, 1, 2, timeout_s=60) == 3


def test_a_process_that_is_killed_while_it_starts_is_no_fault_of_the_interpreter() -> None:
    worker = Worker(modules=("no_such_module_yet",))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        NoWorkerError, match=r"died by SIGKILL; the signal came while it started: .* memory, and try again"
    ) as caught:
        worker.call(operator.add, 1, 2, timeout_s=30)
    assert "interpreter" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_without_temporary_files_there_is_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(NoWorkerError, match=r"its output has no temporary file: .*missing"):
        Worker()


def test_call_runs_in_another_process(worker: Worker) -> None:
    assert worker.call(os.getpid, timeout_s=60) == worker.pid != os.getpid()


def test_large_arguments_and_results_travel(worker: Worker) -> None:
    data = os.urandom(3_000_000)
    assert worker.call(bytes.fromhex, data.hex(), timeout_s=60) == data


def test_noise_on_stdout_does_not_break_the_protocol(worker: Worker) -> None:
    assert worker.call(jobs.noisy, timeout_s=60) == "done"
    assert worker.call(jobs.add, 2, 2, timeout_s=60) == 4


def test_exception_of_the_job_comes_back_and_the_worker_lives(worker: Worker) -> None:
    with pytest.raises(ValueError, match="got 3, expected 4"):
        worker.call(jobs.raise_value_error, timeout_s=60)
    assert worker.alive
    assert worker.call(jobs.add, 1, 1, timeout_s=60) == 2


def test_exception_that_cannot_be_read_back_keeps_its_type_and_text(worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="Unreadable: 1 and 2"):
        worker.call(jobs.raise_unreadable, timeout_s=60)


def test_result_that_cannot_be_pickled_is_an_exception(worker: Worker) -> None:
    with pytest.raises(Exception, match=r"(?i)pickle"):
        worker.call(jobs.return_unpicklable, timeout_s=60)
    assert worker.call(jobs.add, 1, 1, timeout_s=60) == 2


def test_argument_that_cannot_be_pickled_harms_no_worker(worker: Worker) -> None:
    with pytest.raises(Exception, match=r"(?i)pickle"):
        worker.call(jobs.add, lambda: 1, 2, timeout_s=60)
    assert worker.call(jobs.add, 1, 1, timeout_s=60) == 2


def test_calls_from_several_threads_take_turns(worker: Worker) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda i=i: results.append(worker.call(jobs.add, i, i, timeout_s=60))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [2 * i for i in range(20)]


def test_crash_tells_signal_and_stack() -> None:
    worker = Worker()
    with pytest.raises(WorkerCrashed) as caught:
        worker.call(jobs.segfault, timeout_s=60)
    assert "SIGSEGV" in caught.value.reason
    assert "in segfault" in caught.value.reason
    assert isinstance(caught.value, GemmtuneError)
    assert not worker.alive
    with pytest.raises(WorkerCrashed, match="ended already"):
        worker.call(jobs.add, 1, 1, timeout_s=60)


def test_exit_tells_status_and_last_output() -> None:
    with pytest.raises(WorkerCrashed, match=r"status 7(.|\n)*last words"):
        Worker().call(jobs.exit_status, timeout_s=60)


@pytest.mark.parametrize("job", rotated([jobs.hang, jobs.hang_with_gil], 2, "hang"), ids=lambda job: job.__name__)
def test_hang_is_killed_at_the_time_limit(job: object) -> None:
    worker = Worker()
    worker.call(jobs.add, 1, 1, timeout_s=60)
    with pytest.raises(WorkerTimedOut, match=r"no answer within 0\.3 s"):
        worker.call(job, timeout_s=0.3)  # type: ignore[arg-type]
    assert not jobs.wait_until_gone(worker.pid)


def _frame(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


GARBAGE = {
    "text": b"Warning: something\n" * 50,
    "a negative size": struct.pack("!i", -5),
    "the form of 4 GB and more": struct.pack("!i", -1),
    "a huge size": struct.pack("!i", 2**31 - 1) + bytes(10),
    "an empty message": _frame(b""),
    "no pickle": _frame(bytes(range(256))),
    "an unknown class": _frame(b"cnowhere\nNothing\n."),
    "other values": _frame(pickle.dumps((True, b""))),
    "other types": _frame(pickle.dumps((b"", True, 3))),
}


def test_garbage_is_an_error_at_once_and_ends_the_worker() -> None:
    for name, data in GARBAGE.items():
        worker = Worker()
        worker.call(jobs.add, 1, 1, timeout_s=60)
        with pytest.raises(WorkerCrashed, match=GARBLED):
            worker.call(jobs.write_to_pipe, data, timeout_s=50)
        assert not worker.alive, name
        assert not jobs.wait_until_gone(worker.pid), name


@pytest.mark.parametrize("how", ["half a header", "half a message", "drop by drop", "stopped", "takes no job"])
def test_a_pipe_that_stalls_is_given_up_at_the_time_limit(how: str) -> None:
    worker = Worker()
    worker.call(jobs.add, 1, 1, timeout_s=60)
    job: tuple[object, ...] = {
        "half a header": (jobs.write_to_pipe, b"\0\0"),
        "half a message": (jobs.write_to_pipe, struct.pack("!i", 1000) + b"abc"),
        "drop by drop": (jobs.write_to_pipe, struct.pack("!i", 1000) + bytes(1000), 0.01),
        "stopped": (jobs.stop,),
        "takes no job": (jobs.add, bytes(10_000_000), b""),
    }[how]
    if how == "takes no job":
        os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimedOut, match=r"no answer within 0\.5 s"):
        worker.call(*job, timeout_s=0.5)  # type: ignore[arg-type]
    assert not jobs.wait_until_gone(worker.pid)


def test_a_process_that_never_gets_ready_is_no_crash_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.workers.pipe.READY", b"other")
    monkeypatch.setattr("gemmtune.workers.worker.READY", b"other")
    with pytest.raises(NoWorkerError, match=GARBLED):
        Worker().call(jobs.add, 1, 1, timeout_s=60)


def test_functions_posted_to_a_stopped_worker_do_not_block() -> None:
    worker = Worker()
    worker.call(jobs.add, 1, 1, timeout_s=60)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.post(functools.partial(len, bytes(10_000_000)))
    assert not worker.alive


def test_close_kills_processes_of_the_worker() -> None:
    worker = Worker()
    grandchild = worker.call(jobs.start_grandchild, timeout_s=60)
    assert jobs.is_running(grandchild)
    worker.close()
    assert not jobs.wait_until_gone(worker.pid, grandchild)


@pytest.mark.parametrize(
    ("executable", "why"),
    [("", "no interpreter"), ("/nowhere/python", "No such file"), (os.devnull, "Permission denied"), ("/bin/false", "status 1")],
)
def test_python_that_does_not_start_is_not_a_crash(executable: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.workers.worker.subprocess", subprocess)
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(NoWorkerError, match=f"{why}.*sys.executable is '{executable}'.*tune_in_subprocess=False") as caught:
        Worker().call(jobs.add, 1, 1, timeout_s=60)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    pool = Pool()
    pool.prepare("a", 1)  # what is only prepared complains when it is taken
    pool.close()


def test_gpus_can_be_hidden(worker: Worker) -> None:
    blind = Worker(gpu=False)
    assert blind.call(jobs.environment, "CUDA_VISIBLE_DEVICES", timeout_s=60) == ""
    assert worker.call(jobs.environment, "CUDA_VISIBLE_DEVICES", timeout_s=60) == os.environ.get("CUDA_VISIBLE_DEVICES")
    blind.close()


PARENT = """
    import pathlib, sys
    sys.path.insert(0, {tests!r})
    import fake_choices as jobs
    from gemmtune.workers.worker import Worker
    Worker().call(jobs.grandchild_then_hang, sys.argv[1], timeout_s=100)
"""


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize("how", rotated([signal.SIGKILL, signal.SIGTERM], 2, "parent"), ids=lambda s: s.name)
def test_parent_that_ends_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    """The parent has no ``__main__`` guard: workers do not import it."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT.format(tests=str(Path(__file__).parent))))
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    worker, grandchild = map(int, pids.read_text().split())
    parent.send_signal(how)
    _, stderr = parent.communicate(timeout=60)
    assert not jobs.wait_until_gone(worker, grandchild)
    assert "Traceback" not in stderr, stderr


def test_pool_hands_out_the_same_worker_again_and_forgets_dead_ones() -> None:
    pool = Pool()
    first = pool.take("a")
    pool.give("a", first)
    assert pool.take("a") is first
    other = pool.take("a")
    assert other is not first
    first.close()
    pool.give("a", first)
    pool.give("a", other)
    assert pool.take("a") is other
    other.close()


def test_pool_ends_idle_workers() -> None:
    pool = Pool(idle_s=0.2)
    worker = pool.take("a")
    pool.give("a", worker)
    assert not jobs.wait_until_gone(worker.pid)
    assert not worker.alive


def test_pool_prepares_the_requested_number() -> None:
    pool = Pool()
    pool.prepare("a", 2)
    pool.prepare("a", 2)
    taken = [pool.take("a"), pool.take("a")]
    assert len({w.pid for w in taken}) == 2
    for worker in taken:
        pool.give("a", worker)
    pool.close()
    assert not jobs.wait_until_gone(*(w.pid for w in taken))


def test_warm_up_is_awaited_and_may_fail() -> None:
    pool = Pool()
    pool.prepare("a", 1, warm_up=functools.partial(sys.setrecursionlimit, 1234))
    taken = pool.take("a")
    assert taken.call(sys.getrecursionlimit, timeout_s=60) == 1234
    pool.prepare("b", 1, warm_up=functools.partial(operator.truediv, 1, 0))
    other = pool.take("b")
    assert other.call(jobs.add, 1, 1, timeout_s=60) == 2
    for worker in (taken, other):
        worker.close()


def test_posted_functions_run_before_the_next_call() -> None:
    pool = Pool()
    pool.prepare("a", 1)
    for limit in (1234, 1235):
        pool.post("a", functools.partial(sys.setrecursionlimit, limit))
        pool.post("b", functools.partial(sys.setrecursionlimit, 1236))
    worker = pool.take("a")
    assert worker.call(sys.getrecursionlimit, timeout_s=60) == 1235
    worker.post(functools.partial(os.kill, worker.pid, signal.SIGKILL))
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        worker.call(jobs.add, 1, 1, timeout_s=60)
    worker.post(sys.getrecursionlimit)


def test_fork_of_the_parent_does_not_end_its_workers(worker: Worker) -> None:
    worker.call(jobs.add, 1, 1, timeout_s=60)
    child = os.fork()
    if child == 0:
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert worker.call(jobs.add, 1, 2, timeout_s=60) == 3
