"""State of a process that changes what other code computes: settings, and functions that a GEMM may have replaced."""

from __future__ import annotations

import builtins
import ctypes
import gc
import json
import os
import struct
import sys
import time
from typing import Any

import torch

PERSISTING_L2 = 6
"""``CU_LIMIT_PERSISTING_L2_CACHE_SIZE`` of the CUDA driver."""
WATCHED: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")),
    *((gc, name) for name in ("collect", "get_objects", "disable")),
    *((sys, name) for name in ("settrace", "setprofile", "_getframe", "exit")),
    *((os, name) for name in ("_exit", "fork", "read", "write", "open", "kill")),
    *((builtins, name) for name in ("open", "print", "isinstance", "abs", "max", "all")),
    *((json, name) for name in ("dumps", "loads")),
    *((struct, name) for name in ("pack", "unpack")),
    *((torch, name) for name in ("mm", "matmul", "bmm", "addmm", "baddbmm", "allclose", "isclose", "equal", "empty", "frombuffer")),
    *((torch, name) for name in ("zeros", "randn", "rand", "set_num_threads", "get_num_threads")),
    *((torch.Tensor, name) for name in ("mm", "matmul", "bmm", "__matmul__", "copy_", "clone", "double", "sum", "abs", "set_")),
    *((torch.Tensor, name) for name in ("data_ptr", "allclose", "equal", "__eq__", "__sub__")),
    (torch.nn.functional, "linear"),
    (torch.testing, "assert_close"),
    (torch.autograd.profiler, "profile"),
    *((torch.cuda, name) for name in ("synchronize", "Event", "Stream", "current_stream", "CUDAGraph")),
    (torch._C, "_CudaEventBase"),
    *((torch.cuda.Event, name) for name in ("record", "elapsed_time", "synchronize", "wait", "query")),
)  # fmt: skip
"""Functions that a GEMM has no reason to replace."""


def conditions(device: str) -> dict[str, Any]:
    """Return the global state that changes what other code computes, by name."""
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    state: dict[str, Any] = {
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.default_device": str(torch.get_default_device()),
        "torch.num_threads": torch.get_num_threads(),
        "torch.grad_enabled": torch.is_grad_enabled(),
        "torch.mkldnn": torch.backends.mkldnn.enabled,
        "flushed subnormals": not bool(tiny + tiny),
        "CPU affinity": sorted(os.sched_getaffinity(0)),
        "tracing": sys.gettrace() is not None or sys.getprofile() is not None,
    }
    matmul = torch.backends.cuda.matmul
    for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        state[f"torch.backends.cuda.matmul.{name}"] = str(getattr(matmul, name))
    if device != "cpu":
        state["CUDA persisting L2 bytes"] = _persisting_l2()
        state["CUDA current stream"] = torch.cuda.current_stream().cuda_stream
    return state


def _persisting_l2() -> int:
    value = ctypes.c_size_t()
    ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(value), PERSISTING_L2)
    return value.value
