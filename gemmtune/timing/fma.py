"""The arithmetic rate of a CPU: a loop of fused multiply-adds, compiled with the system's C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from importlib import resources
from pathlib import Path
from typing import Literal

import jinja2

from ..cache import cache_dir
from ..device import DeviceInfo

log = logging.getLogger("gemmtune")

VECTOR_BYTES = {"avx512": 64, "avx2": 32}
CHAINS = 12
"""Latency of 4 cycles times 2 units that begin one each cycle, and some more; the sums fit into 16 vector registers."""
SAMPLE_S = 0.004
"""Short: on a busy machine some samples then have all cores to themselves."""
SAMPLES = 40
COMPILE_TIMEOUT_S = 60.0


def fma_gflops(device: DeviceInfo, kind: Literal["float", "double"]) -> float | None:
    """The rate of all threads together in 1e9 operations/s, a fused multiply-add counting two; None where nothing compiles it."""
    library = _compiled(device, kind)
    if library is None:
        return None
    run = ctypes.CDLL(str(library)).run
    run.argtypes, run.restype = [ctypes.c_long], ctypes.c_double
    lanes = VECTOR_BYTES.get(device.arch, 16) // (4 if kind == "float" else 8)
    iterations = 10_000
    while (elapsed_s := _in_threads(run, iterations, device.threads)) < SAMPLE_S:
        iterations *= 2
    best_s = min(elapsed_s, *(_in_threads(run, iterations, device.threads) for _ in range(SAMPLES)))
    return device.threads * iterations * CHAINS * lanes * 2 / best_s / 1e9


def _in_threads(run: ctypes._NamedFuncPointer, iterations: int, count: int) -> float:
    """Seconds from the start of the first thread to the end of the last. ctypes lets go of the GIL during a call."""
    threads = [threading.Thread(target=run, args=(iterations,)) for _ in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def _compiled(device: DeviceInfo, kind: str) -> Path | None:
    """The loop as a shared library, in the cache by the hash of source and compiler."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    text = resources.files(__package__).joinpath("fma.cpp.jinja").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    source = environment.from_string(text).render(type=kind, vector_bytes=VECTOR_BYTES.get(device.arch, 16), chains=CHAINS)
    command = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-x", "c++", "-"]
    digest = hashlib.blake2b(f"{source}{command}{device.name}{device.isa}".encode(), digest_size=16).hexdigest()
    try:
        library = cache_dir("limits") / f"fma-{digest}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / "fma.so"
                subprocess.run(
                    [*command, "-o", str(made)], input=source, text=True, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S
                )
                os.replace(made, library)  # another process may be doing the same
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("the arithmetic rate is not measured: %s", error)
        return None
    return library
