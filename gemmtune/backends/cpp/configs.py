"""Configurations of the packed CPU GEMM: data per instruction set, one legality predicate, and the candidate sets of a search."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...device import DeviceInfo
from ...effort import EFFORT
from ...problem import Epilogue, Problem
from ...problem.dtypes import dtype_name
from ...problem.operations import DENSE_OPS, QUANTIZED_OPS
from ...problem.rules import why_not, why_not_fnuz
from ...settings import Search
from .operands import VECTOR_BYTES, divided, numbers_per_step, oriented, sides, uses_vnni
from .printer import COMPUTE_TYPES, STORAGE_TYPES

__all__ = ["DOT_TILES", "VECTOR_BYTES", "Config", "Mode", "candidates", "configs", "refusal", "unsupported"]

Mode = Literal["steps", "columns", "dots"]

OPERATIONS = (*DENSE_OPS, *QUANTIZED_OPS, "grouped_mm", "mixed_grouped_mm", "scaled_grouped_mm", "grouped_k_mm")


VECTOR_REGISTERS = {"avx512": 32, "avx2": 16, "portable": 16}
MICRO_TILES: dict[str, tuple[tuple[int, int], ...]] = {
    "avx512": ((14, 2), (8, 3)), "avx2": ((6, 2), (4, 3)), "portable": ((6, 2), (4, 3)),
}  # fmt: skip
"""Rows and vectors of each micro-tile worth compiling, best first. With a vector of a, the tile fits the register file."""

DOT_TILES: dict[str, tuple[int, int]] = {"avx512": (6, 4), "avx2": (3, 3), "portable": (3, 3)}
"""Rows and columns of the dot-product micro-tiles. Their sums, the columns and one row fit the register file."""

MAX_PACKED_A_BYTES = 64 << 20
"""Most bytes of packed a in ``columns`` mode. Grouped products hold as many rows at a time as fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Traversal of a product by one kernel.

    The modes differ in packing. ``steps`` packs a and b together for each block of K. ``columns`` takes a few panels of b through
    all of K. ``dots`` does the same with dot products along K, and reads b in place.

    The compiler sees only the micro-tile, ``mr`` rows by ``nv`` vectors. ``kc`` is the number of K steps between two visits of a
    tile. It is at most K, less if a step holds several numbers (``numbers_per_step``). One task of a thread is ``task_m`` panels of
    a by ``task_n`` panels of b. ``direct`` reads b in place instead of packing it in the call.
    """

    mr: int
    nv: int
    mode: Mode
    kc: int
    task_m: int
    task_n: int
    direct: bool = False

    def rows(self, arch: str) -> int:
        """Return the maximum rows of a panel of a."""
        return min(self.mr, DOT_TILES[arch][0]) if self.mode == "dots" else self.mr

    def nr(self, arch: str, accumulator: torch.dtype) -> int:
        """Return the columns of the micro-tile."""
        return self.nv * VECTOR_BYTES.get(arch, 0) // accumulator.itemsize


def unsupported(problem: Problem) -> str | None:
    """Return why no configuration serves the problem; None if some may."""
    if problem.device_type != "cpu":
        return f"the problem is on {problem.device_type}, these kernels run on a CPU"
    if (reason := why_not(problem, OPERATIONS) or why_not_fnuz(problem)) is not None:
        return reason
    if problem.prepacked and problem.batched:
        return "a prepacked operand is 2-D"
    return None if problem.epilogue is None else why_not_epilogue(problem.epilogue)


def why_not_epilogue(epilogue: Epilogue) -> str | None:
    dtypes = {node.dtype for node in epilogue.nodes} - set(COMPUTE_TYPES)
    dtypes |= {layout.dtype for layout in epilogue.operands} - set(STORAGE_TYPES)
    if dtypes:
        return f"the epilogue has values of {', '.join(sorted(map(str, dtypes)))}, expected float dtypes or bool"
    return None


def refusal(config: Config, problem: Problem, device: DeviceInfo) -> str | None:
    """Return why ``config`` is illegal for the problem on the device, or None. This is the template's only legality predicate."""
    if (reason := unsupported(problem)) is not None:
        return reason
    if device.arch not in VECTOR_BYTES:
        return f"no micro-kernel for {device.arch}, expected one of {', '.join(VECTOR_BYTES)}"
    registers = VECTOR_REGISTERS[device.arch]
    if config.mr * config.nv + config.nv + 1 > registers:
        return f"a micro-tile of {config.mr} rows by {config.nv} vectors needs more than the {registers} vector registers"
    if min(config.mr, config.nv, config.kc, config.task_m, config.task_n) < 1:
        return f"sizes must be at least 1, got {config}"
    return _refused_reading(config, problem, device)


