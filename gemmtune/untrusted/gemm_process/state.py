"""State of a process that changes what other code computes: settings, and functions that a GEMM may have replaced."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import decimal
import functools
import gc
import inspect
import multiprocessing
import os
import re
import signal
import statistics  # noqa: F401 - watched, with timeit
import sys
import threading
import timeit  # noqa: F401
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from . import system, tables
from .parts import parts_of
from .wires import NOTING

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

OF_THREADS = 2**17
"""Numbers that torch adds in several threads."""
LIMITS = {"persisting L2 bytes": 6, "L2 fetch granularity": 5}
"""Limits of a CUDA context that change the speed of others, with their numbers in the driver's ``CUlimit``."""
WINDOW_ATTRIBUTE, WINDOW_BYTES, WINDOW_PLACE = 1, 64, 8
"""Number of a stream's access-policy window in ``CUstreamAttrID``, size of its value, and place of its length in it."""
KERNELS = re.compile(r"aten/[\w.]+/(Autograd)?(CPU|CUDA|Composite\w*|Undefined)?$")
"""Names of torch's operators, with the devices whose kernels ``torch.library`` has replaced."""
PLAIN = (float, complex, str, bytes, tuple, frozenset, torch.dtype)
"""Types of variables of modules, and of entries of tables, that are watched too.

Integers may be counters, and truth values say what has been loaded.
"""
RANKS = ("__array_priority__",)
"""Variables of classes by which Python and numpy pick whose operators work."""
FUNCTIONS = (FunctionType, BuiltinFunctionType)
"""Types of entries of tables that are watched too, as those by which ``copy`` copies."""
SAID = (*PLAIN, bool, int, dict, list, type(None), decimal.Context)
"""Types of settings that a function says."""
GETTER = re.compile(r"(get|is|are)(?!.*(rng|count|objects|ref|blocks|stats|load|recursion|printoptions|interned|_id$))[a-z_0-9]*$")
"""Names of functions that say a setting if they are called without an argument."""
ASKED: tuple[Any, ...] = (sys, os, gc, threading, decimal, torch, np)
"""Modules of which each such function is asked."""
BELOW = re.compile(
    r"_(jit_)?(get|is|are)_(?!.*(schemas|hooks|exception|trac|thread|upgraders|group|version|num_))\w+$"
    r"|_jit_(?!set|nvfuser)\w+_enabled$"
)
"""Names of functions of torch in C that say a setting, for which Python has no other function."""
OPERATORS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "copy_", "sum", "add.Tensor", "mul.Tensor", "_int_mm")
"""Operators of torch whose table of kernels is compared, whoever has registered them."""
LAZY_KEYS = ("Meta", "Python", "FuncTorch", "Functionalize", "SparseCsr", "Nested")
"""Begins of the keys for which torch's own modules register kernels when they are imported."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
COMPILER = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")
"""Folder of torch's compiler, which wraps functions of torch when it is first used."""
REPLACED_BY_TORCH = ("manual_seed",)
"""Functions that torch's compiler replaces when it is imported."""


class State:
    """Reader of the global state that changes what other code computes. It takes its functions before a GEMM is imported."""

    def __init__(self, device: str) -> None:
        self._parts = [*_AT_START[1], *parts_of(x for key, x in _owners().items() if key not in _AT_START[0])]
        self._modules = {name: x for name, x in [*sys.modules.items()] if "." not in name or name.startswith("torch.")}
        self._constants = _constants(_modules())
        self._rewritten = system.rewritten()
        self._readers = _readers() | (_gpu_readers() if device != "cpu" else {})
        self._matmul: Any = torch.backends.cuda.matmul
        self._before = self._read()
        self._changed: dict[str, list[str]] = {}

    def changed(self) -> dict[str, list[str]]:
        """Return what has changed since the start, by name: its value then and now. What the caller has set is left out."""
        now = self._read()
        for name, space, values in self._constants:
            others = [(key, value, space.get(key)) for key, value in values.items() if space.get(key) is not value]
            self._changed |= {f"{name}.{key}": [repr(old), repr(new)] for key, old, new in others if not _equal(old, new)}
        self._changed |= {name: [self._before[name], value] for name, value in now.items() if value != self._before[name]}
        return self._changed

    def replaced(self) -> list[str]:
        """Return the functions and modules that are others now."""
        others = [found for part in self._parts for found in part.others()]
        names = {where for where, name, value, now in others if name not in REPLACED_BY_TORCH and not _wraps(now, value)}
        names |= {f"module {name}" for name, module in self._modules.items() if sys.modules.get(name) is not module}
        return sorted(names) + _changed_numbers() + self._rewritten()

    def set_flags(self, flags: Mapping[str, Any]) -> None:
        """Set torch's precision of CUDA products, if it is not as it should be: ieee or tf32, and 16-bit partial sums or not."""
        matmul = self._matmul
        now: dict[str, Any] = {"fp32": "tf32" if matmul.fp32_precision == "tf32" else "ieee"}
        now |= {name: _first(getattr(matmul, _reduced(name))) for name in ("fp16", "bf16")}
        wrong = [name for name, value in flags.items() if now[name] != value]
        if not wrong:
            return
        self.changed()
        for name in wrong:
            if name == "fp32":
                matmul.allow_tf32 = flags[name] == "tf32"  # the newer flag would make reading this one an error
            else:
                with_split_k = getattr(matmul, f"{_reduced(name)}_split_k", None)
                setattr(matmul, _reduced(name), flags[name] if with_split_k is None else (flags[name], with_split_k))
        self._before = self._read()

    def _read(self) -> dict[str, str]:
        return {name: _value(reader) for name, reader in self._readers.items()}


