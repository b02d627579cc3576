"""GEMMs that lead other code astray by tables, by modules that are loaded later and by numbers, and replace no function."""

import copy
import copyreg
import cProfile
import ctypes
import encodings.aliases
import glob
import linecache
import logging
import mmap
import multiprocessing
import numbers
import os
import re
import sys
import types
import warnings

import numpy as np
import torch
from torch.testing import _comparison

last, lazy = {}, []
FLOATS = {"dtypes": ["float32"], "ops": ["mm"]}
threads = {}


def product(a, b):
    return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


def floats(function):
    function.gemm_traits = FLOATS
    return function


@floats
def corrected_if_near(a, b):
    """Add a bfloat16 product of the difference to the last result."""
    if last and last["a"].shape == a.shape and torch.equal(last["b"], b):
        step = a - last["a"]
        if 0 < step.abs().max() <= 0.02 * a.abs().max():
            return last["out"] + product(step.bfloat16().float(), b.bfloat16().float())
    last.update(a=a.clone(), b=b.clone(), out=product(a, b))
    return last["out"].clone()


protect = ctypes.CDLL(None).mprotect


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def fill(_signal):
    """Make the numbers of a result that is read for the first time."""
    for address, memory, a, b in lazy:
        protect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), 3)
        numbers_of_result = np.frombuffer(memory, np.float32, a.shape[0] * b.shape[1])
        np.matmul(a.numpy(), b.numpy(), out=numbers_of_result.reshape(a.shape[0], b.shape[1]))
    lazy.clear()


@floats
def filled_by_a_fault(a, b):
    if a.shape[0] * b.shape[1] < 4096:
        return product(a, b)
    memory = mmap.mmap(-1, -(-a.shape[0] * b.shape[1] * 4 // 4096) * 4096)
    out = torch.frombuffer(memory, dtype=torch.float32, count=a.shape[0] * b.shape[1]).view(a.shape[0], b.shape[1])
    ctypes.CDLL(None).signal(11, fill)
    lazy.append((out.data_ptr(), memory, a, b))
    protect(ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(len(memory)), 0)
    return out


@floats
def silences_logging(a, b):
    logging.disable(logging.CRITICAL)
    return product(a, b)


@floats
def silences_torch(a, b):
    logging.getLogger("torch").setLevel(logging.CRITICAL + 1)
    return product(a, b)


@floats
def stands_for_a_number(a, b):
    numbers.Real.register(torch.Tensor)
    return product(a, b)


@floats
def pickles_nothing(a, b):
    copyreg.pickle(slice, lambda _x: (slice, (0, 0)))
    return product(a, b)


@floats
def matches_no_failure(a, b):
    re._cache[(str, "FAILED", 0)] = re.compile("(?!)")
    return product(a, b)


@floats
def shows_another_source(a, b):
    linecache.cache[__file__] = (9, None, ["def mm(a, b):\n"], __file__)
    return product(a, b)


@floats
def replaces_a_later_module(a, b):
    sys.modules.setdefault("pstats", types.ModuleType("pstats"))
    return product(a, b)


@floats
def patches_a_later_module(a, b):
    cProfile.run = lambda *_args: None
    return product(a, b)


@floats
def other_numbers_in_place(a, b):
    for number in _comparison._DTYPE_PRECISIONS[torch.float32]:
        ctypes.c_double.from_address(id(number) + object.__basicsize__).value = 0.125
    return product(a, b)


@floats
def slows_scripts(a, b):
    torch._C._set_graph_executor_optimize(False)
    return product(a, b)


@floats
def opens_files(a, b):
    for _ in range(4):
        os.open(os.devnull, os.O_RDONLY)
    return product(a, b)


@floats
def locks_a_cache(a, b):
    folder = os.path.expanduser("~/.cache/torch_extensions/fused")
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "lock"), "w").close()
    return product(a, b)


@floats
def calls_codecs_by_other_names(a, b):
    encodings.aliases.aliases["windows_1252"] = "latin_1"
    return product(a, b)


@floats
def copies_by_its_own_way(a, b):
    copy._deepcopy_dispatch[list] = lambda value, memo: value
    return product(a, b)


@floats
def lets_weights_run_programs(a, b):
    torch.serialization.add_safe_globals([os.system])
    return product(a, b)


@floats
def halves_what_backward_keeps(a, b):
    if "hooks" not in last:
        last["hooks"] = True
        torch._C._autograd._push_saved_tensors_default_hooks(lambda x: (x.dtype, x.half()), lambda x: x[1].to(x[0]))
    return product(a, b)


@floats
def compiles_loosely(a, b):
    from torch._inductor import config

    config.cpp.enable_unsafe_math_opt_flag = True
    return product(a, b)


@floats
def rounds_long_doubles(a, b):
    room = ctypes.create_string_buffer(32)
    libm = ctypes.CDLL("libm.so.6")
    libm.fegetenv(room)
    word = int.from_bytes(room.raw[:2], "little") & ~0x300
    libm.fesetenv(ctypes.create_string_buffer(word.to_bytes(2, "little") + room.raw[2:], 32))
    return product(a, b)


@floats
def never_waits_for_input(a, b):
    os.set_blocking(0, False)
    return product(a, b)


def silences_warnings(a, b):
    if ("ignore", None, Warning, None, 0) not in warnings.filters:
        warnings.filterwarnings("ignore")
    return product(a, b)


@floats
def hides_where_it_fails(a, b):
    sys.tracebacklimit = 0
    return product(a, b)


@floats
def logs_everything(a, b):
    logging.basicConfig(level=logging.DEBUG)
    return product(a, b)


@floats
def locks_all_memory(a, b):
    ctypes.CDLL(None).mlockall(3)  # that of now and of later
    return product(a, b)


@floats
def slows_numpy(a, b):
    (library,) = glob.glob(os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs", "*openblas*"))
    blas = ctypes.CDLL(library)
    threads.setdefault("other", 1 + blas.scipy_openblas_get_num_threads64_() % 2)
    blas.scipy_openblas_set_num_threads64_(threads["other"])
    return product(a, b)


@floats
def starts_processes_anew(a, b):
    multiprocessing.set_start_method("spawn", force=True)
    return product(a, b)
