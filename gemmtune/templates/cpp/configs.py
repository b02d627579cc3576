"""Configurations of the packed CPU GEMM: data for each instruction set, one legality predicate, and the sets that are searched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.rules import why_not_dense
from ...settings import Search
from .printer import COMPUTE_TYPES, STORAGE_TYPES

__all__ = ["VECTOR_BYTES", "Config", "Mode", "configs", "refusal", "unsupported"]

Mode = Literal["steps", "columns", "dots"]

VECTOR_BYTES = {"avx512": 64, "avx2": 32, "portable": 16}
VECTOR_REGISTERS = {"avx512": 32, "avx2": 16, "portable": 16}
MICRO_TILES: dict[str, tuple[tuple[int, int], ...]] = {
    "avx512": ((14, 2), (8, 3)),
    "avx2": ((6, 2), (4, 3)),
    "portable": ((6, 2), (4, 3)),
}
"""Rows and vectors of the micro-tiles worth compiling, best first. The product of both keeps the multiply-add units busy and, with
one vector of B each and one of A, fits the register file."""

DOT_TILES: dict[str, tuple[int, int]] = {"avx512": (6, 4), "avx2": (3, 3), "portable": (3, 3)}
"""Rows and columns of the micro-tiles made of dot products: their sums, the columns and one row fit the register file."""

_FEW_PANELS = 4
"""Up to so many panels of a, reading b costs as much as the arithmetic."""
_MOST: dict[Search, int | None] = {"quick": 4, "default": 10, "exhaustive": None}
MAX_PACKED_A_BYTES = 64 << 20
"""What ``columns`` may hold of A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one kernel goes through a product.

    ``steps`` packs a and b together, block by block of K; ``columns`` takes a few panels of b through all of K at a time; ``dots``
    does so by dot products along K, with b in place.

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

    def rows(self, arch: str) -> int:
        """The most rows of a panel of a."""
        return min(self.mr, DOT_TILES[arch][0]) if self.mode == "dots" else self.mr

    def nr(self, arch: str, accumulator: torch.dtype) -> int:
        """Columns of the micro-tile."""
        return self.nv * VECTOR_BYTES.get(arch, 0) // accumulator.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Oriented:
    """The operands as the kernels see them: with ``swapped``, outᵀ = bᵀ aᵀ is computed."""

    a: Layout
    b: Layout
    out: Layout
    swapped: bool


def oriented(problem: Problem, nr: int) -> Oriented:
    """The side of the product on which the columns of the micro-tile lie.

    Swapped is a result stored by columns, and one too narrow for a micro-tile. A prepacked b stays where it is.
    """
    by_columns = problem.out.stride[-1] != 1 and problem.out.stride[-2] == 1 and problem.m > 1
    narrow = problem.n < nr and problem.m > 2 * problem.n
    if problem.prepacked or not (by_columns or narrow):
        return Oriented(a=problem.a, b=problem.b, out=problem.out, swapped=False)
    return Oriented(a=problem.b.transposed, b=problem.a.transposed, out=problem.out.transposed, swapped=True)


def unsupported(problem: Problem) -> str | None:
    """Why no configuration serves the problem; None if some may."""
    reason = why_not_dense(problem)
    if reason is not None:
        return reason
    if problem.device_type != "cpu":
        return f"the problem is on {problem.device_type}, these kernels run on a CPU"
    if problem.prepacked and problem.batched:
        return "a prepacked operand is 2-D"
    if problem.epilogue is not None:
        dtypes = {node.dtype for node in problem.epilogue.nodes} - set(COMPUTE_TYPES)
        dtypes |= {layout.dtype for layout in problem.epilogue.operands} - set(STORAGE_TYPES)
        if dtypes:
            return f"the epilogue has values of {', '.join(sorted(map(str, dtypes)))}, expected float dtypes or bool"
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
    nr = config.nr(device.arch, problem.accumulator)
    x = oriented(problem, nr)
    packed_bytes = x.a.size[-2] * problem.k * problem.accumulator.itemsize
    if config.mode != "steps" and packed_bytes > MAX_PACKED_A_BYTES:
        return f"a packed copy of a takes {packed_bytes} bytes, expected at most {MAX_PACKED_A_BYTES}"
    if config.mode == "dots" and (problem.prepacked or x.b.stride[-2] != 1):
        return f"dot products need b with stride 1 along K, got {x.b}"
    if config.direct and not problem.prepacked and (x.b.stride[-1] != 1 or x.b.size[-1] < nr):
        return f"b can be read in place only with {nr} or more columns of stride 1, got {x.b}"
    return None


