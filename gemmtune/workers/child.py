"""Child side of a worker process: it receives a job, runs it, and sends back the result or the exception."""

import faulthandler
import importlib
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from .pipe import READY

PARENT_CHECK_S = 0.25
GRACE_S = 10.0


def main(fd: int, parent: int, modules: Sequence[str] = ()) -> None:
    """Import ``modules``, then run the jobs from the pipe ``fd`` until it closes or the process ``parent`` ends."""
    os.set_inheritable(fd, False)  # compilers that this process starts must not keep the pipe open after its death
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this group
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=False)  # the Python stack of a segmentation fault becomes part of the reason
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for name in modules:
        importlib.import_module(name)
    connection = Connection(fd)
    connection.send_bytes(READY)
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        connection.send_bytes(_answer(job))


def _end_with(parent: int) -> None:
    """End this process group once the parent is gone.

    Polling the parent works where other ways fail. A pipe stays open in forks of the parent. Linux's parent-death signal
    comes when the *thread* ends that started this process, and it does not reach the compilers that this process started.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def _answer(job: bytes) -> bytes:
    """Run the job and return (ok, pickled result or exception, text of an exception that cannot be pickled)."""
    try:
        function, args, timeout_s = pickle.loads(job)
        # A last resort that needs no GIL: if the parent is gone and native code holds the GIL, the thread above cannot run.
        faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True)
        result = function(*args)
        return pickle.dumps((True, pickle.dumps(result), ""))
    except Exception as error:  # noqa: BLE001 - the caller gets whatever the job raises
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps((False, _pickled(error, text), text))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _pickled(error: Exception, text: str) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled but not unpickled, because their constructors take other arguments
    except Exception:  # noqa: BLE001 - any failure means that it cannot be pickled
        return pickle.dumps(RuntimeError(text))
    return data
