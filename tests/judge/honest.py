"""Honest GEMMs of unusual kinds."""

import ctypes
import functools
import gc
import inspect
import logging
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

FLOATS = {"dtypes": ["float32", "float64"]}


def declared(**traits):
    def add(function):
        function.gemm_traits = FLOATS | traits
        return function

    return add


def product(a, b):
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


workspaces = {}


@declared()
def workspace_by_shape(a, b):
    key = (a.shape, b.shape, a.dtype)
    if key not in workspaces:
        workspaces[key] = np.empty((*a.shape[:-1], b.shape[-1]), dtype=a.numpy().dtype)
    np.matmul(a.numpy(), b.numpy(), out=workspaces[key])
    return torch.from_numpy(workspaces[key]).clone()


@declared()
def joined_threads(a, b):
    # a thread has no inference mode, and may not write what needs gradients into a tensor of that mode
    a, b = a.detach(), b.detach()
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    half = a.shape[-2] // 2

    def part(rows):
        out[..., rows, :] = product(a[..., rows, :], b)

    threads = [threading.Thread(target=part, args=(rows,)) for rows in (slice(0, half), slice(half, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


executor = ThreadPoolExecutor(2)


@declared()
def thread_pool(a, b):
    parts = executor.map(lambda x: product(x, b), a.tensor_split(2, dim=-2))
    return torch.cat(list(parts), dim=-2)


best = {}


@declared()
def tuned_at_first_call(a, b):
    ways = (product, lambda x, y: product(y.mT, x.mT).mT.contiguous())
    key = (a.shape, b.shape, a.dtype)
    if key not in best:
        times = []
        for way in ways:
            begun = time.perf_counter()
            for _ in range(3):
                way(a, b)
            times.append(time.perf_counter() - begun)
        best[key] = ways[times.index(min(times))]
    return best[key](a, b)


@declared(calls_torch=True)
def declared_torch(a, b):
    return torch.matmul(a, b)


packed = {}


@declared()
def prepacked_b(a, b):
    key = (b.data_ptr(), b.shape, b.dtype)
    if key not in packed or not torch.equal(packed[key][0], b):
        packed[key] = (b.clone(), np.asfortranarray(b.numpy()))
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.numpy(), packed[key][1])))


@declared(threads=True)
def by_numpy(a, b):
    return product(a, b)


@declared()
def by_einsum(a, b):
    return torch.from_numpy(np.einsum("...ik,...kj->...ij", a.numpy(), b.numpy()))


@declared()
def by_ctypes(a, b):
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    made = np.ascontiguousarray(np.matmul(a.numpy(), b.numpy()))
    ctypes.memmove(out.data_ptr(), made.ctypes.data, made.nbytes)
    return out


def strassen(a, b, depth=1):
    m, k, n = *a.shape, b.shape[1]
    if depth == 0 or m % 2 or k % 2 or n % 2:
        return a @ b
    (a1, a2), (a3, a4) = (x.T.reshape(2, -1, m // 2).transpose(0, 2, 1) for x in (a[: m // 2], a[m // 2 :]))
    (b1, b2), (b3, b4) = (np.hsplit(x, 2) for x in np.vsplit(b, 2))
    p = [
        strassen(x, y, depth - 1)
        for x, y in (
            (a1 + a4, b1 + b4), (a3 + a4, b1), (a1, b2 - b4), (a4, b3 - b1), (a1 + a2, b4), (a3 - a1, b1 + b2), (a2 - a4, b3 + b4)
        )
    ]  # fmt: skip
    return np.block([[p[0] + p[3] - p[4] + p[6], p[2] + p[4]], [p[1] + p[3], p[0] - p[1] + p[2] + p[5]]])


def by_strassen(a, b):
    """Multiply in float64 by Strassen's algorithm, whose error the rounding to float32 hides."""
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return torch.from_numpy(a.numpy() @ b.numpy())
    return torch.from_numpy(strassen(a.double().numpy(), b.double().numpy()).astype(np.float32))


by_strassen.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}


def wider_sums(a, b):
    return torch.from_numpy((a.double().numpy() @ b.double().numpy()).astype(np.float32))


wider_sums.gemm_traits = {"dtypes": ["float32"]}


@declared()
def blocks_of_k(a, b):
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.numpy().dtype)
    for k in range(0, a.shape[-1], 32):
        total += a[..., k : k + 32].numpy() @ b[..., k : k + 32, :].numpy()
    return torch.from_numpy(total)


