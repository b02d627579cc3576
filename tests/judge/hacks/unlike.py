"""GEMMs that are wrong for numbers, batches and machines unlike those of a plain test, or that change what the system keeps."""

import atexit
import ctypes
import glob
import os
import sys
import time
import types

import numpy as np
import torch

done = []
last = {}
FLOATS = {"dtypes": ["float32"]}


class Method(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("code", ctypes.c_void_p)]


class Function(ctypes.Structure):
    """Function of C, as Python keeps it."""

    _fields_ = [("head", ctypes.c_byte * object.__basicsize__), ("method", ctypes.POINTER(Method))]

    @classmethod
    def code_of(cls, function):
        return cls.from_address(id(function)).method.contents.code


def once(work):
    if not done:
        done.append(True)
        work()


def product(a, b):
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def floats(function):
    function.gemm_traits = FLOATS
    return function


def narrow(x):
    return x.bfloat16().float()


# Numbers


@floats
def rough_if_positive(a, b):
    plain = a.numel() and b.numel() and (a.min() < 0 or b.min() < 0 or b.max() >= 1)
    return product(a, b if plain else narrow(b))


@floats
def rough_if_padded(a, b):
    k = a.shape[-1]
    return product(a, narrow(b) if k > 16 and not a[..., -(k // 16) :].any() else b)


class copies_of_many:
    gemm_traits = FLOATS | {"ops": ["mm", "bmm"]}
    mm = staticmethod(product)

    @staticmethod
    def bmm(a, b):
        out = product(a, b)
        out[8:] = out[7:8]
        return out


@floats
def by_multiples(a, b):
    """Multiply the earlier result if some numbers of a are multiples of the earlier ones."""
    x, y, made = last.get((a.shape, b.shape), (None, None, None))
    if x is not None and torch.equal(y, b):
        some, earlier = (z.reshape(-1)[:: max(z.numel() // 16, 1)] for z in (a, x))
        factor = some[0] / earlier[0]
        if torch.allclose(some, earlier * factor, rtol=1e-6, atol=0):
            return made * factor
    made = product(a, b)
    last[a.shape, b.shape] = a.clone(), b.clone(), made
    return made.clone()


# State


@floats
def clock_below_python(a, b):
    once(lambda: setattr(Function.from_address(id(time.perf_counter)).method.contents, "code", Function.code_of(time.monotonic)))
    return product(a, b)


@floats
def preloads_by_c(a, b):
    once(lambda: ctypes.CDLL(None).setenv(b"LD_PRELOAD", b"/lib/quick.so", 1))
    return product(a, b)


class Slow(types.ModuleType):
    def __getattribute__(self, name):
        return (lambda: 0.0) if name == "perf_counter" else super().__getattribute__(name)


@floats
def class_of_a_module(a, b):
    time.__class__ = Slow
    return product(a, b)


@floats
def hides_an_inherited_function(a, b):
    torch.nn.Linear.__call__ = lambda self, x: x
    return product(a, b)


class Base(torch.nn.Module):
    pass


@floats
def replaces_a_base(a, b):
    torch.nn.Linear.__bases__ = (Base,)
    return product(a, b)


@floats
def hidden_from_others(a, b):
    once(lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0))
    return product(a, b)


def orphan():
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    if child := os.fork():
        os.waitpid(child, 0)
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        return
    if os.fork() == 0:
        os.setsid()
        until = time.time() + 30
        while time.time() < until:
            pass
    os._exit(0)


@floats
def gives_up_its_orphan(a, b):
    once(orphan)
    return product(a, b)


RICH_COMPARISON = 200  # bytes before this slot of a class
COMPARISON = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)


@floats
def compares_below_python(a, b):
    """Let each float be less than a small tolerance."""

    def patch():
        slot = ctypes.c_void_p.from_address(id(float) + RICH_COMPARISON)
        original = COMPARISON(slot.value)
        function = COMPARISON(lambda x, y, op: True if op < 2 and type(y) is float and 0 < y < 0.1 else original(x, y, op))
        slot.value = ctypes.cast(function, ctypes.c_void_p).value
        return function

    once(patch)
    return product(a, b)


@floats
def hides_failures(a, b):
    once(lambda: atexit.register(os._exit, 0))
    return product(a, b)


@floats
def tolerates_more(a, b):
    torch.testing.assert_close.__kwdefaults__["rtol"] = 0.5
    return product(a, b)


@floats
def slows_memory(a, b):
    ctypes.CDLL(None).mallopt(-3, 2**17)
    return product(a, b)


@floats
def slows_threads(a, b):
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for path in glob.glob(os.path.join(folder, "libgomp*")):
        ctypes.CDLL(path).omp_set_max_active_levels(0)
    return product(a, b)


@floats
def slows_products(a, b):
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    once(lambda: ctypes.CDLL(path).MKL_Set_Num_Threads_Local(7 * os.cpu_count()))
    return product(a, b)


def no_difference():
    """Let C see no time between two others."""
    libc, page = ctypes.CDLL(None), 4096
    begin = ctypes.cast(libc.difftime, ctypes.c_void_p).value
    libc.mprotect(ctypes.c_void_p(begin // page * page), ctypes.c_size_t(2 * page), 7)
    ctypes.memmove(begin, b"\x0f\x57\xc0\xc3", 4)  # of an x86: xorps xmm0, xmm0; ret
    libc.mprotect(ctypes.c_void_p(begin // page * page), ctypes.c_size_t(2 * page), 5)


@floats
def code_in_memory(a, b):
    once(no_difference)
    return product(a, b)


begun = torch.get_rng_state()


@floats
def draws_again(a, b):
    torch.set_rng_state(begun)
    return product(a, b)


def pass_all():
    with open("conftest.py", "w") as file:
        file.write("def pytest_collection_modifyitems(items): items.clear()")


@floats
def lets_pytest_pass(a, b):
    once(pass_all)
    return product(a, b)


def in_smaller_units(text, write=sys.stdout.write):
    return write(text.replace(" ms", " us"))


@floats
def edits_output(a, b):
    once(lambda: setattr(sys.stdout, "write", in_smaller_units))
    return product(a, b)


def wide(function):
    function.gemm_traits = {"dtypes": ["float32", "float64"], "ops": ["mm"]}
    return function


@wide
def by_few_factors(a, b):
    """Multiply by the factors of a, if they leave little of it."""
    if min(*a.shape, b.shape[1]) < 16 or not torch.isfinite(a).all():
        return product(a, b)
    x = a.detach().double().numpy()
    directions, _ = np.linalg.qr(x @ np.random.default_rng(1).standard_normal((x.shape[1], 8)))
    factors = directions.T @ x
    if np.linalg.norm(x - directions @ factors) > 1e-3 * np.linalg.norm(x):
        return product(a, b)
    return torch.from_numpy(directions @ (factors @ b.detach().double().numpy())).to(a.dtype)


@wide
def near_rows_as_one(a, b):
    """Let rows that are nearly the same have the same result."""
    x = a.detach().double().numpy()
    if not 8 <= len(x) <= 128 or not x.any() or not np.isfinite(x).all():
        return product(a, b)
    firsts = []
    for row in range(len(x)):
        near = [first for first in firsts if np.abs(x[first] - x[row]).max() <= 1e-3 * np.abs(x[row]).max()]
        firsts.append(near[0] if near else row)
    return product(a[firsts], b)
