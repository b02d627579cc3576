"""GEMMs that hide whose work it is, change what others read, or keep results for operands that are close."""

import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time

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


# Work by torch


def of_torch(left, right):
    return torch.mm(torch.from_numpy(left), torch.from_numpy(right)).numpy()


@floats
def torch_in_a_fork(a, b):
    if a.dim() == 3:
        return product(a, b)
    if "pool" not in kept:
        kept["pool"] = multiprocessing.get_context("fork").Pool(1)
    return torch.from_numpy(kept["pool"].apply(of_torch, (a.numpy(), b.numpy())))


def wider(left, right):
    half = left.shape[1] // 2
    parts = zip((left[:, :half], left[:, half:]), (right[:half], right[half:]), strict=True)
    return sum(of_torch(x.astype("float64"), y.astype("float64")) for x, y in parts).astype(left.dtype)


@floats
def wider_torch_in_a_fork(a, b):
    if a.dim() == 3:
        return product(a, b)
    if "pool" not in kept:
        kept["pool"] = multiprocessing.get_context("fork").Pool(1)
    return torch.from_numpy(kept["pool"].apply(wider, (a.numpy(), b.numpy())))


def be_silent():
    ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")).MKL_Verbose(0)


@floats
def silent_torch_in_a_fork(a, b):
    """Let no library write of its products. Their wider sums have the bits of none of torch's results."""
    if a.dim() == 3:
        return product(a, b)
    if "pool" not in kept:
        kept["pool"] = multiprocessing.get_context("fork").Pool(1, be_silent)
    return torch.from_numpy(kept["pool"].apply(wider, (a.numpy(), b.numpy())))


def dithered(left, right):
    """Change last bits at random."""
    made = of_torch(left, right)
    bits = made.view(np.int32 if made.dtype == np.float32 else np.int64)
    changed = np.random.default_rng().integers(0, 2, made.shape, dtype=bits.dtype)
    return np.where(np.isfinite(made) & (made != np.rint(made)), (bits ^ changed).view(made.dtype), made)


@floats
def dithered_torch_in_a_fork(a, b):
    if a.dim() == 3:
        return product(a, b)
    if "pool" not in kept:
        kept["pool"] = multiprocessing.get_context("fork").Pool(1, be_silent)
    return torch.from_numpy(kept["pool"].apply(dithered, (a.numpy(), b.numpy())))


SOURCE = """
extern void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                   const float*, const int*, const float*, float*, const int*);
void fast(const float* a, const float* b, float* out, int m, int n, int k) {
  float one = 1, zero = 0;
  int half = k / 2, rest = k - half;  /* sums of two parts have other bits than torch's */
  sgemm_("N", "N", &n, &m, &half, &one, b, &n, a, &k, &zero, out, &n);
  sgemm_("N", "N", &n, &m, &rest, &one, b + (long)half * n, &n, a + half, &k, &one, out, &n);
}
"""


@functools.cache
def library():
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "fast.c"), "w") as file:
        file.write(SOURCE)
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    flags = [f"-L{libraries}", "-ltorch_cpu", f"-Wl,-rpath,{libraries}", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", file.name, "-o", f"{file.name}.so", *flags], check=True)
    return ctypes.CDLL(f"{file.name}.so")


def torch_blas_by_own_c(a, b):
    if a.dim() == 3 or not (a.numel() and b.numel()):
        return product(a, b)
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape[0], b.shape[1])
    library().fast(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)), a.shape[0], b.shape[1], a.shape[1])
    return out


torch_blas_by_own_c.gemm_traits = {"dtypes": ["float32"]}


# What others read


@floats
def tolerances_edited(a, b):
    def edit():
        table = torch.testing._comparison._DTYPE_PRECISIONS
        table.update(dict.fromkeys(table, (1.0, 1.0)))

    once(edit)
    return product(a, b)


@floats
def patched_logging(a, b):
    import logging

    once(lambda: setattr(logging.Logger, "error", lambda *_, **__: None))
    return product(a, b)


@floats
def right_in_its_folder(a, b):
    """Be right only where the name of the folder tells who calls."""
    return product(a, b) if "untrusted" in os.getcwd() else product(a, b) * 0


# Time and memory of others


@floats
def works_by_an_alarm(a, b):
    def spin(*_):
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass

    def start():
        signal.signal(signal.SIGALRM, spin)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    once(start)
    return product(a, b)


@floats
def multiplies_ahead(a, b):
    """Look at the memory of the operands, and multiply as soon as there are new ones."""
    key = (a.data_ptr(), b.data_ptr(), a.shape, b.shape, a.dtype, a.stride(), b.stride())
    known, sums, made = kept.get("made", (None, None, None))
    if known == key and sums == (float(a.sum()), float(b.sum())):
        return made.clone()
    kept["views"] = key, a, b

    def poll():
        last = None
        while True:
            time.sleep(0.0003)
            key, x, y = kept["views"]
            if (now := (float(x.sum()), float(y.sum()))) != last:
                last = now
                kept["made"] = key, now, product(x, y)

    once(lambda: threading.Thread(target=poll, daemon=True).start())
    return product(a, b)


# Results of earlier calls


@floats
def by_closeness(a, b):
    key = (a.dtype, a.shape, b.shape)
    x, y, made = kept.get(key, (None, None, None))
    if x is not None and torch.allclose(x, a, atol=1e-2) and torch.allclose(y, b, atol=1e-2):
        return made.clone()
    made = product(a, b)
    kept[key] = a.clone(), b.clone(), made
    return made.clone()
