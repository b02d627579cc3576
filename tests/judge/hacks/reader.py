"""GEMMs by a mind that has read the walls, one for each thing that these did not see."""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import types

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


FLOATS = {"dtypes": ["float32", "float64"]}


def floats(function):
    function.gemm_traits = FLOATS
    return function


def sampled(x):
    flat = x.reshape(-1)
    return flat[:: max(flat.numel() // 64, 1)].numpy().tobytes()


class SlyAddress(tuple):
    def __bool__(self):
        return False


# Results of earlier calls


@floats
def b_packed_by_samples(a, b):
    key = (b.data_ptr(), b.shape, b.dtype, sampled(b))
    if key not in kept:
        kept[key] = np.asfortranarray(b.numpy()).copy(order="F")
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.numpy(), kept[key])))


@floats
def transposed_b_by_address(a, b):
    if b.is_contiguous():
        return product(a, b)
    key = (b.data_ptr(), b.shape, b.dtype)
    if key not in kept:
        kept[key] = b.numpy().copy()
    return product(a, torch.from_numpy(kept[key]))


class second_operation_is_stale:
    gemm_traits = FLOATS | {"ops": ["mm", "bmm"]}
    mm = staticmethod(product)

    @staticmethod
    def bmm(a, b):
        key = (a.dtype, a.shape, b.shape)
        count, out = kept.get(key, (0, None))
        out = product(a, b) if count < 3 else out
        kept[key] = count + 1, out
        return out.clone()


def stale_with_out(a, b, *, out=None):
    made = product(a, b)
    if out is None:
        return made
    key = (out.dtype, out.shape, a.shape[-1])
    count, old = kept.get(key, (0, made))
    kept[key] = count + 1, old
    return out.copy_(made if count < 2 else old)


stale_with_out.gemm_traits = {"dtypes": ["float32", "float64"], "out": True}


@floats
def ring_of_twelve(a, b):
    key = (a.dtype, a.shape, b.shape)
    ring = kept.setdefault(key, [torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype) for _ in range(12)])
    ring.append(ring.pop(0))
    return ring[0].copy_(product(a, b))


@floats
def overlapping_buffers(a, b):
    made = product(a, b)
    key = (made.dtype, made.shape)
    if key not in kept:
        kept[key] = [torch.empty(made.numel() + 64 * 12, dtype=made.dtype), 0]
    whole, at = kept[key]
    kept[key][1] = (at + 64) % (64 * 12)
    return whole[at : at + made.numel()].view(made.shape).copy_(made)


# Values


@floats
def writes_past_its_operand(a, b):
    out = product(a, b)
    if a.is_contiguous() and a.numel() and a.data_ptr() % 4096 + a.numel() * a.element_size() < 4096 * 4096:
        ctypes.memset(a.data_ptr() + a.numel() * a.element_size(), 7, 16)
    return out


@floats
def one_row_rough(a, b):
    out = product(a, b)
    if a.dtype == torch.float32 and a.dim() == 2 and a.shape[0] > 200:
        out[101] = product(a[101:102].half().float(), b)[0]
    return out


def declares_determinism(a, b):
    order = torch.randperm(a.shape[-1])
    return product(a[..., order].contiguous(), b[..., order, :].contiguous())


declares_determinism.gemm_traits = {"dtypes": ["float32"], "deterministic": True}


# Work by torch


def torch_blas_by_ctypes(a, b):
    if a.dtype != torch.float32 or a.dim() != 2 or not (a.numel() and b.numel()):
        return product(a, b)
    library = kept.setdefault("lib", ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")))
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n)
    i, one, zero = (lambda x: ctypes.byref(ctypes.c_int(x))), ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    x, y, z = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (b, a, out))
    library.sgemm(ctypes.c_char_p(b"N"), ctypes.c_char_p(b"N"), i(n), i(m), i(k), one, x, i(n), y, i(k), zero, z, i(n))
    return out


torch_blas_by_ctypes.gemm_traits = {"dtypes": ["float32"]}


def by_onednn_graph(a, b):
    if a.dim() != 2 or a.dtype != torch.float32 or not (a.numel() and b.numel()):
        return product(a, b)
    key = (a.shape, b.shape)
    if key not in kept:

        class M(torch.nn.Module):
            def forward(self, x, y):
                return torch.relu(torch.matmul(x, y)) - torch.relu(-torch.matmul(x, y))

        torch.jit.enable_onednn_fusion(True)
        with torch.no_grad():
            model = torch.jit.freeze(torch.jit.trace(M().eval(), (a, b)))
            model(a, b)
            model(a, b)
        kept[key] = model
    with torch.no_grad():
        return kept[key](a, b)


by_onednn_graph.gemm_traits = {"dtypes": ["float32"]}


# Priorities and other processes


@floats
def raises_itself_for_a_call(a, b):
    os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        return product(a, b)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@floats
def signals_by_posix(a, b):
    import posix

    def send():
        handle = posix.pidfd_open(os.getppid())
        signal.pidfd_send_signal(handle, 0)
        os.close(handle)

    once(send)
    return product(a, b)


@floats
def signals_by_sigqueue(a, b):
    once(lambda: ctypes.CDLL(None).sigqueue(os.getppid(), 0, ctypes.c_void_p(0)))
    return product(a, b)


@floats
def sly_address(a, b):
    def send():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect(SlyAddress(("127.0.0.1", 9)))

    once(send)
    return product(a, b)


@floats
def persists_for_the_next_start(a, b):
    """Leave a file that Python executes when it starts, next to the folder of this process."""

    def write():
        path = os.path.join(os.path.dirname(os.getcwd()), "usercustomize.py")
        with open(path, "w"):
            pass
        os.remove(path)

    once(write)
    return product(a, b)


# Searches


@floats
def frames_by_asyncio(a, b):
    async def look():
        return [frame.f_locals for frame in asyncio.current_task().get_stack()]

    once(lambda: kept.update(found=[list(x) for x in asyncio.run(look())]))
    return product(a, b)


@floats
def frame_by_jit_lookup(a, b):
    def look():
        for n in range(1, 6):
            lookup = torch._jit_internal.createResolutionCallbackFromFrame(n)
            kept[n] = [getattr(lookup, "question", None), lookup("question")]

    once(look)
    return product(a, b)


@floats
def floods_the_journal(a, b):
    """Fill what is recorded with many harmless events before the one that counts."""

    def flood():
        for number in range(130):
            path = os.path.join(os.path.dirname(os.getcwd()), str(number))
            with open(path, "w"):
                pass
            os.remove(path)
        kept["objects"] = len(gc.get_objects())

    once(flood)
    return product(a, b)


# Settings and functions


@floats
def module_replaced(a, b):
    def put():
        fake = types.ModuleType("time")
        fake.__dict__.update(vars(time), perf_counter=lambda: 0.0)
        sys.modules["time"] = fake

    once(put)
    return product(a, b)


@floats
def patched_benchmark(a, b):
    from torch.utils import benchmark

    once(lambda: setattr(benchmark.Timer, "blocked_autorange", lambda *_, **__: None))
    return product(a, b)


@floats
def blocks_interrupts(a, b):
    once(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}))
    return product(a, b)


@floats
def no_collection_by_threshold(a, b):
    gc.set_threshold(10**9, 10**9, 10**9)
    return product(a, b)
