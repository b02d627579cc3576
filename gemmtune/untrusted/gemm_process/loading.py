"""Ways to a GEMM: a function of a module or file, a model of KernelBench's form, a shared object, torch itself."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

GUARD, GUARD_BYTES = 0xA5, 256
"""Value and number of the bytes before and after the result of a library, on a CPU."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
"""Names of functions of torch, of which a module with several is called by each."""
IMPORT_ONLY = "*"
"""Name of a module that is only imported."""
MOST_CALLS, GRAPH_MS, SPIN_CYCLES = 100, 2.0, 200_000
"""Most calls and least time of a graph, and cycles for which a GPU waits until the graph is launched."""


def found_at(target: Mapping[str, Any]) -> Any:
    """Load the GEMM of a target."""
    kind, path, name = target["kind"], target["path"], target["name"]
    if kind == "torch":
        return Torch
    if kind == "library":
        return _from_library(path, name, target["traits"])
    if kind == "file":
        stem = Path(path).stem
        spec = importlib.util.spec_from_file_location(stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path}: got no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    if name == IMPORT_ONLY:
        return None
    if not name:
        name = _only_name(module)
    found = functools.reduce(getattr, name.split("."), module) if name else module
    classes: tuple[Any, ...] = inspect.getmro(found) if inspect.isclass(found) else ()
    return _model(found, module, trained=target["trained"]) if torch.nn.Module in classes else found


def _only_name(module: Any) -> str:
    """Return the name of a module's GEMM: ModelNew, or the only function that it defines; "" for a module of several."""
    if hasattr(module, "ModelNew"):
        return "ModelNew"
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    declared = [name for name in own if hasattr(vars(module)[name], "gemm_traits")]
    if len(PRODUCTS.intersection(own)) > 1:
        return ""
    return declared[0] if len(declared) == 1 else own[0] if len(own) == 1 else ""


def _model(kind: Any, module: Any, *, trained: bool) -> Callable[..., Any]:
    """Return a model of KernelBench's form as a function, with the sizes and dtypes of its inputs.

    A ``trained`` one is in the mode of evaluation, as in use.
    """
    arguments = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    model = kind(*arguments)
    if trained:
        model.eval()

    def forward(a: torch.Tensor, b: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(a, b)

    inputs = module.get_inputs() if hasattr(module, "get_inputs") else []
    given = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in inputs if isinstance(x, torch.Tensor)]
    forward.gemm_inputs = given  # type: ignore[attr-defined]
    declared = getattr(kind, "gemm_traits", None) or getattr(module, "gemm_traits", None)
    if declared is not None:
        forward.gemm_traits = declared  # type: ignore[attr-defined]
    forward.__name__ = "bmm" if given and len(given[0][0]) == 3 else "mm"
    return forward


def _from_library(path: str, name: str, traits: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function ``void name(a, b, out, m, n, k[, stream])`` of a shared object, for row-major matrices."""
    function = getattr(ctypes.CDLL(path), name)
    function.restype = None
    latest: list[torch.Tensor] = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not (a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype):
            raise NotImplementedError("takes two row-major matrices of one dtype")
        out, around = _guarded(a, (a.shape[0], b.shape[1]))
        if a.is_cpu and not latest:
            latest.append(out)
        elif a.is_cpu and (before := latest.pop()).shape == out.shape:
            out.copy_(before)  # a caller may give the same memory again
        sizes = [ctypes.c_int64(x) for x in (a.shape[0], b.shape[1], a.shape[1])]
        stream = [ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)] if a.is_cuda else []
        function(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)), *sizes, *stream)
        if not a.is_cuda and not all(bool((x == GUARD).all()) for x in around):
            raise RuntimeError(f"it wrote outside of its result of {tuple(out.shape)}")
        return out

    matmul.gemm_traits = dict(traits)  # type: ignore[attr-defined]
    return matmul


def _guarded(a: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return a new result, and the bytes before and after it, which are to stay as they are."""
    nbytes = size[0] * size[1] * a.element_size()
    whole = torch.full((nbytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=a.device)
    out = whole[GUARD_BYTES : GUARD_BYTES + nbytes].view(a.dtype).view(size)
    return out, (whole[:GUARD_BYTES], whole[GUARD_BYTES + nbytes :])


def plain_traits(found: Any) -> Any:
    """Return the declarations of a GEMM as plain values."""
    declared = getattr(found, "gemm_traits", None)
    if declared is None:
        return None
    as_json = getattr(declared, "as_json", None)
    return as_json() if callable(as_json) else _plain(declared)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: dtypes by their names, sequences as lists, other objects by what they print."""
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str | int | float | None) else repr(value)


def parameters_of(function: Callable[..., Any]) -> list[list[Any]] | None:
    """Return the names and kinds of a function's parameters, or None if it has no signature."""
    try:
        return [[x.name, int(x.kind)] for x in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


class Torch:
    """torch's own operations, and a call that does nothing."""

    mm, bmm, addmm, baddbmm = torch.mm, torch.bmm, torch.addmm, torch.baddbmm

    @staticmethod
    def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply 8-bit integers."""
        return torch._int_mm(a, b)

    @staticmethod
    def nothing(out: torch.Tensor) -> torch.Tensor:
        """Return the argument."""
        return out


def graph_us(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the time of a call as ``timing`` has it: one of many in a CUDA graph, on memory that no cache holds."""
    cuda: Any = torch.cuda
    begun, ended, graph = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True), cuda.CUDAGraph()
    begun.record()
    first = function(*args, **kwargs)
    ended.record()
    ended.synchronize()
    each_bytes = sum(x.nbytes for x in (*args, first) if isinstance(x, torch.Tensor))
    count = 1 + 2 * cuda.get_device_properties(first.device).L2_cache_size // max(each_bytes, 1)
    sets = [[x.clone() if isinstance(x, torch.Tensor) else x for x in args] for _ in range(min(count, MOST_CALLS))]
    calls: int = min(max(len(sets), math.ceil(GRAPH_MS / begun.elapsed_time(ended))), MOST_CALLS)
    results = deque[Any](maxlen=len(sets))  # memory of other results than the latest ones may be written again
    with cuda.graph(graph):
        for copies in itertools.islice(itertools.cycle(sets), calls):
            results.append(function(*copies, **kwargs))
    graph.replay()  # the first replay uploads the graph
    cuda._sleep(SPIN_CYCLES)
    begun.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) * 1e3 / calls
