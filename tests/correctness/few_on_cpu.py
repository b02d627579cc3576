"""The kernel for few rows compiled for the CPU, with threads for its threads: its text but for what is written in PTX."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import subprocess
from pathlib import Path

import torch

from gemmtune.backends.cuda.few.build import FewChoice
from gemmtune.backends.cuda.few.source import KERNEL, Source
from gemmtune.backends.cuda.library import Library
from gemmtune.backends.cuda.mixed.launch import launch_of
from gemmtune.choice import Kernel
from gemmtune.toolchain.launch import GIVEN

FOLDER = Path(__file__).parent / "cuda_on_cpu"
BITS = {torch.float16: (5, 10), torch.bfloat16: (8, 7)}
"""Of the exponent and the significand."""
SHARED = "extern __shared__ __align__(1024) unsigned char shared[];"


def text_of(source: Source) -> str:
    exponent, significand = BITS[source.dtype]
    bits = f"#define ELEMENT_BITS_E {exponent}\n#define ELEMENT_BITS_M {significand}\n"
    own = {
        "device": bits + '#include "device.h"',
        "barriers": "",
        "pointwise": "",
        "driver": f'#define KERNEL {KERNEL}\n#include "driver.h"',
    }
    text = source.put_together({**source.parts, **own})
    assert SHARED in text
    return text.replace(SHARED, "unsigned char* const shared = here().shared;")


def compiled(source: Source, folder: Path) -> Library:
    text = text_of(source)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not path.exists():
        code = path.with_suffix(".cpp")
        code.write_text(text)
        command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", f"-I{FOLDER}", str(code), "-o", str(path)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    return Library(path)


def kernel(choice: FewChoice, folder: Path) -> Kernel:
    """For a problem on the CPU."""
    library, words = compiled(choice.source, folder), launch_of(choice.config, choice.problem, device=0)
    assert library.prepare(0) == 0

    def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
        a, b, *rest = tensors
        first = [x.data_ptr() for x in (out, a, b)]
        given = struct.pack(f"{GIVEN}{len(rest)}P", 0, *first, 0, 1.0, 0.0, *(x.data_ptr() for x in rest))
        status = library.call(ctypes.byref(words), given)
        assert status == 0, status

    return Kernel(run=run)