def _owners() -> dict[int, Any]:
    """Return the modules and their classes."""
    owners: dict[int, Any] = {id(x): x for x in (*_modules(), torch.ops.aten)}
    return owners | {id(x): x for module in _modules() for x in vars(module).values() if issubclass(type(x), type)}


def _modules() -> list[ModuleType]:
    """Return all modules but those of this package, which are sealed."""
    own = __name__.partition(".")[0]
    return [x for name, x in [*sys.modules.items()] if isinstance(x, ModuleType) and name.partition(".")[0] != own]


def _constants(modules: Sequence[ModuleType]) -> list[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    """Return modules with their public variables, and tables, with the values that they have now.

    Tables may grow. What is in one now stays.
    """
    spaces = [(x.__name__, vars(x)) for x in modules]
    kept: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
    for owner in (x for x in _owners().values() if issubclass(type(x), type)):
        space = vars(owner)
        if values := {key: x for key in RANKS if type(x := space.get(key)) in (int, float)}:
            kept.append((owner.__qualname__, space, values))
    for name, space in spaces:
        if values := {key: x for key, x in space.items() if type(x) in PLAIN and not str(key).startswith("_")}:
            kept.append((name, space, values))
        for key, x in space.items():
            if type(x) is dict and not key.startswith("__") and name != "linecache":  # ``tables`` watches its sources
                plain = {entry: value for entry, value in x.items() if type(value) in PLAIN or type(value) in FUNCTIONS}
                kept += [(f"{name}.{key}", x, plain)] * bool(plain)
    return kept


def _getters() -> dict[str, Callable[[], object]]:
    """Return the functions that say settings: those that say the same twice."""
    found: dict[str, Callable[[], object]] = {}
    below: Any = torch._C
    for module, getter in (*((x, GETTER) for x in ASKED), (below, BELOW)):
        for name, function in vars(module).items():
            if getter.match(name) and callable(function) and not isinstance(function, type):
                with contextlib.suppress(Exception):
                    if isinstance(said := function(), SAID) and str(said) == str(function()):
                        found[f"{module.__name__}.{name}"] = function
    return found


def _equal(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # noqa: BLE001 - values without truth
        return False


def _wraps(now: Any, before: Any) -> bool:
    """Return True if torch's compiler has put a function in the place of another."""
    file = getattr(getattr(now, "__code__", None), "co_filename", "")
    by_guard = file.endswith("mutation_guard.py")
    return file.startswith(COMPILER) and (by_guard or getattr(now, "_torchdynamo_orig_callable", None) is before)


def _value(reader: Callable[[], object]) -> str:
    try:
        return str(reader())
    except RuntimeError:  # torch's older and newer flags cannot be read after one another is set
        return "unreadable"


def _first(flag: Any) -> bool:
    return bool(flag[0] if isinstance(flag, tuple) else flag)


def _reduced(name: str) -> str:
    return f"allow_{name}_reduced_precision_reduction"


def _kernels() -> set[str]:
    """Return the kernels of torch's products, as its dispatcher has them."""
    dump: Any = torch._C._dispatch_dump
    lines = [f"{name} {line}" for name in OPERATORS for line in dump(f"aten::{name}").splitlines()]
    return {line for line in lines if not line.partition(" ")[2].startswith(LAZY_KEYS)}


def _flags_of_backends() -> list[str]:
    """Return the flags of torch.backends, of which some cannot be read once others are set."""
    modules = [(name, x) for name, x in sorted(sys.modules.items()) if name.startswith("torch.backends")]
    flags = [
        (name, x, flag)
        for name, x in modules
        for flag in dir(type(x))
        if type(inspect.getattr_static(type(x), flag)).__name__ == "ContextProp"
    ]
    return [
        f"{name.removeprefix('torch.backends.')}.{flag}={_value(functools.partial(getattr, x, flag))}" for name, x, flag in flags
    ]


def _readers() -> dict[str, Callable[[], object]]:
    tiny, matmul = torch.full((OF_THREADS,), 1e-310, dtype=torch.float64), torch.backends.cuda.matmul
    first = iter((1,))  # the GEMM may still fork, for which no thread of OpenMP may run
    affinity, mask, one = os.sched_getaffinity, signal.pthread_sigmask, torch.ones(1, dtype=torch.float64)
    cut, hooked = 1e-20 * one, (vars(torch.nn.modules.module), vars(sys.modules["torch.optim.optimizer"]))
    timers = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
    implementations: set[str] = getattr(torch.library, "_impls", set())
    kept_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
    known, kernels, mha, errors = set(implementations), _kernels(), torch.backends.mha, np.geterr
    outputs, start, ways = (sys.stdout, sys.stderr), multiprocessing.get_start_method, multiprocessing.get_all_start_methods
    readers = (
        _getters()
        | system.readers()
        | tables.readers()
        | {
            "flushed subnormals": lambda: not bool(((x := tiny[: next(first, OF_THREADS)]) + x).all()),
            "rounding": lambda: [float(one + cut), float(-one - cut), float(one - cut)],
            "CPU affinity": lambda: sorted(affinity(0)),
            "priority": functools.partial(os.getpriority, os.PRIO_PROCESS, 0),
            "scheduler": functools.partial(os.sched_getscheduler, 0),
            "autocast": lambda: [torch._C.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
            "modes of torch": lambda: [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
            "kernels of torch's operators": lambda: sorted(name for name in implementations - known if KERNELS.match(name)),
            "kernels of torch's products": lambda: sorted({line.partition(": ")[0] for line in _kernels() ^ kernels}),
            "torch.backends": _flags_of_backends,
            "hooks of what backward passes keep": lambda: kept_hooks(True) is not None,
            "fast path of attention": mha.get_fastpath_enabled,
            "numpy.geterr": lambda: {name: how for name, how in errors().items() if how in ("raise", "call")},
            "seed of torch's random numbers": torch.initial_seed,
            "standard output": lambda: [x is y for x, y in zip(outputs, (sys.stdout, sys.stderr), strict=True)],
            "functions of standard output": lambda: [sorted(vars(x)) for x in outputs],
            "hooks of all modules and optimizers": lambda: {
                name: len(x) for space in hooked for name, x in space.items() if name.startswith("_global_") and x
            },
            "start of processes": lambda: start(allow_none=True) or ways()[0],
            "timers": lambda: [signal.getitimer(x)[0] > 0 for x in timers],
            "handlers of signals": lambda: [signal.getsignal(x) for x in SIGNALS],
            "blocked signals": lambda: sorted(int(x) for x in mask(signal.SIG_BLOCK, ())),
            "torch.backends.cuda.matmul.fp32_precision": lambda: str(matmul.fp32_precision).replace("none", "ieee"),
        }
    )
    for name in (_reduced("fp16"), _reduced("bf16"), "allow_fp16_accumulation"):
        if hasattr(matmul, name):
            readers[f"torch.backends.cuda.matmul.{name}"] = functools.partial(getattr, matmul, name)
    return readers


def _gpu_readers() -> dict[str, Callable[[], object]]:
    """Return readers of the CUDA driver's own state, which the driver and not Python answers."""
    stream = torch.cuda.current_stream
    current: dict[str, Callable[[], object]] = {"CUDA current stream": lambda: stream().cuda_stream}
    if torch.version.hip is not None:
        return current
    driver = ctypes.CDLL("libcuda.so.1")
    get_limit, get_attribute = driver.cuCtxGetLimit, driver.cuStreamGetAttribute

    def limit(number: int) -> object:
        value = ctypes.c_size_t()
        return value.value if get_limit(ctypes.byref(value), number) == 0 else "unreadable"

    def window() -> object:
        value = ctypes.create_string_buffer(WINDOW_BYTES)
        status = get_attribute(ctypes.c_void_p(stream().cuda_stream), WINDOW_ATTRIBUTE, value)
        return int.from_bytes(value.raw[WINDOW_PLACE : WINDOW_PLACE + 8], "little") if status == 0 else "unreadable"

    limits = {f"CUDA {name}": functools.partial(limit, number) for name, number in LIMITS.items()}
    return current | limits | {"CUDA bytes of the stream's access-policy window": window}


_wired = {id(owner) for owner, *_ in NOTING}
_AT_START = (_known := {key: x for key, x in _owners().items() if key not in _wired}), parts_of(_known.values())
"""Modules and classes that are the same in each fork of the first process, and their functions."""
_changed_numbers = tables.floats(
    ((part.name, name, function) for part in _AT_START[1] for name, function, _ in part.functions),
    [(name, values) for name, _, values in _constants(_modules())],
)
"""Function that names the numbers of these functions, of modules and of tables that are others."""
