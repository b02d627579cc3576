"""Worker process: runs functions that may hang, crash or ruin their GPU context, outside of the caller's process.

    worker = Worker()
    worker.call(module.function, argument, timeout_s=60)

Function and arguments are pickled, so the function belongs to a module and the child finds modules by the parent's
``sys.path``. The parent's main module is never imported: programs need no ``if __name__ == "__main__"`` guard.
"""

import contextlib
import fcntl
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import ErrorWithData, GemmtuneError, UnavailableError
from ..foreign import shown
from .pipe import READY, GarbledError, Pipe

T = TypeVar("T")
log = logging.getLogger("gemmtune")

START_TIMEOUT_S = 180.0
"""Time limit of the start. Importing torch takes seconds, and many seconds if every core is importing it."""
POSTED_S = 60.0
POSTING_S = 2.0
"""Time limit for handing over a posted function, which a worker reads only after the previous ones."""
ENDING_S = 10.0
"""Time limit for the end of a killed process. The system may keep it longer, in a driver for example."""
DIED = "died by "
"""Words before the signal that ended a process."""
NO_ANSWER = "no answer within"
"""Words in the reason of every WorkerTimedOut."""
GARBLED = "garbled its answer"
"""Words in the reason of a WorkerCrashed whose answer is none."""
TAIL_BYTES = 4000
"""Size of the end of the child's stderr that becomes part of a crash's reason."""


class _WorkerEnded(GemmtuneError, RuntimeError):
    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class WorkerCrashed(_WorkerEnded):
    """Error of a worker process that died during a job. ``reason`` has its signal or exit status and the end of its stderr."""


class WorkerTimedOut(_WorkerEnded):
    """Error of a worker process that did not answer within the time limit and was killed."""


class NoWorkerError(ErrorWithData, UnavailableError):
    """Error of a worker process that cannot be started or ended before it took a job: no job is to blame."""

    def __init__(self, why: str) -> None:
        self.why = why
        remedy = (
            "the signal came while it started: look in the system's log for its reason, such as a lack of memory, and try again"
            if DIED in why
            else f"sys.executable is {sys.executable!r}, expected the path of a Python interpreter that starts: set sys.executable "
            "to it, or tune_in_subprocess=False to compile and tune in this process"
        )
        super().__init__(f"no worker process can be started: {why}; {remedy}")


