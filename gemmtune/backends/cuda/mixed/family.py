"""Base class of the mixed_mm families: supported problems, source and launches."""

import ctypes
import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.dtypes import dtype_name
from ....toolchain.record import Aligned, B, Record, Swizzle, TensorMap, operand_at
from ....toolchain.structs import strides_of
from .. import columns, kernel
from ..family import beginnings, why_not_epilogue, why_not_here
from ..groups import why_not_counted
from ..hopper import LINE_BYTES, MOST_CLUSTER, MOST_GRID, TMA_BYTES
from ..kernel import KernelSource, common_values, files_of, work_of
from .weights import MixedConfig, Weights, weights_of

PROMOTION_BYTES = 256
"""Sector promotion: bytes that L2 fetches from memory on a miss."""
PTX, NUMBERS = files_of(__package__, "ptx", "numbers")
"""Parts for warp products: PTX of all mixed kernels, and weights as pairs of a's type."""
PARTS = files_of(__package__, "ptx", "work", "copies")
"""Parts of every mixed kernel: its PTX, tensor maps and division of K, and the copying thread."""

C = TypeVar("C", bound=MixedConfig)


class Work(kernel.Work):
    """Problem sizes, and the division of K among blocks."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("steps", ctypes.c_int), ("cluster_k", ctypes.c_int),
        ("prefetch_stages", ctypes.c_int), ("interleaved_k", ctypes.c_int),
    )  # fmt: skip


class MixedFamily(columns.ColumnsFamily[C]):
    """Mixed_mm family. Its shapes have ``block_m``, ``block_n``, ``block_k(weights)``, ``line_bytes`` and ``stages``."""

    legal_between = True
    operations: tuple[str, ...] = ("mixed_mm",)
    work: type[Work]
    """Type of the launch parameters."""
    files: tuple[tuple[str, str], ...] = ()
    """Source parts in addition to those of all families."""

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if problem.op not in self.operations:
            return f"{problem.op} is not an operation of this kernel, which has {' and '.join(self.operations)}"
        if problem.b.dtype not in (torch.int8, torch.uint8):
            return f"b is {dtype_name(problem.b.dtype)}, expected integers"
        return why_not_here(problem, device) or _why_not_operands(problem) or why_not_epilogue(problem)

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: C) -> str | None:
        if (reason := device.why_no_smem(config.shape.shared_bytes(weights_of(problem), config.cluster_k))) is not None:
            return reason
        if config.cluster_k > MOST_CLUSTER:
            return f"{config.cluster_k} blocks in a cluster, at most {MOST_CLUSTER} are allowed"
        steps, (rows, cols) = steps_of(problem, config), tiles_of(problem, config)
        if config.cluster_k > steps:
            return f"K has {steps} steps, too few for {config.cluster_k} blocks"
        if problem.groups:
            return why_not_counted(problem, config.shape.block_m, config.cluster_k * cols)
        if max(rows, cols) > MOST_GRID:
            return f"{rows} by {cols} tiles, at most {MOST_GRID} fit a dimension of a grid"
        return None

    def label(self, problem: Problem, config: C) -> str:
        return config.label(weights_of(problem))

    @abstractmethod
    def near_sizes(self, problem: Problem, device: DeviceInfo, config: C) -> Iterable[int]:
        """Return other cluster sizes to try."""

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: C) -> Iterator[C]:
        yield from beginnings(config, config.shape.stages)
        if config.cluster_k > 1:
            yield dataclasses.replace(config, interleaved_k=not config.interleaved_k)
        for size in self.near_sizes(problem, device, config):
            if size != config.cluster_k:
                yield dataclasses.replace(config, cluster_k=size)

    def info(self, problem: Problem, config: C) -> dict[str, Any]:
        shape = config.shape
        tile = (shape.block_m, shape.block_n, shape.block_k(weights_of(problem)))
        return self.facts(config, tile, cluster=config.cluster, splits=self.claims(problem, config).splits)

    @abstractmethod
    def values(self, weights: Weights, shape: Any) -> dict[str, Any]:
        """Return the template values in addition to the shape's fields and the common values."""

    def source(self, problem: Problem, config: C) -> KernelSource:
        shape, weights = config.shape, weights_of(problem)
        return self.made(
            files=(*self.files, *PARTS, *files_of(self.package, "device", "sums", "store")),
            values=common_values(problem, self.work)
            | {
                "family": self.name,
                "cluster_n": 1,
                "grouped": problem.groups > 0,
                "line_bytes": shape.line_bytes,
                "name": f"i{weights.bits}_{shape.label(weights)}",
                "threads": shape.threads,
                "direct": problem.epilogue is None and problem.out.dtype != torch.float32,
            }
            | dataclasses.asdict(shape)
            | weights.values
            | self.values(weights, shape),
        )

    @abstractmethod
    def tell(self, work: Any, problem: Problem, config: C) -> tuple[Aligned, ...]:
        """Fill in the family's own fields of ``work``. Return the alignment that these need of the result's address."""

    @abstractmethod
    def map_of_a(self, problem: Problem, config: C) -> TensorMap:
        """Return the map that copies a into a stage."""

    @abstractmethod
    def grid(self, problem: Problem, config: C) -> tuple[int, int, int]:
        """Return the launch grid."""

    def _maps(self, problem: Problem, config: C, operands: Sequence[Layout]) -> list[TensorMap]:
        """Return the maps of a, b and the factors that change along K. ``operands``: those in addition to a and b, as matrices."""
        shape, weights = config.shape, weights_of(problem)
        of_b = TensorMap(
            operand=B,
            dtype=torch.uint8,
            sizes=(problem.k * weights.bits // 8, problem.n),
            pitches=(pitch_bytes(columns.columns_of(problem)),),
            box=(shape.line_bytes, shape.block_n),
            swizzle=Swizzle.BYTES_128 if shape.line_bytes == LINE_BYTES else Swizzle.BYTES_64,
            promotion_bytes=PROMOTION_BYTES,
        )
        maps = [self.map_of_a(problem, config), _of_groups(of_b, columns.columns_of(problem))]
        # A box holds the scales or zero points of one stage, with one row per group along K.
        for i, (factor, layout) in enumerate(zip(weights.factors.values(), operands, strict=False)):
            if factor.group:
                one = TensorMap(
                    operand=operand_at(i),
                    dtype=factor.dtype,
                    sizes=(problem.n, -(-problem.k // factor.group)),
                    pitches=(layout.stride[-2] * factor.dtype.itemsize,),
                    box=(shape.block_n, max(shape.block_k(weights) // factor.group, 1)),
                    promotion_bytes=PROMOTION_BYTES,
                )
                maps.append(_of_groups(one, layout))
        return maps

    def record(self, problem: Problem, config: C) -> Record:
        operands = [matrix(x) for x in problem.scales]
        operands += [problem.offs] if problem.offs is not None else []
        operands += [x.expanded(problem.out.size) for x in (problem.epilogue.operands if problem.epilogue else ())]
        work = work_of(self.work, problem.out, operands)
        work.rows, work.cols, work.steps = problem.m, problem.n, steps_of(problem, config)
        work.cluster_k, work.interleaved_k, work.prefetch_stages = config.cluster_k, config.interleaved_k, config.prefetch_stages
        aligned = self.tell(work, problem, config)
        maps = self._maps(problem, config, operands)
        return self.launch(
            problem,
            config,
            work,
            maps,
            grid=self.grid(problem, config),
            cluster=config.cluster,
            shared_bytes=config.shape.shared_bytes(weights_of(problem), config.cluster_k),
            aligned=aligned,
            alignment=tuple((one.operand, TMA_BYTES) for one in maps),
        )


def tiles_of(problem: Problem, config: MixedConfig) -> tuple[int, int]:
    return -(-problem.m // config.shape.block_m), -(-problem.n // config.shape.block_n)


def steps_of(problem: Problem, config: MixedConfig) -> int:
    """Return the number of K steps. Each fills one stage."""
    block_k: int = config.shape.block_k(weights_of(problem))
    return -(-problem.k // block_k)


def pitch_bytes(layout: Layout) -> int:
    """Return the bytes between lines, or an aligned pitch if there is a single line."""
    stride = layout.stride[-2] if layout.size[-2] > 1 else -(-layout.size[-1] // TMA_BYTES) * TMA_BYTES
    return stride * layout.dtype.itemsize


def map_of_lines(operand: int, layout: Layout, lines: int) -> TensorMap:
    """Return the map of a 16-bit operand [lines, K] in boxes of swizzled lines."""
    return TensorMap(
        operand=operand,
        dtype=layout.dtype,
        sizes=layout.size[::-1],
        pitches=(pitch_bytes(layout),),
        box=(LINE_BYTES // 2, lines),
        swizzle=Swizzle.BYTES_128,
        promotion_bytes=PROMOTION_BYTES,
    )


def _why_not_operands(problem: Problem) -> str | None:
    """Return the reason why an operand cannot be copied directly, or None."""
    weights = weights_of(problem)
    if problem.k % weights.chunk:
        return f"K is {problem.k}, expected a multiple of {weights.chunk}"
    copied = [("a", problem.a, "rows"), ("the transpose of b", columns.columns_of(problem), "rows (columns of b)")]
    for (name, factor), layout in zip(weights.factors.items(), problem.scales, strict=True):
        if factor.group:
            copied.append((f"{name}_b", layout, "rows"))
    for name, layout, where in copied:
        overlap = layout.size[-2] > 1 and layout.stride[-2] < layout.size[-1]
        if overlap or not columns.has_aligned_rows(layout):
            strides = f"has strides {layout.stride} and offset {layout.offset}"
            return f"{name} {strides}: TMA copies contiguous {where} that are aligned to {TMA_BYTES} bytes"
    return None


def _of_groups(matrix: TensorMap, layout: Layout) -> TensorMap:
    """Return the map of one matrix, extended by a group dimension if the layout has one."""
    if len(layout.size) == 2:
        return matrix
    pitch = strides_of(layout).batch * layout.dtype.itemsize or matrix.pitches[0] * matrix.sizes[1]
    return dataclasses.replace(
        matrix, sizes=(*matrix.sizes, layout.size[0]), pitches=(*matrix.pitches, pitch), box=(*matrix.box, 1)
    )


def matrix(layout: Layout) -> Layout:
    """Return scales as one matrix or one per group. A single number or row broadcasts."""
    size = (1,) * (2 - len(layout.size)) + layout.size
    stride = (0,) * (2 - len(layout.stride)) + layout.stride if layout.numel != 1 else (0,) * len(size)
    return Layout(size=size, stride=stride, dtype=layout.dtype, offset=layout.offset)
