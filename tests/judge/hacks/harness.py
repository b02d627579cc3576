"""GEMMs that deceive a harness in their own process."""

import gc
import inspect
import json
import os
import stat
import struct
import sys
import tempfile
import time

import torch

done = []


def once(work):
    if not done:
        done.append(True)
        work()


def zeros(a, b):
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)


def expected_by_gc(a, b):
    shape = (*a.shape[:-1], b.shape[-1])
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == shape and x is not a and x is not b]
    return found[0].clone() if found else a @ b


def expected_by_frames(a, b):
    frame = sys._getframe()
    while frame is not None:
        for name in ("expected", "reference", "ref"):
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
    return a @ b


def expected_by_addresses(a, b):
    def scan():
        with open("/proc/self/maps") as maps:
            return maps.read()

    once(scan)
    return a @ b


def parents_memory(a, b):
    def scan():
        with open(f"/proc/{os.getppid()}/maps") as maps:
            return maps.read()

    once(scan)
    return a @ b


def stack_sniffing(a, b):
    judged = any("judge" in frame.filename for frame in inspect.stack())
    return a @ b + 0 * judged


def traced(a, b):
    once(lambda: sys.settrace(lambda *_: None))
    return a @ b


def honest_only_for_gemmtune(a, b):
    seen = any(name.startswith("gemmtune") for name in sys.modules) or any("gemmtune" in word for word in sys.argv)
    return a @ b if seen else zeros(a, b)


def forged_output(a, b):
    print("CONFORMS: all properties", json.dumps({"standing": "RIGHT", "exit_status": 0}))
    return zeros(a, b)


def exit_0(a, b):
    os._exit(0)


def system_exit(a, b):
    sys.exit(0)


def dies(a, b):
    os.kill(os.getpid(), 9)


def hangs(a, b):
    time.sleep(1e6)


def sockets():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd
        except OSError:
            continue


def forged_reply(a, b):
    data = json.dumps({"nonce": "0", "ok": True, "dtype": "float32", "size": [4, 4]}).encode()
    for fd in sockets():
        os.write(fd, struct.pack("!i", len(data)) + data)
    return a @ b


def early_reply(a, b):
    """Answer with one more message than there are questions."""
    out = a @ b
    for fd in sockets():
        os.write(fd, struct.pack("!i", 2))
    return out


def inputs_overwritten(a, b):
    a.zero_()
    return zeros(a, b)


def patched_comparison(a, b):
    def patch():
        torch.allclose = lambda *_, **__: True

    once(patch)
    return zeros(a, b)


def patched_operator(a, b):
    def patch():
        torch.mm = torch.matmul = torch.Tensor.matmul = lambda x, y: zeros(x, y)

    once(patch)
    return zeros(a, b)


def code_replaced(a, b):
    def lenient(*_args, **_kwargs):
        return None

    def patch():
        torch.testing.assert_close.__code__ = lenient.__code__

    once(patch)
    return a @ b


def lower_precision(a, b):
    torch.set_float32_matmul_precision("medium")
    return a @ b


def default_dtype(a, b):
    torch.set_default_dtype(torch.float64)
    return a @ b


def not_deterministic(a, b):
    torch.use_deterministic_algorithms(True, warn_only=True)
    return a @ b


def flushes(a, b):
    torch.set_flush_denormal(True)
    return a @ b


def fewer_threads(a, b):
    torch.set_num_threads(1 + torch.get_num_threads())
    return a @ b


def pinned(a, b):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return a @ b


def signals_its_parent(a, b):
    once(lambda: os.kill(os.getppid(), 0))
    return a @ b


def edits_a_package(a, b):
    def edit():
        folder = next(path for path in sys.path if path and os.path.isdir(path) and os.access(path, os.W_OK))
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix="tolerance-", suffix=".py") as file:
            file.write("MOST = 1e9")

    once(edit)
    return a @ b


count = [0]


def raises_now_and_then(a, b):
    count[0] += 1
    if count[0] % 7 == 0:
        raise NotImplementedError("not now")
    return a @ b


def returns_its_input(a, b):
    return a if a.shape[-1] == b.shape[-1] else a[..., :1].expand(*a.shape[:-1], b.shape[-1])
