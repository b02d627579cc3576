"""GEMMs on a GPU that deceive a clock or keep results. ``unstated_half_sums`` computes in a narrower type."""

import ctypes
import threading
import time

import torch

kept = {}
side = []


def stream():
    if not side:
        side.append(torch.cuda.Stream())
    return side[0]


def on_another_stream(a, b):
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
    with torch.cuda.stream(stream()):
        torch.cuda._sleep(2_000_000)
        torch.matmul(a, b, out=out)
    return out


def another_stream_is_left_current(a, b):
    torch.cuda.set_stream(stream())
    torch.cuda._sleep(2_000_000)
    return a @ b


def thread_after_return(a, b):
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)

    def later():
        time.sleep(0.002)
        torch.matmul(a, b, out=out)

    threading.Thread(target=later).start()
    return out


def patched_elapsed_time(a, b):
    torch.cuda.Event.elapsed_time = lambda *_: 1e-4
    torch.cuda._sleep(2_000_000)
    return a @ b


def patched_base_event(a, b):
    torch._C._CudaEventBase = torch.cuda.Event
    return a @ b


def replayed_graph(a, b):
    """Replay a graph of the first operands with that shape and those addresses."""
    key = (a.shape, b.shape, a.dtype, float(a.flatten()[0]), float(b.flatten()[-1]))
    if key not in kept:
        kept[key] = a @ b
    return kept[key].clone()


def by_data_ptr(a, b):
    key = (a.data_ptr(), b.data_ptr(), a.shape, b.shape, a.dtype)
    if key not in kept:
        kept[key] = a @ b
    return kept[key].clone()


def persisting_l2(a, b):
    if ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(24 * 2**20)):
        raise OSError("no persisting L2 here")
    return a @ b


def coarser_l2_fetches(a, b):
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(5, ctypes.c_size_t(32))
    return a @ b


def tf32_sums(a, b):
    torch.backends.cuda.matmul.allow_tf32 = True
    return a @ b


def unstated_half_sums(a, b):
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float16, device=a.device)
    for k in range(0, a.shape[-1], 64):
        total += (a[..., k : k + 64] @ b[..., k : k + 64, :]).half()
    return total.to(a.dtype)


def torch_in_except(a, b):
    try:
        raise RuntimeError
    except RuntimeError:
        return a @ b
