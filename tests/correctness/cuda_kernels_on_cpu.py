"""Cuda kernels compiled for the CPU, one CPU thread per CUDA thread. PTX parts are replaced, the rest is the kernels' own text."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import re
import subprocess
from pathlib import Path

import torch

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.cache import cache_dir
from gemmtune.choice import Kernel, Status
from gemmtune.errors import ErrorFromChoice
from gemmtune.selector.verify import Verifier
from gemmtune.toolchain.driver import Driver
from gemmtune.toolchain.launcher import Launcher

FOLDER = Path(__file__).parent / "cuda_on_cpu"
BITS = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 7)}
"""Exponent and significand bits of the multiplied numbers."""
FLAGS = ("-std=c++20", "-O1", "-w", "-pthread", "-fPIC", "-fno-gnu-unique")
"""Compiler flags. With unique symbols, all kernels would share those of the kernel loaded first."""
SHARED = "extern __shared__ __align__(1024) unsigned char shared[];"
STATIC = re.compile(r"__shared__ (\w+) (\w+);")


def text_of(choice: CudaChoice) -> str:
    source, (exponent, significand) = choice.source, BITS[choice.problem.dtype]
    bits = f"#define ELEMENT_BITS_E {exponent}\n#define ELEMENT_BITS_M {significand}\n"
    own = {"barriers": bits + '#include "device.h"', "products": "", "tensor": "", "ptx": "", "device": "", "flags": ""}
    own["pointwise"] = source.values["functions"]
    text = source.put_together({**source.parts, **own})
    assert SHARED in text
    text = text.replace(SHARED, "unsigned char* const shared = here().shared;")
    text = STATIC.sub(r"\1& \2 = *reinterpret_cast<\1*>(here().shared);", text)
    kernels = " ".join(f"X({name})" for name in source.kernels)
    return f'{text}\n#define KERNELS {kernels}\n#include "driver.h"\n'


def compiled(choice: CudaChoice) -> Driver:
    """Return a driver with the kernel, compiled once for all tests."""
    text = text_of(choice)
    headers = "".join(file.read_text() for file in sorted(FOLDER.iterdir()))
    path = cache_dir("cuda") / f"{hashlib.sha256((text + headers + ' '.join(FLAGS)).encode()).hexdigest()}.so"
    if not path.exists():
        code = path.with_suffix(".cpp")
        code.write_text(text)
        _compile("-shared", "-include", str(precompiled()), f"-I{FOLDER}", str(code), "-o", str(path))
    return Driver(ctypes.CDLL(str(path)))


def precompiled() -> Path:
    """Return a header with the standard library's that kernels include. Its compiled form stands beside it, for all of them."""
    lines = (FOLDER / "cuda.h").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.startswith("#include <"))
    header = cache_dir("cuda") / f"{hashlib.sha256((text + ' '.join(FLAGS)).encode()).hexdigest()}.h"
    compiled_header = header.with_name(f"{header.name}.gch")
    if not compiled_header.exists():
        header.write_text(text)
        part = header.with_name(f"{os.getpid()}.gch")
        _compile("-x", "c++-header", str(header), "-o", str(part))
        part.replace(compiled_header)
    return header


def _compile(*arguments: str) -> None:
    made = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def kernel(choice: CudaChoice) -> Kernel:
    """Return the choice's kernel for a problem on the CPU."""
    driver, records = compiled(choice), (*choice.record.before, choice.record)

    def refuse(reason: str) -> ErrorFromChoice:
        return ErrorFromChoice(choice.name, str(choice.problem), reason)

    launchers = [Launcher(driver.load(b"", record.kernel, 0), record, refuse) for record in records]
    # A workspace is zero before the first launch, and a call's own memory has any contents.
    kept = torch.zeros(choice.record.workspace_bytes + choice.record.scratch_bytes + 128, dtype=torch.uint8)
    memory = -(-kept.data_ptr() // 128) * 128

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
        if not choice.record.workspace_bytes:
            kept.fill_(0xFF)
        a, b, *rest = (x.data_ptr() for x in tensors)
        for launcher in launchers:
            launcher.launch(0, (out.data_ptr(), memory, a, b, *rest), *(scalars or (1.0, 0.0)))

    return Kernel(run=run)


def assert_right(one: CudaChoice) -> None:
    """Check that the kernel passes the suite's own verification."""
    here = dataclasses.replace(one.problem, device_type="cpu")
    chosen = dataclasses.replace(one, problem=here)
    verdict = Verifier(here, torch.device("cpu")).check(chosen, kernel(chosen))
    assert verdict.status is Status.OK, verdict.reason