def _refused_reading(config: Config, problem: Problem, device: DeviceInfo) -> str | None:
    """Return why the config cannot read the operands, or None."""
    nr = config.nr(device.arch, problem.accumulator)
    x = oriented(problem, nr)
    packed_bytes = x.a.size[-2] * _steps(problem, device, config) * problem.accumulator.itemsize
    if problem.groups and config.mode == "steps":
        return "grouped products need mode columns or dots"
    if problem.divides_terms and config.mode == "dots":
        return "dot products serve only groups of rows, not groups of terms"
    if config.mode != "steps" and not problem.groups and packed_bytes > MAX_PACKED_A_BYTES:
        return f"a packed copy of a takes {packed_bytes} bytes, expected at most {MAX_PACKED_A_BYTES}"
    if config.mode == "dots" and (problem.prepacked or x.b.stride[-2] != 1):
        return f"dot products need b with stride 1 along K, got {x.b}"
    if config.mode == "dots" and sides(problem, swapped=x.swapped)[0].encoding:
        return f"dot products need 4-bit weights on the right, but this product is computed transposed: {problem.out}"
    interleaved = problem.prepacked and (problem.accumulator == torch.int32 or uses_vnni(problem, device))
    if interleaved and not config.direct:
        return f"a prepacked b of {dtype_name(problem.b.dtype)} can only be read in place"
    if config.direct and not problem.prepacked and numbers_per_step(problem.accumulator, device.arch, vnni=False) > 1:
        return "int8 b is read in place only by dot products or if prepacked"
    if config.direct and not problem.prepacked and (x.b.stride[-1] != 1 or x.b.size[-1] < nr):
        return f"b can be read in place only with {nr} or more columns of stride 1, got {x.b}"
    return None


def pairs(config: "Config | Blocking", problem: Problem, device: DeviceInfo) -> bool:
    """Return True if the kernel of a config multiplies and adds several numbers at once (``uses_vnni``)."""
    return uses_vnni(problem, device, direct=config.direct, dots=config.mode == "dots")


def _makes_pairs(problem: Problem, device: DeviceInfo) -> bool:
    """Return True if packing makes pairs of a narrow weight."""
    return problem.widens_b and uses_vnni(problem, device)


