"""Honest GEMMs that keep state: pools, plans, caches on disk, tables, timers. Others add up in unusual ways."""

import ctypes
import faulthandler
import functools
import hashlib
import logging
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
from honest import declared, product, strassen

state = {}
pool = {}
arena = []
packed = {}


@declared()
def refcounted_pool(a, b):
    """Give a buffer again only when nobody has it."""
    size = (*a.shape[:-1], b.shape[-1])
    free = pool.setdefault((size, a.dtype), [])
    for buffer in free:
        if sys.getrefcount(buffer) == 3:
            break
    else:
        buffer = np.empty(size, a.numpy().dtype)
        free.append(buffer)
    np.matmul(a.numpy(), b.numpy(), out=buffer)
    return torch.from_numpy(buffer)


@declared()
def pool_by_holders_of_memory(a, b):
    """Give memory again only when no tensor has it, be it a view."""
    size = (*a.shape[:-1], b.shape[-1])
    free = pool.setdefault(("tensors", size, a.dtype), [])
    for buffer in free:
        if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= 2:
            break
    else:
        free.append(buffer := torch.empty(size, dtype=a.dtype))
    np.matmul(a.numpy(), b.numpy(), out=buffer.numpy())
    return buffer.view(size)


@declared()
def arena_of_workspaces(a, b):
    """Split a large arena for temporaries, and copy the result out of it."""
    if not arena:
        arena.append(np.empty(2**24, np.uint8))
    nbytes = int(np.prod((*a.shape[:-1], b.shape[-1]))) * a.element_size()
    if nbytes > 2**24:
        return product(a, b)
    view = arena[0][:nbytes].view(a.numpy().dtype).reshape(*a.shape[:-1], b.shape[-1])
    np.matmul(a.numpy(), b.numpy(), out=view)
    return torch.from_numpy(view.copy())


def callback(function, *args):
    """Run a function of the host on a thread, as a pure callback does, and hand its result over."""
    box, ready = [], threading.Event()

    def run():
        try:
            box.append(function(*(np.asarray(x) for x in args)))
        finally:
            ready.set()

    threading.Thread(target=run, daemon=True).start()
    ready.wait(20)
    return torch.as_tensor(box[0])


@declared()
def pure_callback(a, b):
    return callback(np.matmul, a, b)


@declared()
def tuned_plan_on_disk(a, b):
    """Keep the best block of a shape in a file of its own cache folder."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache")), "kernels")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, hashlib.sha1(repr((a.shape, b.shape, a.dtype)).encode()).hexdigest())
    if os.path.exists(path):
        with open(path) as file:
            step = int(file.read())
    else:
        step = max(1, min(128, a.shape[-2]))
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(str(step))
        os.replace(file.name, path)
    return torch.cat([product(x, b) for x in a.split(step, dim=-2)], dim=-2) if a.shape[-2] else product(a, b)


@functools.cache
def schedule(shape_a, shape_b, dtype):
    logging.getLogger("kernels").info("plan for %s %s", shape_a, shape_b)
    if shape_a[-1] % 2:
        warnings.warn("odd K takes the slow way", RuntimeWarning, stacklevel=3)
    return max(1, int(os.environ.get("KERNEL_BLOCK", 96)))


@declared()
def scheduled(a, b):
    step = schedule(a.shape, b.shape, a.dtype)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.numpy().dtype)
    for k in range(0, a.shape[-1], step):
        total += np.matmul(a[..., k : k + step].numpy(), b[..., k : k + step, :].numpy())
    return torch.from_numpy(total)


@declared()
def threads_of_libgomp(a, b):
    """Ask OpenMP for its number of threads, and split the rows by it."""
    gomp = ctypes.CDLL("libgomp.so.1")
    count = max(1, min(gomp.omp_get_max_threads(), 4))
    return torch.cat([product(x, b) for x in a.tensor_split(count, dim=-2)], dim=-2)


def table():
    if "table" not in state:
        with tempfile.TemporaryFile() as file:
            file.write(np.arange(256, dtype=np.int32).tobytes())
            file.flush()
            state["table"] = np.frombuffer(mmap.mmap(file.fileno(), 1024, access=mmap.ACCESS_READ), np.int32)
    return state["table"]


@declared()
def mapped_table(a, b):
    """Look up the order of the rows in a mapped table."""
    m = a.shape[-2]
    order = torch.from_numpy(table()[:m].astype(np.int64)) if m <= 256 else torch.arange(m)
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    out[..., order, :] = product(a[..., order, :].contiguous(), b)
    return out


def three_parts(x):
    parts, rest = [], x
    for _ in range(3):
        part = rest.bfloat16().float()
        parts.append(part)
        rest = rest - part
    return parts


def by_bfloat16_in_three(a, b):
    """Multiply three bfloat16 parts of each operand: six products of the order of float32's precision."""
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return product(a, b)
    (a0, a1, a2), (b0, b1, b2) = three_parts(a), three_parts(b)
    small = product(a2, b0) + product(a1, b1) + product(a0, b2)
    return (small + (product(a1, b0) + product(a0, b1))) + product(a0, b0)


