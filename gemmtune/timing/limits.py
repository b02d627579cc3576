"""Measured limits of this machine, memory bandwidth and arithmetic rates, for comparison with results.

Names and units: ``bandwidth_gbps`` in 1e9 bytes/s; ``float32_gflops``, ``tf32_gflops``, … in 1e9 operations/s, where a
multiply-add counts as two. All are the best of several short samples: limits, not averages.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..backends.cpp.compiler import find_compiler, why_no_compiler
from ..backends.table import load
from ..device import MIB, DeviceInfo
from ..errors import GemmtuneError, UnavailableError
from ..numerics.operands import random_operands
from ..problem import Precision, Problem
from ..problem.dtypes import FLOAT8, FLOAT8_FNUZ, dtype_name, parse_dtype
from ..problem.flags import precision_scope
from ..settings import current
from ..toolchain.made_once import compile_text, made_once, opened
from ..toolchain.render import template
from .contenders import timing_event
from .rotation import cache_bytes, leaves_caches

SAMPLES_S = 0.15
"""Duration of the sampling of each limit."""
GPU_COPY_BYTES = 1024 * MIB
GPU_SIZE = {"float64": 4096, "float32": 4096}
LARGEST_GPU_SIZE = 8192
"""M = N = K of the product that measures a GPU's rate. It keeps every multiprocessor busy for several waves."""
CPU_SIZE = 1024


BANDWIDTH = "bandwidth_gbps"
SURE = 2.0
"""Ratio by which a quiet machine may exceed a limit that was measured on it.

The largest ratio in benchmarks/results is 1.03. Caches that keep a quarter of the operands, and threads that start late, add to it.
"""
BUSY = 10.0
"""Further factor for a limit that was measured on a busy machine: others may leave it a tenth of the cores, as a choice has all."""
OF_PRODUCT = 2.0
"""Further factor for a rate of torch's product: other instructions reach 2.3 times torch's rate on an H200."""
INSTRUCTIONS: Mapping[str, Mapping[str, float]] = {
    "bfloat16": {"avx512_bf16": 2.0, "amx_bf16": 16.0}, "float16": {"avx512_fp16": 2.0, "amx_fp16": 16.0},
    "int8": {"avx512_vnni": 4.0, "avx_vnni": 4.0, "amx_int8": 32.0},
}  # fmt: skip
"""Rates of a CPU's narrow numbers as multiples of float32's (Intel's Architecture Instruction Set Extensions reference)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured limits of a machine by name. ``disturbed`` are those that were measured on a busy machine."""

    values: Mapping[str, float]
    disturbed: frozenset[str] = frozenset()

    def us(self, problem: Problem, device: DeviceInfo) -> float | None:
        return limit_us(problem, self.values, device)

    def disturbed_for(self, problem: Problem) -> bool:
        """Return True if a limit of this problem was measured on a busy machine."""
        return not self.disturbed.isdisjoint(limit_names(problem.dtype_label))

    def least_us(self, problem: Problem, device: DeviceInfo) -> float | None:
        """Return the least time in µs by the limits with their uncertainties, or None if a limit is missing."""
        sure = {name: value * self._uncertainty(name, device) for name, value in self.values.items()}
        return limit_us(problem, sure, device)

    def _uncertainty(self, name: str, device: DeviceInfo) -> float:
        """Return the ratio by which the hardware may exceed a measured limit."""
        factor = SURE * (BUSY if name in self.disturbed else 1.0)
        if name == BANDWIDTH:
            return factor
        if device.type != "cpu":
            return factor * OF_PRODUCT
        rates = INSTRUCTIONS.get(name.removesuffix("_gflops"), {})
        return factor * max((rate for flag, rate in rates.items() if flag in device.isa), default=1.0)

    def raised(self, problem: Problem, device: DeviceInfo, time_us: float) -> dict[str, float]:
        """Return the limits that a correct result in this time exceeds, with the values that it shows."""
        least_bytes, flops = least_work(problem, device)
        shown = dict(zip(limit_names(problem.dtype_label), (least_bytes / time_us / 1e3, flops / time_us / 1e3), strict=True))
        return {name: value for name, value in shown.items() if value > self.values.get(name, value)}


