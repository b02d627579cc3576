"""Family of kernels for one to four rows: supported problems, source and launches."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.dtypes import dtype_name
from ....problem.rules import why_not
from ....toolchain.record import A, Address, B, Record
from ...cpp.printer import STORAGE_TYPES
from .. import columns, kernel
from ..family import beginnings, float32_sums, why_not_epilogue, why_not_here
from ..hopper import MMA
from ..kernel import KernelSource, addresses_of, common_values, files_of, fill_common, scalars_of, values_of
from ..mixed.family import NUMBERS, PTX, matrix
from .configs import BLOCK_M, Config, candidates, estimate_us, row_bytes, stored, tiles_of, why_not_config, words_of

OPERATIONS = ("mm", "addmm", "mixed_mm")
LOAD_BYTES = columns.ALIGNED_BYTES
"""Bytes of one load. Rows of a and columns of b are aligned to it."""

MOST_BYTES = 2**30
"""Maximum bytes of a column, so that offsets past its end fit 32 bits too."""


class Work(kernel.Work):
    """Parameters of the gemv kernel. ``row_bytes`` is the size of a column of b; pitches are in bytes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("a_pitch", ctypes.c_longlong), ("b_pitch", ctypes.c_longlong),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("row_bytes", ctypes.c_int), ("prefetch_stages", ctypes.c_int),
    )  # fmt: skip


class Gemv(columns.ColumnsFamily[Config]):
    """Family of ``gemv.cu.jinja``. ``configs.py`` has its shapes, legality and ranking."""

    name = "gemv"
    legal_between = True
    likely = 1.3
    instruction = MMA
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not(problem, OPERATIONS) or why_not_here(problem, device)) is not None:
            return reason
        if problem.m > BLOCK_M:
            return f"a has {problem.m} rows, at most {BLOCK_M} are served"
        if problem.widens_b and problem.b.dtype not in (torch.int8, torch.uint8):
            return f"b is {dtype_name(problem.b.dtype)}, expected integers"
        return _why_not_operands(problem) or why_not_epilogue(problem)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield from beginnings(config, config.shape.stages)

    def label(self, problem: Problem, config: Config) -> str:
        return config.label(stored(problem))

    def claims(self, problem: Problem, config: Config) -> Claims:
        """Return the claims. Weights are rounded to a's dtype if zero points are subtracted; scales multiply sums.

        The halves of lines are summed separately.
        """
        return float32_sums(splits=2 * config.shape.warps, weights=problem.dtype if stored(problem).zero else None)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return sums of half lines and warps, added in rising order."""
        order = f"{2 * config.shape.warps} half lines, {config.shape.block_k(stored(problem))} a stage"
        return reduction_of(problem, "cuda", order=order, own="cuda gemv")

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:
        shape = config.shape
        return self.facts(config, (BLOCK_M, shape.block_n, shape.block_k(stored(problem))), splits=2 * shape.warps)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        shape, weights = config.shape, stored(problem)
        common = common_values(problem, Work, {"a": "unsigned char const*", "b": "unsigned char const*"})
        first, scale = common["first_operand"], weights.scale
        read_at_end = [(0, STORAGE_TYPES[scale.dtype])] if scale is not None and not scale.group else []
        files = (PTX, NUMBERS) if weights.bits < 16 else (PTX,)
        return KernelSource(
            kernel=self.kernel,
            unit=(__package__, "gemv.cu.jinja"),
            files=(*files, *files_of(__package__, "device", "sums", "store")),
            values=common
            | values_of(shape)
            | weights.values
            | {
                "name": shape.label(weights),
                "read_at_end": [*read_at_end, *((first + i, one) for i, one in enumerate(common["operands"]))],
                "words": words_of(weights),
                "a_stages": shape.a_stages(weights),
                "blocks_per_sm": shape.blocks_per_sm(weights),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        extra = problem.epilogue.operands if problem.epilogue else ()
        added = extra if problem.inp_read is None else (problem.inp_read, *extra)
        operands = [*map(matrix, problem.scales), *(x.expanded(problem.out.size) for x in added)]
        work = Work()
        fill_common(work, problem.out, operands)
        work.a_pitch, work.b_pitch = (x.stride[0] * x.dtype.itemsize for x in (problem.a, columns.columns_of(problem)))
        work.rows, work.cols, work.row_bytes = problem.m, problem.n, row_bytes(problem)
        work.prefetch_stages = config.prefetch_stages
        multiplied = (Address(offset=Work.a.offset, operand=A), Address(offset=Work.b.offset, operand=B))
        return self.launch(
            config,
            work,
            grid=(1, tiles_of(problem, config), 1),
            cluster=1,
            addresses=(*addresses_of(len(operands)), *multiplied),
            scalars=scalars_of(problem),
            alignment=((A, LOAD_BYTES), (B, LOAD_BYTES)),
        )


def _why_not_operands(problem: Problem) -> str | None:
    """Return the reason why rows of a or columns of b do not allow 16-byte loads, or None."""
    chunk = LOAD_BYTES * 8 // stored(problem).bits
    if problem.k % chunk:
        return f"K is {problem.k}, expected a multiple of {chunk}"
    steps = [abs(stride) for layout in problem.scales for stride in layout.stride]
    if max(row_bytes(problem), *steps, 0) >= MOST_BYTES:
        apart = f"{max(steps, default=0)} elements between scales"
        return f"a column of b has {row_bytes(problem)} bytes, with up to {apart}: expected less than {MOST_BYTES}"
    for name, layout, where in (
        ("a", problem.a, "rows"),
        ("the transpose of b", columns.columns_of(problem), "rows (columns of b)"),
    ):
        if not columns.has_aligned_rows(layout):
            strides = f"has strides {layout.stride} and offset {layout.offset}"
            return f"{name} {strides}: it is loaded in contiguous {where} that are aligned to {LOAD_BYTES} bytes"
    return None