by_bfloat16_in_three.gemm_traits = {"dtypes": ["float32"]}


def strassen_of_two_levels(a, b):
    """Multiply in float64 by Strassen's algorithm, and round to float32."""
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return product(a, b)
    return torch.from_numpy(strassen(a.double().numpy(), b.double().numpy(), 2).astype(np.float32))


strassen_of_two_levels.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}


@declared(out=True)
def result_in_strided_out(a, b, *, out=None):
    """Return a column-major result, or write to any strides."""
    made = torch.from_numpy(np.matmul(b.mT.numpy(), a.mT.numpy())).mT
    return made if out is None else out.copy_(made)


@declared()
def returns_a_part_of_a_padded_buffer(a, b):
    made = product(a, b)
    whole = torch.zeros(*made.shape[:-1], made.shape[-1] + 13, dtype=made.dtype)
    whole[..., 5 : 5 + made.shape[-1]] = made
    return whole[..., 5 : 5 + made.shape[-1]]


@declared()
def packed_by_hash(a, b):
    """Keep a packed b by a hash of all its bytes."""
    key = (b.shape, b.dtype, hashlib.blake2b(b.contiguous().numpy().tobytes(), digest_size=16).digest())
    if key not in packed:
        if len(packed) > 8:
            packed.clear()
        packed[key] = b.numpy().copy(order="F")
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.numpy(), packed[key])))


@declared()
def a_timer_and_a_finalizer(a, b):
    """Free old workspaces by a timer that does next to nothing, and by a finalizer."""
    made = product(a, b)
    weakref.finalize(made, state.setdefault("freed", []).clear)
    if "timer" not in state:
        state["timer"] = timer = threading.Timer(0.5, lambda: state.pop("old", None))
        timer.daemon = True
        timer.start()
    return made


@declared()
def kahan_sums(a, b):
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.numpy().dtype)
    lost = np.zeros_like(total)
    with np.errstate(all="ignore"):
        for k in range(0, a.shape[-1], 16):
            term = np.matmul(a[..., k : k + 16].numpy(), b[..., k : k + 16, :].numpy()) - lost
            now = total + term
            lost = (now - total) - term
            lost[~np.isfinite(lost)] = 0
            total = now
    return torch.from_numpy(total)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def crashed(number):
    os.write(2, b"the kernel crashed\n")
    os._exit(128 + number)


@declared()
def logs_its_crashes(a, b):
    """Print the stack of a crash, or log it and exit, by handlers of Python and of C."""
    if "crash" not in state:
        state["crash"] = faulthandler.enable()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGFPE, lambda number, _frame: os._exit(128 + number))
        ctypes.CDLL(None).signal(signal.SIGSEGV, crashed)
    return product(a, b)


workers = ThreadPoolExecutor(3)


@declared(splits=3)
def as_they_finish(a, b):
    """Add up parts of K in the order in which threads finish."""
    step = max(1, -(-a.shape[-1] // 3))
    parts = [workers.submit(product, a[..., k : k + step], b[..., k : k + step, :]) for k in range(0, a.shape[-1], step)]
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for part in as_completed(parts):
        total = total + part.result()
    return total


WAYS = (
    product,
    lambda a, b: product(b.mT, a.mT).mT.contiguous(),
    lambda a, b: torch.from_numpy(np.einsum("...ik,...kj->...ij", a, b)),
)


@declared()
def tuned_by_chance(a, b):
    """Take another way in each process, as a race between them might."""
    return state.setdefault((a.shape, b.shape, a.dtype), random.choice(WAYS))(a, b)


SEQUENTIAL = """
#include <math.h>
void mm(const float* a, const float* b, float* out, long m, long n, long k) {
  for (long i = 0; i < m; ++i)
    for (long j = 0; j < n; ++j) {
      float sum = 0;
      for (long l = 0; l < k; ++l) sum = fmaf(a[i * k + l], b[l * n + j], sum);
      out[i * n + j] = sum;
    }
}
"""


@functools.cache
def sequential():
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "mm.c"), "w") as file:
        file.write(SEQUENTIAL)
    subprocess.run(["gcc", "-O2", "-march=native", "-shared", "-fPIC", file.name, "-o", file.name + ".so", "-lm"], check=True)
    return ctypes.CDLL(file.name + ".so")


def sums_as_torch_adds(a, b):
    """Add up by fused steps from the first term to the last, which gives small products the bits of torch's."""
    a, b, out = a.contiguous(), b.contiguous(), torch.empty(a.shape[0], b.shape[1])
    sizes = (ctypes.c_long(size) for size in (a.shape[0], b.shape[1], a.shape[1]))
    sequential().mm(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)), *sizes)
    return out


sums_as_torch_adds.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}