def limit_names(dtype_label: str) -> tuple[str, str]:
    """Return the names of the limits that apply to a problem with that ``Problem.dtype_label``."""
    return (BANDWIDTH, f"{dtype_label}_gflops")


def limit_us(problem: Problem, limits: Mapping[str, float], device: DeviceInfo | None = None) -> float | None:
    """Return max(bytes / bandwidth, flops / rate) in µs, or None if one is missing. A ``device`` caches operands while timed."""
    bandwidth, rate = (limits.get(name) for name in limit_names(problem.dtype_label))
    if not bandwidth or not rate:
        return None
    least_bytes, flops = least_work(problem, device)
    return max(least_bytes / bandwidth, flops / rate) / 1e3


def least_work(problem: Problem, device: DeviceInfo | None = None) -> tuple[float, float]:
    """Return the bytes and operations that no call can avoid, none for groups without rows and products times zero."""
    least_bytes, flops = float(problem.bytes), float(problem.flops)
    if problem.groups and not problem.divides_terms:
        read = min(problem.groups, problem.m) / problem.groups
        least_bytes -= (1 - read) * problem.b.numel * problem.b.dtype.itemsize
        if problem.rows is not None:  # any rows of a, with repetitions
            least_bytes -= problem.a.numel * problem.a.dtype.itemsize
    if problem.sparsity is not None:
        missing = min(problem.density, problem.sparsity.block_k / problem.k)
        least_bytes -= missing * problem.b.numel * problem.b.dtype.itemsize
        flops *= 1 - missing / problem.density if problem.density else 0.0
    if problem.alpha == "zero":
        return 0.0, 0.0
    return (0.0 if device is not None and not leaves_caches(problem, device) else max(least_bytes, 0.0)), flops


def measure_limits(device: DeviceInfo, dtype_label: str, known: Mapping[str, float] | None = None) -> dict[str, float]:
    """Measure the limits that apply to problems with that label and are not in ``known``. Takes about a second at most.

    The bandwidth is that of reading on a CPU (all threads). On a GPU it is the better of reading and copying (bytes read and
    written). The rate on a CPU is that of bare fused multiply-adds. float16 and 8-bit floats count as float32, in which they
    have to be accumulated. The largest product that torch computes counts instead if it is faster or there is no C++
    compiler, and always on a GPU.
    """
    bandwidth, rate = limit_names(dtype_label)
    found: dict[str, float] = {}
    if bandwidth not in (known or {}):
        found[bandwidth] = _bandwidth(device)
    if rate not in (known or {}):
        # On a CPU the rate of bare fused multiply-adds, or of a product if that is higher.
        bare = fma_gflops(device, "double" if dtype_label == "float64" else "float") if device.type == "cpu" else None
        widened = device.type == "cpu" and dtype_label in ("float16", *map(dtype_name, (*FLOAT8, *FLOAT8_FNUZ)))
        found[rate] = max(bare or 0.0, _product_gflops(device, "float32" if widened else dtype_label))
    return found