class Worker:
    """Child process in a separate process group, which ends when its parent does.

    The constructor returns at once, and the first ``call`` waits until the child has imported its modules. A worker that
    crashed, timed out or was interrupted stays dead (``alive`` is False), and the caller makes another one. Calls from
    several threads take turns.

    Args:
        gpu: False hides every GPU from the child, so that compilation cannot create a GPU context by accident.
        modules: modules that the child imports before the first job, so that the job need not wait for them.

    Raises:
        NoWorkerError: it cannot be started.
    """

    def __init__(self, *, gpu: bool = True, modules: Sequence[str] = ()) -> None:
        if not sys.executable:
            raise NoWorkerError("there is no interpreter to start it with")
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._owner = os.getpid()
        self._awaited = [START_TIMEOUT_S]
        """Time limits of the messages before the answer to the next call: the ready message and the answers to posted functions."""
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        except OSError as error:
            raise NoWorkerError(f"its output has no temporary file: {error}") from error
        # Appending lets the parent empty the file before each job, so that its contents belong to the current job.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
        own_end, child_end = socket.socketpair()
        self._pipe = Pipe(own_end, self._exited)
        # The child hides GPUs before it imports torch, and finds modules where the parent finds them.
        path = [str(entry) or os.getcwd() for entry in sys.path]
        hide = "" if gpu else "os.environ.update(CUDA_VISIBLE_DEVICES='', HIP_VISIBLE_DEVICES='', ROCR_VISIBLE_DEVICES=''); "
        start = f"import os, sys; {hide}sys.path[:] = {path!r}; from gemmtune.workers.child import main; "
        with child_end:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"{start}main({child_end.fileno()}, {os.getpid()}, {tuple(modules)!r})"],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=(child_end.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                self._pipe.close()
                self._stderr.close()
                raise NoWorkerError(str(error)) from error
        self.alive = True
        self._started = False

    @property
    def pid(self) -> int:
        """Process id of the child, and also of its process group."""
        return self._process.pid

    def post(self, function: Callable[[], object]) -> None:
        """Run a function in the child before the next call, without waiting. Its exceptions are not reported."""
        job = pickle.dumps((function, (), POSTED_S))
        with self._lock:
            if not self.alive:
                return
            try:
                self._pipe.send(job, POSTING_S)  # waits in the pipe until it is read
                self._awaited.append(POSTED_S)
            except TimeoutError:
                self.close()  # half of a message is in the pipe
            except (EOFError, OSError):
                return  # the next call reports a child that has ended

    def call(self, function: Callable[..., T], *args: object, timeout_s: float) -> T:
        """Return ``function(*args)``, run in the child.

        Raises:
            WorkerTimedOut: no whole answer within ``timeout_s`` seconds. The child and all its processes were killed.
            WorkerCrashed: the child died, or sent something that is no answer and was killed.
            NoWorkerError: it died before it could take a job.
            Exception: the exception of the function (a RuntimeError with its type and text, if it cannot be pickled).
        """
        # Pickled outside of the lock and before sending, so an argument that cannot be pickled harms no worker.
        job = pickle.dumps((function, args, timeout_s))
        with self._lock:
            if not self.alive:
                raise WorkerCrashed("the worker process has ended already")
            limit_s = timeout_s
            try:
                while self._awaited:
                    limit_s = self._awaited[0]
                    self._await()
                os.ftruncate(self._stderr.fileno(), 0)
                limit_s, begun = timeout_s, time.monotonic()
                self._pipe.send(job, limit_s)
                answer = _parts(self._pipe.receive(limit_s + begun - time.monotonic()))
            except TimeoutError as error:
                self.close()
                raise WorkerTimedOut(f"{NO_ANSWER} {limit_s:g} s") from error
            except GarbledError as error:
                self.close()
                raise (WorkerCrashed if self._started else NoWorkerError)(
                    f"worker process {GARBLED} and was killed: {error}"
                ) from error
            except (EOFError, OSError) as error:
                reason = self._bury()
                raise (WorkerCrashed if self._started else NoWorkerError)(reason) from error
            except BaseException:  # Ctrl-C: the child is still running the job
                self.close()
                raise
        result: T = _unpack(*answer)
        return result

    def close(self) -> None:
        """Kill the child and all its processes at once. Do not use this during another thread's call."""
        self.abort()
        if self._owner == os.getpid():
            with self._ending:
                deadline = time.monotonic() + ENDING_S
                while not self._exited() and time.monotonic() < deadline:
                    time.sleep(0.002)
                if self._exited():
                    self._process.wait()
                else:
                    log.warning("process %d was killed and does not end: the system still holds it", self._process.pid)
            self._pipe.close()
            self._stderr.close()

    def abort(self) -> None:
        """Kill the child from any thread. A call in another thread then raises WorkerCrashed."""
        if self._owner != os.getpid():  # a fork of the parent: the child is not ours
            return
        with self._ending, contextlib.suppress(ProcessLookupError, PermissionError):
            self.alive = False
            if self._process.returncode is None:  # not reaped, so the group's number is still in use
                os.killpg(self._process.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the child from any thread. A job that handles it answers the call; else the child dies of it."""
        if self._owner == os.getpid():
            with self._ending, contextlib.suppress(ProcessLookupError, PermissionError):
                if self._process.returncode is None:
                    os.kill(self._process.pid, signal.SIGTERM)

    def _await(self) -> None:
        """Take the first of the messages before the answer: that the child is ready, or the answer to a posted function."""
        message = self._pipe.receive(self._awaited[0])
        if self._started:
            _parts(message)
        elif message != READY:
            raise GarbledError(f"got {message[:20]!r}, expected {READY!r}")
        self._started = True
        del self._awaited[0]

    def _exited(self) -> bool:
        """Return True if the process has exited. It is not reaped, so that its group's number stays taken until ``close``."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _bury(self) -> str:
        """End a child that closed its end of the pipe, and return how it died."""
        deadline = time.monotonic() + 2.0
        while not self._exited() and time.monotonic() < deadline:
            time.sleep(0.01)
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()
        self.close()
        status = self._process.returncode
        if status is None:
            return f"worker process {self._process.pid} closed its pipe and does not end"
        died = f"{DIED}{signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"worker process {died}" + (f"; the end of its output:\n{tail}" if tail else "")


def _parts(answer: bytes) -> tuple[bool, bytes, str]:
    """Return the parts of an answer as the child made it. Raises GarbledError for other bytes."""
    try:
        parts = pickle.loads(answer)
    except Exception as error:
        raise GarbledError(f"got {answer[:20]!r}, expected an answer ({type(error).__name__})") from error
    if not (isinstance(parts, tuple) and [type(part) for part in parts] == [bool, bytes, str]):
        raise GarbledError(f"got {shown(parts)}, expected an answer")
    return parts


def _unpack(ok: bool, payload: bytes, text: str) -> Any:
    try:
        value = pickle.loads(payload)
    except Exception as error:
        raise RuntimeError(text or f"the answer of the worker process cannot be read: {error}") from error
    if ok:
        return value
    raise value
