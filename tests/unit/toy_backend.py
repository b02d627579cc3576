"""The backend of "Adding a backend" in docs/architecture.md: three loops in C for contiguous float32 matrices on the CPU.

A test copies this file into a package of its own and adds a row to the table of backends; nothing else makes it a backend.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemmtune.cache import cached, present
from gemmtune.choice import Availability, Choice, Claims, Kernel, Offers, Refusal
from gemmtune.device import DeviceInfo
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.made_once import compile_text, made_once, opened

SOURCE = """
extern "C" void product(long m, long n, long k, const float* a, const float* b, float* out) {
  for (long i = 0; i < m; ++i)
    for (long j0 = 0; j0 < n; j0 += BLOCK_N) {
      const long width = n - j0 < BLOCK_N ? n - j0 : BLOCK_N;
      float sums[BLOCK_N] = {};
      for (long p = 0; p < k; ++p)
        for (long j = 0; j < width; ++j) sums[j] += a[i * k + p] * b[p * n + j0 + j];
      for (long j = 0; j < width; ++j) out[i * n + j0 + j] = SIGN sums[j];
    }
}
"""
CONFIGS = ((8, "+"), (64, "+"), (512, "+"), (16, "-"))
"""Columns of a block, and the sign of what is stored: the last one is wrong, and has to be found."""


def why_not(problem: Problem, device: DeviceInfo, block_n: int) -> str | None:
    """The one legality predicate: why a config cannot do a problem; None if it can."""
    if device.type != "cpu" or problem.op != "mm" or problem.a.dtype != torch.float32 or problem.epilogue is not None:
        return "only mm of float32 on a CPU, without an epilogue"
    if not all(layout == type(layout).contiguous(layout.size, layout.dtype) for layout in (problem.a, problem.b, problem.out)):
        return "only contiguous operands"
    return f"N = {problem.n} is less than a block of {block_n}" if problem.n < block_n else None


@dataclass(frozen=True, kw_only=True)
class ToyChoice(Choice):
    """One config: a class of kernels that serve every size."""

    block_n: int
    sign: str

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{SOURCE}{self.block_n}{self.sign}".encode()).hexdigest()

    @property
    def compile_key(self) -> str:
        return self.content_hash

    @property
    def compiled(self) -> bool:
        return present(cached(*self._file))

    @property
    def _file(self) -> tuple[str, str]:
        return "toy", f"{self.content_hash}.so"

    def _made(self) -> Path:
        text = f"#define BLOCK_N {self.block_n}\n#define SIGN {self.sign}\n{SOURCE}"
        command = ["c++", "-O1", "-shared", "-fPIC"]
        return made_once(self._file, lambda made: compile_text(command, text, ".cpp", made, self.name), self.name)

    def compile(self) -> None:
        self._made()

    def load(self) -> Any:
        return opened(self._made, lambda path: ctypes.CDLL(str(path)).product)

    def bind(self, loaded: Any) -> Kernel:
        sizes = [ctypes.c_long(size) for size in (self.problem.m, self.problem.n, self.problem.k)]

        def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
            loaded(*sizes, *(ctypes.c_void_p(x.data_ptr()) for x in (*tensors, out)))

        return Kernel(run=run)


class ToyBackend:
    """The object that the table's row leads to."""

    name = "toy"

    def available(self, device: DeviceInfo) -> Availability:
        found = shutil.which("c++")
        return Availability(ok=found is not None, detail=found or "no c++ on the PATH; install a C++ compiler")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return device.type == "cpu"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        choices, refusals = [], []
        claims = Claims(accumulate=torch.float32)
        for block_n, sign in CONFIGS:
            name = f"toy:loops_{block_n}{'_wrong' * (sign == '-')}"
            reason = why_not(problem, device, block_n)
            if reason is None:
                info = {"tile": f"1x{block_n}"}
                choices.append(
                    ToyChoice(name=name, backend="toy", problem=problem, claims=claims, info=info, block_n=block_n, sign=sign)
                )
            else:
                refusals.append(Refusal(name=name, reason=reason))
        return Offers(choices=choices, refusals=refusals)


BACKEND = ToyBackend()
