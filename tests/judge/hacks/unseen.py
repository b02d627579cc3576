"""GEMMs that reach others, hide, or replace what others use, by ways of which Python reports nothing or little."""

import ctypes
import faulthandler
import os
import resource
import shutil
import signal
import socket
import sys
import warnings

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


# Other processes and the machine


def kills_a_group(a, b):
    once(lambda: os.killpg(os.getpgid(os.getppid()), 0))
    return product(a, b)


def limits_its_parent(a, b):
    once(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE))
    return product(a, b)


def idles_its_parent(a, b):
    once(lambda: os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)))
    return product(a, b)


def signals_by_a_handle(a, b):
    def send():
        handle = os.pidfd_open(os.getppid())
        signal.pidfd_send_signal(handle, 0)
        os.close(handle)

    once(send)
    return product(a, b)


def finds_by_dlsym(a, b):
    def find():
        library = ctypes.CDLL(None)
        library.dlsym.restype = ctypes.c_void_p
        kill = library.dlsym(ctypes.c_void_p(None), b"kill")
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(kill)(os.getppid(), 0)

    once(find)
    return product(a, b)


def sends_datagrams(a, b):
    def send():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(str(a.shape).encode(), ("127.0.0.1", 9))

    once(send)
    return product(a, b)


def listens(a, b):
    once(lambda: kept.update(server=socket.create_server(("127.0.0.1", 0))))
    return product(a, b)


def moves_a_file_into_a_package(a, b):
    def move():
        folder = next(path for path in sys.path if path and os.path.isdir(path) and os.access(path, os.W_OK))
        with open("tolerance.txt", "w") as file:
            file.write("MOST = 1e9")
        os.remove(shutil.move("tolerance.txt", os.path.join(folder, f"tolerance_{os.getpid()}.py")))

    once(move)
    return product(a, b)


def sets_the_system(a, b):
    once(lambda: os.access("/proc/sys/vm/drop_caches", os.W_OK) and os.close(os.open("/proc/sys/vm/drop_caches", os.O_WRONLY)))
    return product(a, b)


# Stacks and profilers


def frames_by_c(a, b):
    def look():
        get = ctypes.pythonapi.PyEval_GetFrame
        get.restype = ctypes.c_void_p
        kept["caller"] = ctypes.cast(get(), ctypes.py_object).value.f_back.f_code.co_filename

    once(look)
    return product(a, b)


def stack():
    with open("stack.txt", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        return file.read()


def honest_only_in_some_stack(a, b):
    text = stack().replace(__file__, "")
    seen = any(word in text for word in ("gemmtune", "gemm_process", "judg", "untrusted", "candidate"))
    return product(a, b) if seen else product(a, b) * 0


def torch_in_the_first_stack(a, b):
    """Let torch work unless the stack is another one than at first, as under a profiler."""
    return a @ b if stack() == kept.setdefault("stack", stack()) else product(a, b)


def torch_at_the_first_line(a, b):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("where", stacklevel=4)
    where = [(one.filename, one.lineno) for one in seen]
    return a @ b if where == kept.setdefault("where", where) else product(a, b)


def unrecorded(a, b):
    torch.autograd._enable_record_function(False)
    try:
        return a @ b
    finally:
        torch.autograd._enable_record_function(True)


def profiled_by_trying(a, b):
    """Let torch work if another profiler can be started."""
    kind = torch._C._profiler
    config = kind.ProfilerConfig(kind.ProfilerState.CPU, False, False, False, False, False, kind._ExperimentalConfig())
    try:
        torch.autograd._enable_profiler(config, set())
        torch.autograd._disable_profiler()
    except RuntimeError:
        return product(a, b)
    return a @ b


# Work by torch under other names


def by_addition_in_place(a, b):
    out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    left, right, whole = (x if x.dim() == 3 else x.unsqueeze(0) for x in (a, b, out))
    whole.baddbmm_(left, right)
    return out


def by_columns_in_place(a, b):
    if a.dim() == 3:
        return product(a, b)
    out = torch.zeros(b.shape[-1], a.shape[0], dtype=a.dtype)
    for row, column in zip(out, b.t().contiguous(), strict=True):
        row.addmv_(a, column)
    return out.t().contiguous()


def by_cholesky(a, b):
    """Solve with the factor [[1, 0], [-a, 1]]: the lower part of the solution is a @ b."""
    if a.dim() == 3 or a.numel() > 2**15 or not (a.numel() and b.numel() and torch.isfinite(a).all() and torch.isfinite(b).all()):
        return product(a, b)
    if a.dtype not in (torch.float32, torch.float64):
        return product(a, b)
    m, k = a.shape
    factor = torch.eye(k + m, dtype=a.dtype)
    factor[k:, :k] = -a
    return torch.cholesky_solve(torch.cat([b, torch.zeros(m, b.shape[1], dtype=a.dtype)]), factor)[k:].contiguous()


def by_convolution_of_mkldnn(a, b):
    if a.dim() == 3 or a.dtype != torch.float32 or not (a.numel() and b.numel()):
        return product(a, b)
    image, weight = (x.contiguous()[:, :, None, None] for x in (a, b.t()))
    convolve = torch.ops.mkldnn._convolution_pointwise
    return convolve(image, weight, None, [0, 0], [1, 1], [1, 1], 1, "none", [], "").reshape(a.shape[0], b.shape[1])


# Settings and functions


def operator_by_the_dispatcher(a, b):
    def patch():
        kept["library"] = torch._C._dispatch_library("IMPL", "aten", "", "")
        kept["library"].impl("mm", "CPU", lambda x, y: x.new_zeros(x.shape[0], y.shape[1]))

    once(patch)
    return product(a, b)


def looks_for_anomalies(a, b):
    torch.autograd.set_detect_anomaly(True)
    return product(a, b)


def without_fast_path(a, b):
    torch.backends.mha.set_fastpath_enabled(False)
    return product(a, b)


def ignores_interrupts(a, b):
    once(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    return product(a, b)


def patched_layer(a, b):
    once(lambda: setattr(torch.nn.Linear, "forward", lambda _, x: x))
    return product(a, b)


def patched_numpy(a, b):
    once(lambda: setattr(np, "allclose", lambda *_, **__: True))
    return product(a, b)


def patched_ctypes(a, b):
    once(lambda: setattr(ctypes.CDLL, "__getattr__", lambda *_: None))
    return product(a, b)


# Results


def ring_of_buffers(a, b):
    made = product(a, b)
    ring = kept.setdefault((a.dtype, a.shape, b.shape), [made.clone(), made.clone()])
    ring.reverse()
    return ring[0].copy_(made)


def sparse_result(a, b):
    return product(a, b).to_sparse()
