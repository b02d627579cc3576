"""Configurations of the packed CPU GEMM: data for each instruction set, one legality predicate, and the sets that are searched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...settings import Search
from .printer import COMPUTE_TYPES, STORAGE_TYPES

__all__ = ["VECTOR_BYTES", "Config", "Mode", "configs", "refusal", "unsupported"]

Mode = Literal["steps", "columns"]

VECTOR_BYTES = {"avx512": 64, "avx2": 32, "portable": 16}
VECTOR_REGISTERS = {"avx512": 32, "avx2": 16, "portable": 16}
MICRO_TILES: dict[str, tuple[tuple[int, int], ...]] = {
    "avx512": ((14, 2), (8, 3)),
    "avx2": ((6, 2), (4, 3)),
    "portable": ((6, 2), (4, 3)),
}
"""Rows and vectors of the micro-tiles worth compiling, best first. The product of both keeps the multiply-add units busy and, with
one vector of B each and one of A, fits the register file."""

_MOST: dict[Search, int | None] = {"quick": 4, "default": 10, "exhaustive": None}
MAX_PACKED_A_BYTES = 64 << 20
"""What ``columns`` may hold of A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one kernel goes through a product.

    ``mr`` rows by ``nv`` vectors is the micro-tile: the only part that the compiler sees. ``kc`` is how much of K is done between
    two visits of a tile (at most K). ``task_m`` panels of A by ``task_n`` panels of B are one task of a thread. ``direct`` reads b
    in place, without packing it in the call.
    """

    mr: int
    nv: int
    mode: Mode
    kc: int
    task_m: int
    task_n: int
    direct: bool = False

    def nr(self, arch: str, accumulator: torch.dtype) -> int:
        """Columns of the micro-tile."""
        return self.nv * VECTOR_BYTES.get(arch, 0) // accumulator.itemsize


def unsupported(problem: Problem) -> str | None:
    """Why no configuration serves the problem; None if some may."""
    if problem.device_type != "cpu":
        return f"the problem is on {problem.device_type}, these kernels run on a CPU"
    if problem.prepacked and problem.batched:
        return "a prepacked operand is 2-D"
    if problem.epilogue is not None:
        dtypes = {node.dtype for node in problem.epilogue.nodes} - set(COMPUTE_TYPES)
        dtypes |= {layout.dtype for layout in problem.epilogue.operands} - set(STORAGE_TYPES)
        if dtypes:
            return f"the epilogue has values of {', '.join(sorted(map(str, dtypes)))}, expected float dtypes"
    return None


def refusal(config: Config, problem: Problem, device: DeviceInfo) -> str | None:
    """Why ``config`` is not legal for the problem on the device; None if it is. The one predicate of this template."""
    reason = unsupported(problem)
    if reason is not None:
        return reason
    if device.arch not in VECTOR_BYTES:
        return f"no micro-kernel for {device.arch}, expected one of {', '.join(VECTOR_BYTES)}"
    registers = VECTOR_REGISTERS[device.arch]
    if config.mr * config.nv + config.nv + 1 > registers:
        return f"a micro-tile of {config.mr} rows by {config.nv} vectors needs more than the {registers} vector registers"
    if min(config.mr, config.nv, config.kc, config.task_m, config.task_n) < 1:
        return f"sizes must be at least 1, got {config}"
    itemsize = problem.accumulator.itemsize
    if config.mode == "columns" and problem.m * problem.k * itemsize > MAX_PACKED_A_BYTES:
        return f"a packed copy of a takes {problem.m * problem.k * itemsize} bytes, expected at most {MAX_PACKED_A_BYTES}"
    nr = config.nr(device.arch, problem.accumulator)
    if config.direct and not problem.prepacked and (problem.b.stride[-1] != 1 or problem.n < nr):
        return f"b can be read in place only with {nr} or more columns of stride 1, got {problem.b}"
    return None


def configs(problem: Problem, device: DeviceInfo, search: Search) -> tuple[Config, ...]:
    """The legal configurations to try, most promising first."""
    found = dict.fromkeys(_ordered(problem, device, search == "exhaustive"))
    legal = (config for config in found if refusal(config, problem, device) is None)
    return tuple(itertools.islice(legal, _MOST[search]))


def _ordered(problem: Problem, device: DeviceInfo, everything: bool) -> Iterator[Config]:
    tiles = MICRO_TILES.get(device.arch, ())
    for mr, nv in tiles if everything else tiles[:1]:
        panels_m = -(-problem.m // mr)
        if panels_m <= 8 or everything:
            yield from _columns(problem, mr, nv)
        yield from _steps(problem, mr, nv)


def _steps(problem: Problem, mr: int, nv: int) -> Iterator[Config]:
    for direct, kc in itertools.product((True, False) if problem.prepacked else (False,), (512, 256, 1024, 2048)):
        for task_m, task_n in ((8, 4), (16, 2), (4, 4)):
            yield Config(mr=mr, nv=nv, mode="steps", kc=_even_kc(problem.k, kc), task_m=task_m, task_n=task_n, direct=direct)


def _columns(problem: Problem, mr: int, nv: int) -> Iterator[Config]:
    for direct, task_n, kc in itertools.product((True, False), (1, 2, 4, 8), (256, 512, 128)):
        yield Config(mr=mr, nv=nv, mode="columns", kc=_even_kc(problem.k, kc), task_m=8, task_n=task_n, direct=direct)


def _even_kc(k: int, kc: int) -> int:
    """``kc`` made smaller so that all blocks of K are about equally long."""
    blocks = max(1, -(-k // kc))
    return max(1, -(-k // blocks))