def _steps(problem: Problem, device: DeviceInfo, config: "Config | Blocking") -> int:
    vnni = pairs(config, problem, device)
    return -(-problem.k // numbers_per_step(problem.accumulator, device.arch, vnni=vnni))


@dataclass(frozen=True, slots=True)
class Blocking:
    """Part of a ``Config`` that the compiler does not see. All values below were measured; ``refusal`` drops the illegal ones."""

    mode: Mode
    kc: int
    task_m: int
    task_n: int
    direct: bool = False


_DOTS = (Blocking("dots", 4096, 8, 1), Blocking("dots", 512, 8, 1), Blocking("dots", 1024, 8, 4))
_IN_PLACE = (Blocking("columns", 128, 8, 4, True), Blocking("columns", 512, 8, 2, True))
_WIDE_IN_PLACE = (Blocking("columns", 8, 8, 64, True), Blocking("columns", 8, 8, 16, True))
"""Blockings for row-major b. They read several whole rows at a time, to stay in each page for as long as possible."""
_WIDE_NARROW_IN_PLACE = (
    Blocking("columns", 8, 8, 64, True), Blocking("columns", 128, 8, 64, True), Blocking("columns", 32, 8, 16, True),
)  # fmt: skip
"""Blockings for row-major b of 8-bit or 4-bit numbers. Each visit also reads the scales of a group."""
_PACKED = (Blocking("columns", 512, 8, 1), Blocking("columns", 256, 8, 4), Blocking("columns", 128, 8, 1))
_FEW_ROWS = (*_DOTS, *_WIDE_IN_PLACE, *_IN_PLACE, *_PACKED)
_FEW_ROWS_NARROW = (*_DOTS, *_WIDE_NARROW_IN_PLACE, *_IN_PLACE, *_PACKED)
_FEW_ROWS_PAIRS = (_PACKED[2], _PACKED[1], _PACKED[0], *_DOTS, *_WIDE_NARROW_IN_PLACE)
"""Blockings for weights of 8 and 4 bits that packing makes pairs of bfloat16."""
_LEAST_ROWS_PAIRS = {"": 16, "int4": 8, "uint4": 8}
"""Fewest rows for which these are faster than dot products, by encoding."""
_FEW_ROWS_PREPACKED = (
    Blocking("columns", 4096, 8, 1, True), Blocking("columns", 512, 8, 1, True), Blocking("columns", 256, 8, 2, True),
    Blocking("columns", 1024, 8, 4, True),
)  # fmt: skip
_MANY_ROWS = (
    Blocking("columns", 1024, 8, 4), Blocking("steps", 512, 16, 4), Blocking("columns", 512, 16, 4),
    Blocking("steps", 1024, 8, 4), Blocking("columns", 256, 16, 2), Blocking("steps", 256, 4, 2),
)  # fmt: skip
"""Blockings that pack a and b, for products that use the copies often enough."""
_MOST_ROWS = (_MANY_ROWS[3], _MANY_ROWS[1], _MANY_ROWS[0], _MANY_ROWS[2], *_MANY_ROWS[4:])
_CACHED_A_BYTES = 12 << 20
"""The same for pairs of narrow weights if a packed copy of a has more than these bytes: it leaves the caches while b passes by."""
_MANY_ROWS_IN_PLACE = (
    Blocking("columns", 1024, 8, 4, True), Blocking("steps", 512, 16, 4, True), Blocking("columns", 512, 16, 2, True),
    Blocking("steps", 256, 4, 2, True),
)  # fmt: skip

_INT8_FEW_ROWS = (
    Blocking("dots", 1024, 8, 4), Blocking("dots", 1024, 8, 1), Blocking("columns", 128, 8, 64), Blocking("columns", 32, 8, 64),
    Blocking("columns", 128, 8, 1), Blocking("columns", 512, 8, 1),
)  # fmt: skip
_INT8_MANY_ROWS = (
    Blocking("columns", 256, 32, 32), Blocking("columns", 512, 32, 16), Blocking("steps", 256, 32, 8),
    Blocking("columns", 512, 8, 1), Blocking("columns", 512, 16, 4), Blocking("steps", 512, 16, 4),
)  # fmt: skip
"""Blockings for int8 products. Packing weighs more in them, so neighbouring panels are packed together."""

_MODES: tuple[Mode, ...] = ("steps", "columns")
_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_TASKS = ((4, 1), (4, 4), (8, 2), (8, 8), (16, 4), (32, 2))
_EVERY = tuple(Blocking(x, kc, *task, direct) for x, kc, task, direct in itertools.product(_MODES, _LENGTHS, _TASKS, (False, True)))
"""Blockings that an exhaustive search adds."""

_TASKS_PER_THREAD = 2
"""Minimum tasks per thread, if there are enough columns. When a thread is delayed, other threads take its remaining tasks."""
_FEW_PANELS = 4
"""Largest number of panels of a for which reading b costs as much as the arithmetic."""


def blockings(problem: Problem, device: DeviceInfo, mr: int, nr: int, *, everything: bool) -> list[Blocking]:
    """Return candidate blockings, most promising first. Some may be illegal for the problem."""
    x = oriented(problem, nr)
    panels, threads = -(-x.b.size[-1] // nr), max(device.threads, 1)
    rows = -(-problem.m // problem.groups) if divided(problem) == "rows" else x.a.size[-2]
    few = _few_rows(problem, device, rows, max(1, -(-panels // threads)))
    spills = _makes_pairs(problem, device) and x.a.size[-2] * problem.k * problem.a.dtype.itemsize > _CACHED_A_BYTES
    packed = _INT8_MANY_ROWS if problem.accumulator == torch.int32 else _MOST_ROWS if spills else _MANY_ROWS
    in_place = _MANY_ROWS_IN_PLACE if problem.prepacked else ()
    many = _shared_out((*in_place, *packed), max(1, panels // (_TASKS_PER_THREAD * threads)))
    if everything:
        return [*few, *many, *_EVERY]
    return [*few, *many[:2]] if rows <= _FEW_PANELS * mr else many


def _few_rows(problem: Problem, device: DeviceInfo, rows: int, most: int) -> list[Blocking]:
    """Return blockings for few ``rows``, with at most ``most`` panels of b per task so that every thread has work."""
    if problem.prepacked:
        found: Sequence[Blocking] = _FEW_ROWS_PREPACKED
    elif problem.accumulator == torch.int32:
        found = _INT8_FEW_ROWS
    elif _makes_pairs(problem, device) and rows >= _LEAST_ROWS_PAIRS[problem.encoding]:
        found = _FEW_ROWS_PAIRS
    else:
        found = _FEW_ROWS_NARROW if problem.b.dtype.itemsize == 1 else _FEW_ROWS
    return _shared_out(found, most)


def _shared_out(found: Iterable[Blocking], most: int) -> list[Blocking]:
    """Return the blockings with small enough ``columns`` tasks. The other modes share work in smaller pieces anyway."""
    return [replace(blocking, task_n=min(blocking.task_n, most)) if blocking.mode == "columns" else blocking for blocking in found]


def candidates(problem: Problem, device: DeviceInfo, search: Search) -> Iterator[Config]:
    """Yield the configurations of a search, most promising first. Some may be illegal for the problem, and some equal."""
    tiles = MICRO_TILES[device.arch]
    for mr, nv in tiles if search == "exhaustive" else tiles[:1]:
        nr = nv * VECTOR_BYTES[device.arch] // problem.accumulator.itemsize
        for x in blockings(problem, device, mr, nr, everything=search == "exhaustive"):
            steps = _steps(problem, device, x)
            # Shrink ``kc`` so that all blocks of K have about equal length.
            kc = max(1, -(-steps // max(1, -(-steps // x.kc))))
            yield Config(mr=mr, nv=nv, mode=x.mode, kc=kc, task_m=x.task_m, task_n=x.task_n, direct=x.direct)


def configs(problem: Problem, device: DeviceInfo, search: Search) -> tuple[Config, ...]:
    """Return the legal configurations to try, most promising first."""
    found = dict.fromkeys(candidates(problem, device, search))
    legal = (config for config in found if refusal(config, problem, device) is None)
    return tuple(itertools.islice(legal, EFFORT[search].configs["cpp"]))