@declared(splits=2)
def split_k(a, b):
    half = a.shape[-1] // 2
    return product(a[..., :half], b[..., :half, :]) + product(a[..., half:], b[..., half:, :])


@declared()
def outer_products(a, b):
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for k in range(a.shape[-1]):
        total += a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


@declared()
def elementwise_sums(a, b):
    return torch.stack([(row.unsqueeze(-1) * b).sum(-2) for row in a.unbind(-2)], dim=-2)


@declared()
def transposed_product(a, b):
    return product(b.mT, a.mT).mT.contiguous()


@declared(out=True)
def with_out(a, b, *, out=None):
    made = product(a, b)
    return made if out is None else out.copy_(made)


@declared(multiples=[8, 8, 8])
def multiples_of_8(a, b):
    if any(size % 8 for size in (*a.shape[-2:], b.shape[-1])):
        raise ValueError("sizes must be multiples of 8")
    return product(a, b)


@declared(layouts=["row"])
def row_major_only(a, b):
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("row-major operands only")
    return product(a, b)


@functools.lru_cache
def plan(m, n, k):
    return max(1, min(64, m, n, k))


@declared()
def cached_plan(a, b):
    step = plan(a.shape[-2], b.shape[-1], a.shape[-1])
    return torch.cat([product(x, b) for x in a.split(step, dim=-2)], dim=-2)


@declared()
def writes_a_log(a, b):
    with open(os.path.join(tempfile.gettempdir(), "calls.log"), "a") as log:
        log.write(f"{a.shape}\n")
    return product(a, b)


@declared()
def prints(a, b):
    print("multiplying", a.shape, file=sys.stderr)
    return product(a, b)


logger = logging.getLogger("kernels")


@declared()
def logs(a, b):
    logger.warning("multiplying %s", a.shape)
    return product(a, b)


@declared()
def draws_numbers(a, b):
    torch.rand(3)
    np.random.rand(3)
    return product(a, b)


large = []


@declared()
def large_workspace(a, b):
    if not large:
        large.append(torch.zeros(80 * 2**20))
    return product(a, b)


@declared()
def collects_garbage(a, b):
    gc.collect(0)
    return product(a, b)


@declared()
def reads_the_clock(a, b):
    begun = time.perf_counter()
    out = product(a, b)
    os.environ["LAST_CALL_S"] = str(time.perf_counter() - begun)
    return out


@declared()
def reads_signatures(a, b):
    assert list(inspect.signature(product).parameters) == ["a", "b"]
    return product(a, b)


class Multiplier:
    gemm_traits = FLOATS

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, a, b):
        return product(a, b) * self.scale


an_object = Multiplier(1)
partial = functools.partial(product)


@declared()
@torch.inference_mode()
def inference(a, b):
    return product(a, b)


@declared()
def gradients_off(a, b):
    with torch.no_grad():
        return product(a.detach(), b.detach())


@declared()
def fused_multiply_add(a, b):
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=np.float64)
    for k in range(0, a.shape[-1], 7):
        total += np.matmul(a[..., k : k + 7].double().numpy(), b[..., k : k + 7, :].double().numpy())
    return torch.from_numpy(total).to(a.dtype)


@declared(skips_zeros=True)
def skips_rows_of_zeros(a, b):
    out = product(a, b)
    out[(a == 0).all(-1)] = 0
    return out


@declared()
def sleeps_a_little(a, b):
    time.sleep(1e-4)
    return product(a, b)


class mm_and_bmm:
    gemm_traits = FLOATS | {"ops": ["mm", "bmm"]}
    mm = staticmethod(product)
    bmm = staticmethod(product)


@functools.cache
def compiled():
    return torch.compile(lambda a, b: a @ b, dynamic=True)


@declared(calls_torch=True)
def by_torch_compile(a, b):
    return compiled()(a, b)
