"""Plan of a call: sizes, strides and blocking in the form that the compiled function reads."""

import ctypes
from dataclasses import astuple, dataclass

import torch

from ...problem import Layout, Problem
from ...toolchain.prepared import HostRows
from .configs import MAX_PACKED_A_BYTES, Config
from .operands import EVERYTHING, numbers_per_step, oriented, scale_words, sides

_BLOCK_BYTES = 16 << 20
"""Bytes of packed panels held at a time, for a and for b each: about half of a usual last-level cache."""
_SUMS_BYTES = 64 << 20
"""Most bytes of sums that wait in memory between two blocks of K."""
_DOT_STEP = 16
"""Granularity of ``kc`` for dot products: whole vectors of any instruction set. Packed 4-bit numbers need twice that."""
_US_PER_THREAD = 4.0
"""Minimum work per thread in microseconds; for less work, waking a thread does not pay."""
_FLOPS_PER_US = {torch.float64: 100e3, torch.float32: 200e3, torch.int32: 500e3}
_BYTES_PER_US = 20e3
"""Rough throughput of one core: floating-point operations and bytes per microsecond."""
_ROWS = (1, 18, 20, 22, 29)
"""Indices of the words that depend on M: M, rows of a panel and of a block, panels of a task, threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Arguments of the compiled function: the struct ``words``, how its ``rows`` depend on M, and if a and b are ``swapped``."""

    words: ctypes.Array[ctypes.c_int64]
    swapped: bool
    rows: HostRows | None


def thread_count(problem: Problem) -> int:
    """Return the number of threads above which another one does not pay."""
    work_us = problem.flops / _FLOPS_PER_US[problem.accumulator] + problem.bytes / _BYTES_PER_US
    return max(1, int(work_us / _US_PER_THREAD))


def packed_shape(k: int, n: int, nr: int, numbers: int = 1) -> tuple[int, ...]:
    """Return the shape of a prepacked operand: panels of ``nr`` columns, each K rows long, with ``numbers`` rows interleaved."""
    return (-(-n // nr), -(-k // numbers), nr, *((numbers,) if numbers > 1 else ()))


def block_of_k(problem: Problem, config: Config, numbers: int) -> int:
    """Return the steps of K between two visits of a tile: ``config.kc``, in units that kernels read at a time, or all steps."""
    whole = (_DOT_STEP if config.mode == "dots" else 1) * (2 if problem.encoding else 1)
    return min(-(-config.kc // whole) * whole, max(-(-problem.k // numbers), 1))


def make_plan(problem: Problem, config: Config, arch: str, *, vnni: bool = False) -> Plan:
    """Return the plan of ``config`` for the problem. The order of the words is that of ``struct Plan`` in the template."""
    nr = config.nr(arch, problem.accumulator)
    x = oriented(problem, nr)
    m, n = x.a.size[-2], x.b.size[-1]
    numbers = numbers_per_step(problem.accumulator, arch, vnni=vnni)
    k = -(-problem.k // numbers)
    kc = block_of_k(problem, config, numbers)
    itemsize = problem.accumulator.itemsize
    direct, b_words = _b_words(problem, config, x.b, nr, numbers)
    rows = _even(m, config.rows(arch))
    most = _BLOCK_BYTES // (kc * itemsize)
    block_n = _block(n, nr, most)
    most_rows = min(most, _SUMS_BYTES // (block_n * itemsize)) if k > kc else most
    if problem.groups:
        most_rows = MAX_PACKED_A_BYTES // (max(k, 1) * itemsize)
    block_m = _block(m, rows, most_rows)
    words = [
        problem.groups or problem.batch, m, n, k, problem.k, *_three(x.a), *b_words, *_three(x.out),
        *strides_of(problem.inp, problem, swapped=x.swapped),
        rows, kc, block_m, block_n, _even(-(-m // rows), config.task_m), _even(-(-n // nr), config.task_n),
        int(config.mode != "steps"), direct, int(config.mode == "dots"),
        int(problem.alpha == "zero"), int(problem.beta == "zero"), thread_count(problem),
        *_scale_words(problem, x.swapped),
    ]  # fmt: skip
    for layout in problem.epilogue.operands if problem.epilogue else ():
        words += strides_of(layout, problem, swapped=x.swapped)
    following = None
    if not x.swapped:
        following = HostRows(
            places=_ROWS,
            most=(config.rows(arch), most_rows, config.task_m),
            flops=problem.flops,
            bytes=problem.bytes,
            per_thread=(_US_PER_THREAD * _FLOPS_PER_US[problem.accumulator], _US_PER_THREAD * _BYTES_PER_US),
        )
    return Plan(words=(ctypes.c_int64 * len(words))(*words), swapped=x.swapped, rows=following)


def _scale_words(problem: Problem, swapped: bool) -> list[int]:
    """Return the words for scales: elements of K that share one, each scale's blocks and strides, the size of a group's scales."""
    scales = scale_words(problem)
    if not scales:
        return []
    shifts = []
    for side in sides(problem, swapped=swapped):
        shifts.append(min((scales[i].k_shift for i in (side.scale, side.zero) if i is not None), default=EVERYTHING))
    of_group = [problem.scale_b.numel // problem.groups] if problem.groups and problem.scale_b is not None else []
    return [*shifts, *(word for scale in scales for word in astuple(scale)), *of_group]


def _block(size: int, panel: int, most: int) -> int:
    """Return a multiple of ``panel``, at most ``most`` but at least one panel, that divides ``size`` into nearly equal blocks."""
    return _even(-(-size // panel), max(1, most // panel)) * panel


def _even(count: int, most: int) -> int:
    """Return the size of nearly equal parts of ``count``, each at most ``most``."""
    parts = max(1, -(-count // most))
    return max(1, -(-count // parts))


def _b_words(problem: Problem, config: Config, b: Layout, nr: int, numbers: int) -> tuple[int, list[int]]:
    """Return the number of panels read in place, and the strides of b: batch, panel, column and one row along K."""
    if problem.prepacked:
        panel = [*packed_shape(problem.b.size[-2], problem.n, nr, numbers), 1]
        panels, elements = panel[0], panel[1] * panel[2] * panel[3]
        return (panels if config.direct else 0), [0, elements, numbers, nr]
    batch, k_stride, n_stride = _three(b)
    whole, panels = b.size[-1] // nr, -(-b.size[-1] // nr)
    direct = panels if config.mode == "dots" else whole if config.direct else 0
    return direct, [batch, nr * n_stride, n_stride, k_stride]


def _three(layout: Layout) -> tuple[int, int, int]:
    """Return the strides of batch, row and column; the batch stride of a 2-D layout is 0."""
    batch = layout.stride[0] if len(layout.stride) == 3 else 0
    return (batch, layout.stride[-2], layout.stride[-1])


def strides_of(layout: Layout | None, problem: Problem, *, swapped: bool = False) -> tuple[int, int, int]:
    """Return the strides of batch, row and column of an operand broadcast to the result, or zeros without one."""
    if layout is None:
        return (0, 0, 0)
    expanded = layout.expanded(problem.out.size)
    return _three(expanded.transposed if swapped else expanded)
