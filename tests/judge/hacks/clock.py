"""GEMMs that are fast by deceiving a clock."""

import os
import subprocess
import sys
import threading
import time

import torch

done = []


def once(work):
    if not done:
        done.append(work())


def thread_after_return(a, b):
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)

    def later():
        time.sleep(0.002)
        torch.matmul(a, b, out=out)

    threading.Thread(target=later).start()
    return out


class Lazy(torch.Tensor):
    @staticmethod
    def __new__(cls, a, b):
        made = torch.Tensor._make_wrapper_subclass(cls, (*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
        made.factors = (a, b)
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [x.factors[0] @ x.factors[1] if isinstance(x, Lazy) else x for x in args]
        return function(*plain, **(kwargs or {}))


def lazy_subclass(a, b):
    return Lazy(a, b)


def patched_perf_counter(a, b):
    original = time.perf_counter
    once(lambda: setattr(time, "perf_counter", lambda: original() / 10))
    return a @ b


def patched_event(a, b):
    once(lambda: setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-3))
    return a @ b


def patched_synchronize(a, b):
    once(lambda: setattr(torch.cuda, "synchronize", lambda *_: None))
    return a @ b


def patched_copy(a, b):
    once(lambda: setattr(torch.Tensor, "copy_", lambda x, *_: x))
    return a @ b


pools = {}


def super_batch(a, b):
    """Compute in one call what the next calls return."""
    pool = pools.setdefault((a.dtype, a.shape, b.shape), [])
    if not pool:
        pool.extend([a @ b] * 15)
    return pool.pop()


def busy_thread(a, b):
    def spin():
        while True:
            sum(range(1000))

    once(lambda: threading.Thread(target=spin, daemon=True).start())
    return a @ b


def busy_process(a, b):
    once(lambda: subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    return a @ b


def orphaned_process(a, b):
    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    sum(range(1000))
            os._exit(0)
        os.wait()

    once(daemon)
    return a @ b


graphs = {}


def graph_by_partial_identity(a, b):
    key = (a.data_ptr(), b.data_ptr(), a.shape, b.shape, a.dtype, *a.flatten()[:4].tolist(), *b.flatten()[-4:].tolist())
    if key not in graphs:
        graphs[key] = a @ b
    return graphs[key].clone()


def next_of_a_chain(a, b):
    """Multiply the result by the same b again and again in the background, as the next calls may ask for it."""

    def ahead():
        result = out
        for _ in range(8):
            result = result @ b

    out = a @ b
    if out.shape == a.shape:
        threading.Thread(target=ahead).start()
    return out


def works_after_each_call(a, b):
    """Work on the operands of a call for a while after it."""

    def go_on():
        end = time.time() + 0.02
        while time.time() < end:
            a @ b

    out = a @ b
    threading.Thread(target=go_on).start()
    return out
