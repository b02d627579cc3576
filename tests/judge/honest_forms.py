"""Honest GEMMs of unusual form."""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import enum
import functools
import logging
import multiprocessing
import os
import platform
import queue
import subprocess
import tempfile
import threading
import traceback
import warnings
import weakref

import numpy as np
import torch
from honest import FLOATS, declared, product


@declared()
def a_generator(a, b):
    def tiles():
        for m in range(0, a.shape[-2], 48):
            yield product(a[..., m : m + 48, :], b)

    return torch.cat([*tiles(), product(a[..., :0, :], b)], dim=-2)


class Slotted:
    __slots__ = ("gemm_traits", "lock")

    def __init__(self):
        self.lock, self.gemm_traits = threading.RLock(), FLOATS

    def __call__(self, a, b):
        with self.lock:
            return product(a, b)


slotted = Slotted()


@torch.library.custom_op("judged::mm", mutates_args=())
def custom_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.detach().numpy(), b.detach().numpy())))


@custom_mm.register_fake
def _(a, b):
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@declared()
def an_operator(a, b):
    return torch.ops.judged.mm(a, b)


class Wrapped:
    def __init__(self, tensor):
        self.tensor = tensor

    def __array__(self, dtype=None, copy=None):
        return self.tensor.numpy()


@declared()
def by_array_protocol(a, b):
    return torch.from_numpy(np.matmul(np.asarray(Wrapped(a)), np.asarray(Wrapped(b))))


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@declared()
def in_contexts(a, b):
    with threads(2), warnings.catch_warnings(), torch.no_grad(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return product(a, b)


@dataclasses.dataclass(frozen=True)
class Plan:
    step: int


plans = {}


@declared()
def planned_by_shape(a, b):
    step = plans.setdefault((a.shape, b.shape, a.stride()), Plan(max(1, min(96, a.shape[-1])))).step
    parts = [product(a[..., k : k + step], b[..., k : k + step, :]) for k in range(0, a.shape[-1], step)]
    return functools.reduce(torch.add, parts) if parts else product(a, b)


packed = {}


@declared()
def packed_by_id(a, b):
    """Keep a packed b for as long as b lives and its numbers stay."""
    known = packed.get(id(b))
    if known is None or known[0]() is not b or not torch.equal(known[1], b):
        packed.clear()
        known = packed[id(b)] = (weakref.ref(b), b.clone(), np.asfortranarray(b.numpy()))
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.numpy(), known[2])))


@declared()
def by_asyncio(a, b):
    async def halves():
        return await asyncio.gather(*(asyncio.to_thread(product, x, b) for x in a.tensor_split(2, dim=-2)))

    return torch.cat(asyncio.run(halves()), dim=-2)


@functools.cache
def generated(step):
    space = {}
    source = f"def body(a, b, f, cat):\n    return cat([f(x, b) for x in a.split({step}, dim=-2)], dim=-2)\n"
    exec(compile(source, f"<generated {step}>", "exec"), space)
    return space["body"]


@declared()
def of_generated_code(a, b):
    return generated(64)(a, b, product, torch.cat)


logger = logging.getLogger("fallback")


@declared()
def logs_an_error(a, b):
    try:
        raise np.linalg.LinAlgError("no tile for this shape")
    except np.linalg.LinAlgError:
        logger.exception("another way")
        traceback.format_exc()
        return product(a, b)


@torch.jit.script
def by_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.size(0), b.size(1), dtype=a.dtype)
    for k in range(a.size(1)):
        total = total + a[:, k : k + 1] * b[k : k + 1, :]
    return total


@declared(ops=["mm"])
def scripted(a, b):
    return by_columns(a, b)


workers = {}


def part(a, b):
    return np.matmul(a, b)


@declared()
def in_a_process(a, b):
    if "pool" not in workers:
        workers["pool"] = multiprocessing.get_context("fork").Pool(1)
    return torch.from_numpy(workers["pool"].apply(part, (a.numpy(), b.numpy())))


@declared()
def in_a_process_of_torch(a, b):
    """Give tensors to a process and take them from it, by torch's way over sockets."""
    if "torch" not in workers:
        workers["torch"] = torch.multiprocessing.get_context("fork").Pool(1)
    return workers["torch"].apply(product, (a.clone(), b.clone())).clone()


def serve(questions, answers):
    while True:
        answers.put(product(*questions.get()))


@declared()
def by_a_daemon(a, b):
    if "daemon" not in workers:
        workers["daemon"] = queue.Queue(), queue.Queue()
        threading.Thread(target=serve, args=workers["daemon"], daemon=True).start()
    questions, answers = workers["daemon"]
    questions.put((a, b))
    return answers.get(timeout=20)


SOURCE = """
void mm(const double* a, const double* b, double* out, long m, long n, long k) {
  for (long i = 0; i < m; ++i)
    for (long j = 0; j < n; ++j) {
      double sum = 0;
      for (long l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      out[i * n + j] = sum;
    }
}
"""


@functools.cache
def library():
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "mm.c"), "w") as file:
        file.write(SOURCE)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", file.name, "-o", file.name + ".so"], check=True)
    return ctypes.CDLL(file.name + ".so")


@declared(ops=["mm"])
def compiled_by_gcc(a, b):
    left, right, out = (x.double().contiguous() for x in (a, b, torch.empty(a.shape[0], b.shape[1])))
    sizes = (ctypes.c_long(size) for size in (a.shape[0], b.shape[1], a.shape[1]))
    library().mm(*(ctypes.c_void_p(x.data_ptr()) for x in (left, right, out)), *sizes)
    return out.to(a.dtype)


@declared()
def reads_the_machine(a, b):
    for path in ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/status"):
        with open(path) as file:
            file.read()
    platform.processor(), os.cpu_count(), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    return product(a, b)


@declared()
def makes_types(a, b):
    sizes = collections.namedtuple("Sizes", "m n")(a.shape[-2], b.shape[-1])
    order = enum.Enum("Order", "ROW COLUMN")
    warnings.warn(f"a slow way for {sizes} in {order.ROW}", stacklevel=2)
    return product(a, b)


def of_slices(a, b):
    """Multiply an upper and a lower part of a, exactly as far as float64 goes."""
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return product(a.float(), b.float()).to(a.dtype)
    upper = a.bfloat16().double()
    return (product(upper, b.double()) + product(a.double() - upper, b.double())).to(a.dtype)


of_slices.gemm_traits = {"dtypes": ["bfloat16", "float16"]}


@declared()
def returns_a_parameter(a, b):
    return torch.nn.Parameter(product(a, b))


@declared()
def in_a_mapped_file(a, b):
    made = product(a, b).numpy()
    if not made.size:
        return torch.from_numpy(made)
    with tempfile.NamedTemporaryFile() as file:
        mapped = np.memmap(file, dtype=made.dtype, mode="w+", shape=made.shape)
        mapped[:] = made
        return torch.from_numpy(np.array(mapped))


@declared()
def pins_its_threads(a, b):
    """Let a thread of its own have one core, for as long as it lives."""
    found = []

    def work():
        os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
        found.append(product(a, b))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@declared()
def asks_its_thread_often(a, b):
    """Wait for a thread in short steps, until it has ended."""
    found = []
    thread = threading.Thread(target=lambda: found.append(product(a, b)))
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.01)
    return found[0]