def configs(problem: Problem, device: DeviceInfo, search: Search) -> tuple[Config, ...]:
    """The legal configurations to try, most promising first."""
    tiles = MICRO_TILES[device.arch]
    found: dict[Config, None] = {}
    for mr, nv in tiles if search == "exhaustive" else tiles[:1]:
        blockings = _blockings(problem, device, mr, nv, everything=search == "exhaustive")
        found |= dict.fromkeys(_made(problem, mr, nv, blocking) for blocking in blockings)
    legal = (config for config in found if refusal(config, problem, device) is None)
    return tuple(itertools.islice(legal, _MOST[search]))


@dataclass(frozen=True, slots=True)
class _Blocking:
    mode: Mode
    kc: int
    task_m: int
    task_n: int
    direct: bool = False


_MANY_ROWS = (
    _Blocking("columns", 1024, 8, 4), _Blocking("steps", 512, 16, 4), _Blocking("columns", 512, 16, 4),
    _Blocking("steps", 1024, 8, 4), _Blocking("columns", 256, 16, 2), _Blocking("steps", 256, 4, 2),
)  # fmt: skip
"""B and A are packed; the copies are used often enough to be worth it."""
_MANY_ROWS_IN_PLACE = (
    _Blocking("columns", 1024, 8, 4, True), _Blocking("steps", 512, 16, 4, True), _Blocking("columns", 512, 16, 2, True),
    _Blocking("steps", 256, 4, 2, True),
)  # fmt: skip
_FEW_ROWS_PREPACKED = (
    _Blocking("columns", 4096, 8, 1, True), _Blocking("columns", 512, 8, 1, True), _Blocking("columns", 256, 8, 2, True),
    _Blocking("columns", 1024, 8, 4, True),
)  # fmt: skip
_FEW_ROWS_PACKED = (_Blocking("columns", 512, 8, 1), _Blocking("columns", 256, 8, 4), _Blocking("columns", 128, 8, 1))
_DOTS = (_Blocking("dots", 4096, 8, 1), _Blocking("dots", 512, 8, 1), _Blocking("dots", 1024, 8, 4))
_IN_PLACE = (_Blocking("columns", 128, 8, 4, True), _Blocking("columns", 512, 8, 2, True))
_TASKS_PER_THREAD = 2
"""At least so many, where there are enough columns: a thread that was held up then leaves work to the others."""
_ROWS_AT_A_TIME = 8
"""With few rows and a row-major b in place, b is read this many whole rows at a time: as long as possible in each page."""


def _blockings(problem: Problem, device: DeviceInfo, mr: int, nv: int, *, everything: bool) -> list[_Blocking]:
    """Blockings by how many rows there are and where b is. Some are not legal for the problem."""
    nr = nv * VECTOR_BYTES[device.arch] // problem.accumulator.itemsize
    x = oriented(problem, nr)
    panels = -(-x.b.size[-1] // nr)
    wide = [
        _Blocking("columns", _ROWS_AT_A_TIME, 8, max(1, min(most, -(-panels // max(device.threads, 1)))), True) for most in (64, 16)
    ]
    few = [*_FEW_ROWS_PREPACKED] if problem.prepacked else [*_DOTS, *wide, *_IN_PLACE, *_FEW_ROWS_PACKED]
    most = max(1, panels // (_TASKS_PER_THREAD * max(device.threads, 1)))
    many = [
        replace(blocking, task_n=min(blocking.task_n, most)) if blocking.mode == "columns" else blocking
        for blocking in (*(_MANY_ROWS_IN_PLACE if problem.prepacked else ()), *_MANY_ROWS)
    ]
    if everything:
        return [*few, *many, *_every_blocking()]
    return [*few, *many[:2]] if x.a.size[-2] <= _FEW_PANELS * mr else many


def _every_blocking() -> Iterator[_Blocking]:
    for mode, kc in itertools.product(("steps", "columns"), (128, 256, 512, 1024, 2048, 4096)):
        for (task_m, task_n), direct in itertools.product(((4, 1), (4, 4), (8, 2), (8, 8), (16, 4), (32, 2)), (False, True)):
            yield _Blocking(mode, kc, task_m, task_n, direct)  # type: ignore[arg-type]


def _made(problem: Problem, mr: int, nv: int, blocking: _Blocking) -> Config:
    """With ``kc`` made smaller so that all blocks of K are about equally long."""
    blocks = max(1, -(-problem.k // blocking.kc))
    return Config(
        mr=mr,
        nv=nv,
        mode=blocking.mode,
        kc=max(1, -(-problem.k // blocks)),
        task_m=blocking.task_m,
        task_n=blocking.task_n,
        direct=blocking.direct,
    )
