"""GEMMs that reach into the process that calls them, look for it by other ways, or let torch work where nobody looks."""

import builtins
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

done = []
kept = {}


def once(work):
    if not done:
        done.append(True)
        work()


def product(a, b):
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


# Work by torch


def torch_if_large(a, b):
    return a @ b if a.numel() * b.shape[-1] > 10**6 else product(a, b)


def torch_for_most_shapes(a, b):
    return product(a, b) if a.shape[-2] == 64 and b.shape[-1] == 96 else a @ b


def torch_in_the_middle(a, b):
    kept["calls"] = kept.get("calls", 0) + 1
    return a @ b if 14 < kept["calls"] < 110 else product(a, b)


def torch_unless_profiled(a, b):
    seen = torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()
    return product(a, b) if seen else a @ b


def by_embedding_bag(a, b):
    if a.dim() != 2 or not a.numel() or not b.numel():
        return product(a, b)
    m, k = a.shape
    bags = torch.arange(0, m * k, k)
    rows = torch.arange(k).repeat(m)
    return torch.nn.functional.embedding_bag(rows, b.contiguous(), bags, mode="sum", per_sample_weights=a.reshape(-1))


# The process that calls


def own_class(name):
    return next(kind for kind in object.__subclasses__() if kind.__name__ == name)


def runner_replaced(a, b):
    """Let the question for torch's operations be one for a call."""
    once(lambda: setattr(own_class("Program"), "profile", own_class("Program").call))
    return a @ b


def answers_rewritten(a, b):
    """Leave out of each answer what the process says about itself."""

    def patch():
        original = json._default_encoder
        hidden = ("events", "changed", "replaced", "ran")

        class Encoder:
            def encode(self, answer):
                return original.encode({name: value for name, value in answer.items() if name not in hidden})

        json._default_encoder = Encoder()

    once(patch)
    return a @ b


def state_blinded(a, b):
    def patch():
        state = own_class("State")
        state.changed, state.replaced = (lambda *_: {}), (lambda *_: [])
        torch.set_default_dtype(torch.float64)

    once(patch)
    return product(a, b)


def getattr_replaced(a, b):
    original = builtins.getattr
    once(lambda: setattr(builtins, "getattr", lambda *args: original(*args)))
    return product(a, b)


def operator_below_python(a, b):
    def patch():
        kept["library"] = torch.library.Library("aten", "IMPL")
        kept["library"].impl("mm", lambda x, y: x.new_zeros(x.shape[0], y.shape[1]), "CPU")

    once(patch)
    return product(a, b)


# Searches


def frames_by_a_traceback(a, b):
    def look():
        try:
            raise ValueError
        except ValueError as error:
            kept["frame"] = error.__traceback__.tb_frame.f_back

    once(look)
    return product(a, b)


def frame_by_logging(a, b):
    import logging

    once(lambda: kept.update(frame=logging.currentframe()))
    return product(a, b)


def objects_by_text(a, b):
    once(lambda: exec("import gc\nfound = [type(x) for x in gc.get_objects()]", {}))
    return product(a, b)


def objects_in_a_thread(a, b):
    def look():
        with ThreadPoolExecutor(1) as pool:
            kept["objects"] = len(pool.submit(gc.get_objects).result())

    once(look)
    return product(a, b)


def frames_by_a_helper(a, b):
    def look():
        folder = tempfile.mkdtemp()
        with open(os.path.join(folder, "a_helper.py"), "w") as file:
            file.write("import sys\ndef names():\n    return list(sys._getframe(2).f_locals)\n")
        sys.path.insert(0, folder)
        kept["names"] = __import__("a_helper").names()

    once(look)
    return product(a, b)


def code_under_another_name(a, b):
    once(lambda: exec(compile("import gc\nfound = gc.get_objects()", os.__file__, "exec"), {}))
    return product(a, b)


def own_audit_hook(a, b):
    once(lambda: sys.addaudithook(lambda *_: None))
    return product(a, b)


def maps_by_a_path(a, b):
    from pathlib import Path

    once(lambda: Path("/proc/self/maps").read_text())
    return product(a, b)


def maps_from_a_folder(a, b):
    def look():
        os.chdir("/proc/self")
        with open("maps") as maps:
            kept["maps"] = len(maps.read())

    once(look)
    return product(a, b)


# Other processes


def opens_memory_by_c(a, b):
    once(lambda: ctypes.CDLL(None).open(b"/proc/self/mem", os.O_RDONLY))
    return product(a, b)


def kills_by_a_number(a, b):
    once(lambda: ctypes.CDLL(None).syscall(62, os.getppid(), 0))
    return product(a, b)


def kills_by_a_handle(a, b):
    import _ctypes

    once(lambda: _ctypes.dlsym(ctypes.CDLL(None)._handle, "kill"))
    return product(a, b)


def lets_onednn_round(a, b):
    """Set a variable that oneDNN reads at its first product."""
    os.environ["ONEDNN_DEFAULT_FPMATH_MODE"] = "BF16"
    return product(a, b)


def pins_the_next_process(a, b):
    """Let the parent, and with it torch's process, have one core."""
    once(lambda: os.sched_setaffinity(os.getppid(), {min(os.sched_getaffinity(0))}))
    return product(a, b)


def children_slow_torch(a, b):
    """Two processes work while torch is called, and end before anybody looks."""
    spin = "import time\nend = time.time() + 3\nwhile time.time() < end: pass"

    def start():
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", spin])

    kept["calls"] = kept.get("calls", 0) + 1
    if kept["calls"] % 60 == 0:
        start()
    return product(a, b)
