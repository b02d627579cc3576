"""Arithmetic rate of a CPU, measured by a loop of fused multiply-adds that the system's C++ compiler compiles."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from importlib import resources
from pathlib import Path
from typing import Literal

import jinja2

from ..backends.cpp.compiler import find_compiler, why_no_compiler
from ..device import DeviceInfo
from ..errors import GemmtuneError, UnavailableError
from ..toolchain.made_once import compile_text, made_once, opened

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
    text = resources.files(__package__).joinpath("fma.cpp.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    source = environment.from_string(text).render(type=kind, vector_bytes=VECTOR_BYTES.get(device.arch, 16), chains=CHAINS)
    digest = hashlib.blake2b(f"{source}{FLAGS}{device.name}{device.isa}".encode(), digest_size=16).hexdigest()
    name = f"fma-{digest}"

    def make(made: Path) -> None:
        reason, compiler = why_no_compiler(), find_compiler()
        if reason is not None or compiler is None:
            raise UnavailableError(f"{name}: {reason}")
        compile_text([compiler.path, *FLAGS], source, ".cpp", made, name, timeout_s=COMPILE_TIMEOUT_S)

    return made_once(("limits", f"{name}.so"), make, name)