def _bandwidth(device: DeviceInfo) -> float:
    if device.type == "cpu":
        numbers = torch.ones(4 * cache_bytes(device) // 4)
        return numbers.nbytes / (_best_s(numbers.amax) * 1e9)
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    size = min(GPU_COPY_BYTES, free // 8)
    source = torch.zeros(size // 4, device=device.torch_device)
    target = torch.empty_like(source)
    copy_s = _best_gpu_s(lambda: target.copy_(source))
    read_s = _best_gpu_s(source.amax)
    return max(2 * source.nbytes / copy_s, source.nbytes / read_s) / 1e9


def _product_gflops(device: DeviceInfo, dtype_label: str) -> float:
    """Return the rate of torch's operation on a square product of random operands. GPUs multiply zeros with less power."""
    problem = _square(dtype_label, "cpu" if device.type == "cpu" else "cuda")
    choice = next(c for c in load("aten").enumerate(problem, device, current()).choices if c.baseline)
    run, x = choice.build().run, random_operands(problem, device.torch_device, seed=0)
    best = _best_s if device.type == "cpu" else _best_gpu_s
    with precision_scope(problem), torch.no_grad():
        return problem.flops / (best(lambda: run(x.out, x.tensors, ())) * 1e9)


def _square(dtype_label: str, kind: str) -> Problem:
    """Return a square product of operands with that ``Problem.dtype_label``."""
    size = CPU_SIZE if kind == "cpu" else GPU_SIZE.get(dtype_label, LARGEST_GPU_SIZE)
    if dtype_label == "int8":
        return Problem.int_mm(size, size, size, device_type=kind)
    for pair in (FLOAT8, FLOAT8_FNUZ):
        for dtype in pair:
            if dtype_label == dtype_name(dtype):
                return Problem.scaled_mm(size, size, size, dtype=dtype, dtype_b=pair[0], device_type=kind)
    precision = Precision(input_mode="tf32") if dtype_label == "tf32" else Precision()
    dtype = torch.float32 if dtype_label == "tf32" else parse_dtype(dtype_label)
    return Problem.mm(size, size, size, dtype=dtype, device_type=kind, precision=precision)


def _best_s(work: Callable[[], object]) -> float:
    """Return the least time of a call. One that takes all the time, as a product of int8 may, is not repeated."""
    begun, best = time.perf_counter(), float("inf")
    end = begun + SAMPLES_S
    while begun < end:
        work()
        ended = time.perf_counter()
        best, begun = min(best, ended - begun), ended
    return best


def _best_gpu_s(work: Callable[[], object]) -> float:
    """Return the least time of a call. Ten calls are in flight at a time, so that launches do not count."""
    work()
    events = [timing_event() for _ in range(11)]
    best = float("inf")
    end = time.perf_counter() + SAMPLES_S
    while time.perf_counter() < end or best == float("inf"):
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        events[-1].synchronize()
        best = min(best, *(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)))
    return best


log = logging.getLogger("gemmtune")

VECTOR_BYTES = {"avx512": 64, "avx2": 32}
CHAINS = 12
"""Number of independent chains: 4 cycles of latency times 2 units, plus a margin, in 16 vector registers."""
SAMPLE_S = 0.004
"""Duration of one sample, short so that on a busy machine some samples have all cores."""
SAMPLES = 40
COMPILE_TIMEOUT_S = 60.0
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")


def fma_gflops(device: DeviceInfo, kind: Literal["float", "double"]) -> float | None:
    """Return all threads' rate in 1e9 operations/s, two per fused multiply-add, or None if the loop cannot be compiled."""
    try:
        run = opened(lambda: _compiled(device, kind), lambda path: ctypes.CDLL(str(path)).run)
    except (GemmtuneError, OSError) as error:
        log.debug("no loop measures the arithmetic rate: %s", error)
        return None
    run.argtypes, run.restype = [ctypes.c_long], ctypes.c_double
    lanes = VECTOR_BYTES.get(device.arch, 16) // (4 if kind == "float" else 8)
    iterations = 10_000
    while (elapsed_s := _in_threads(run, iterations, device.threads)) < SAMPLE_S:
        iterations *= 2
    best_s = min(elapsed_s, *(_in_threads(run, iterations, device.threads) for _ in range(SAMPLES)))
    return device.threads * iterations * CHAINS * lanes * 2 / best_s / 1e9


def _in_threads(run: ctypes._NamedFuncPointer, iterations: int, count: int) -> float:
    """Return the seconds from the start of the first thread to the end of the last. ctypes releases the GIL during a call."""
    threads = [threading.Thread(target=run, args=(iterations,)) for _ in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def _compiled(device: DeviceInfo, kind: str) -> Path:
    """Return the loop as a shared library, compiled if it is missing."""
    values = {"type": kind, "vector_bytes": VECTOR_BYTES.get(device.arch, 16), "chains": CHAINS}
    source = template(__package__, "fma.cpp.jinja").render(values)
    digest = hashlib.blake2b(f"{source}{FLAGS}{device.name}{device.isa}".encode(), digest_size=16).hexdigest()
    name = f"fma-{digest}"

    def make(made: Path) -> None:
        reason, compiler = why_no_compiler(), find_compiler()
        if reason is not None or compiler is None:
            raise UnavailableError(f"{name}: {reason}")
        compile_text([compiler.path, *FLAGS], source, ".cpp", made, name, timeout_s=COMPILE_TIMEOUT_S)

    return made_once(("limits", f"{name}.so"), make, name)
