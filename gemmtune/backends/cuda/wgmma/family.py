"""The family of kernels for more rows times weights of four or eight bits; the model that ranks its configs.

The model's constants are those of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.record import A, Aligned, Swizzle, TensorMap
from ..family import float32_sums
from ..hopper import LINE_BYTES, MOST_BOX, SMEM_BYTES, SYSTEM_BYTES, WGMMA, WGMMA_M, clusters_at_a_time, registers_per_thread
from ..kernel import PRODUCTS, aligned_out
from ..mixed import family
from ..mixed.family import PROMOTION_BYTES, MixedFamily, pitch_bytes, steps_of, tiles_of
from ..mixed.weights import MixedConfig, Weights, weights_of

BARRIERS_BYTES = 1024
"""What barriers have room in, so that stages are aligned as swizzled lines have to be."""
MANY_SUMS = 64
"""The sums in a thread beyond which the copying warps leave it registers."""
LEFT_REGISTERS = 240
"""The registers of a thread to which others leave theirs."""
BASE_REGISTERS = 62
"""What a thread needs beside sums and what columns are scaled with and shifted by: numbers on their way, and addresses."""
K16_BATCH = 4
"""Instructions that are asked for together, unless a shape says otherwise."""
EXTRA_COLS = 4
"""Columns between rows of sums in shared memory, so that a warp stores to all of its banks."""
CHUNK_BYTES = 16
"""What a thread stores at once: elements of the result, or before an epilogue float32 sums."""
CLUSTER_SIZES = (1, 2, 3, 4)
"""The blocks of a cluster that divide K: more would add up longer than they multiply."""
LAUNCH_US = {1: 3.5, 2: 2.5}
"""The time of a launch by the blocks that have room on a multiprocessor: with two, one of the next launch begins before one of the
last has ended."""
WIDEN_NS, ROW_NS = 15.6, 0.3
"""What a product of 64 columns and 16 along K takes: once, and for each row."""
ALONE = 1.9
"""Times as long, where a multiprocessor has one group of warps: nothing is multiplied while it widens."""
DRAM_GBPS = 3800.0
"""The rate at which b and a are read, once."""
TILE_US, TILE_GBPS = 1.0, 50.0
"""What the end of a tile takes, and the rate at which each block of a cluster sends its sums."""
LEAST_ROWS = {"quick": 33, "default": 33, "exhaustive": 1}
"""The rows of a from which on it is tried: with fewer, the skinny kernels do no more than has to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tile of ``block_m`` rows of a by 64 columns of b for each of ``col_tiles`` of each of ``warp_groups``.

    A stage has ``line_bytes`` of each column. ``blocks_per_sm`` have room on a multiprocessor. ``k16_batch``: how many times 16
    along K are asked for together; 0: as many as do well.
    """

    block_m: int
    warp_groups: int
    col_tiles: int
    line_bytes: int
    stages: int
    blocks_per_sm: int = 1
    k16_batch: int = 0

    @property
    def block_n(self) -> int:
        """The columns of b in a tile."""
        return WGMMA_M * self.warp_groups * self.col_tiles

    @property
    def sums(self) -> int:
        """The accumulators of a thread."""
        return self.col_tiles * self.block_m // 2

    @property
    def gives_registers(self) -> bool:
        """Registers are taken from the warps that copy."""
        return self.sums > MANY_SUMS

    @property
    def threads(self) -> int:
        """The threads of a block: those that multiply, and a warp that copies, or four whose registers the others get."""
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    def block_k(self, weights: Weights) -> int:
        """Elements of K in a stage."""
        return weights.block_k(self.line_bytes)

    def k16_batch_of(self, weights: Weights) -> int:
        """Times 16 along K that are asked for together: at most half a stage, since two batches take turns."""
        return self.k16_batch or max(1, min(self.block_k(weights) // 32, K16_BATCH // self.col_tiles))

    @property
    def room_bytes(self) -> int:
        """The shared memory that a block can have."""
        return (SMEM_BYTES + SYSTEM_BYTES) // self.blocks_per_sm - SYSTEM_BYTES

    def received_bytes(self, cluster_k: int) -> int:
        """The sums that a block is sent by the others of its cluster."""
        return (cluster_k - 1) * self._finished_rows(cluster_k) * self.block_n * 4

    def receives_beside(self, weights: Weights, cluster_k: int) -> bool:
        """What others send has a place of its own beside the stages, rather than in their place."""
        beside = BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + self.received_bytes(cluster_k)
        return beside <= self.room_bytes

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:
        """The shared memory of a block: barriers; stages, or in their place what it finishes of a tile; and what others send."""
        received = self.received_bytes(cluster_k)
        if self.receives_beside(weights, cluster_k):
            return BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + received
        return BARRIERS_BYTES + max(self._stages_bytes(weights), self._finished_bytes(cluster_k) + received)

    def _finished_rows(self, cluster_k: int) -> int:
        """The rows of a tile that each block of the cluster finishes."""
        return 8 * -(-self.block_m // 8 // cluster_k)

    def _stages_bytes(self, weights: Weights) -> int:
        return self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)

    def _finished_bytes(self, cluster_k: int) -> int:
        return self._finished_rows(cluster_k) * (self.block_n + EXTRA_COLS) * 4

    def _tile_bytes(self, weights: Weights, cluster_k: int) -> int:
        return max(self._stages_bytes(weights), self._finished_bytes(cluster_k))

    def registers(self, weights: Weights) -> int:
        """About what a thread that multiplies needs."""
        return BASE_REGISTERS + self.sums + 2 * self.col_tiles * len(weights.factors)

    @property
    def most_registers(self) -> int:
        """What such a thread can have."""
        return LEFT_REGISTERS if self.gives_registers else registers_per_thread(self.threads, self.blocks_per_sm)

    def label(self, weights: Weights) -> str:
        """A name such as ``256x128x64_s5_w2t1b2``: rows, columns, K of a stage, stages, warp groups, tiles of each, batch."""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k(weights)}"
        more = f"_r{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        return f"{tile}_s{self.stages}_w{self.warp_groups}t{self.col_tiles}b{self.k16_batch_of(weights)}{more}"


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (
        Shape(block_m=64, warp_groups=1, col_tiles=1, line_bytes=128, stages=4, blocks_per_sm=2),
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=96, warp_groups=2, col_tiles=1, line_bytes=128, stages=5),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=128, stages=4),
        Shape(block_m=256, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
    ),
    4: (
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
        Shape(block_m=128, warp_groups=2, col_tiles=2, line_bytes=64, stages=4),
        Shape(block_m=192, warp_groups=2, col_tiles=1, line_bytes=64, stages=3),
    ),
}
"""The shapes by the bits of a weight: few rows, for two blocks on a multiprocessor or one, to the largest tile with room in
registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """A shape of this kernel, and what a launch is told."""

    shape: Shape


class Work(family.Work):
    """``whole_chunks``: what a thread stores at once is neighbours in a row of the result, and aligned.

    ``sums_beside``: the sums of other blocks have a place beside the stages.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("whole_chunks", ctypes.c_bool), ("sums_beside", ctypes.c_bool))


class Wgmma(MixedFamily[Config]):
    """The family of ``wgmma.cu.jinja``."""

    name = "wgmma"
    likely = 1.25
    instruction = WGMMA
    package = __package__
    work = Work
    files = (PRODUCTS, (__package__, "numbers.cuh.jinja"))

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - of all
        least = LEAST_ROWS[search]
        return f"a has {problem.m} rows, tried from {least} on" if problem.m < least else None

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        reason = super().why_not_config(problem, device, config)
        if reason is not None:
            return reason
        shape, weights = config.shape, weights_of(problem)
        shared_bytes = shape.shared_bytes(weights, config.cluster_k)
        if shape.blocks_per_sm * (shared_bytes + SYSTEM_BYTES) > device.smem_per_block_bytes + SYSTEM_BYTES:
            return f"takes {shared_bytes} bytes of shared memory, too many for {shape.blocks_per_sm} blocks on a multiprocessor"
        if shape.block_n > MOST_BOX:
            return f"a tile has {shape.block_n} columns, at most {MOST_BOX} are copied at once"
        block_k = shape.block_k(weights)
        if block_k % 64 or block_k // 16 // shape.k16_batch_of(weights) % 2:
            return f"a stage has {block_k} of K, which is no even number of batches of lines"
        if shape.k16_batch_of(weights) % (8 // weights.bits):
            return f"a batch has {16 * shape.k16_batch_of(weights)} of K, less than the 16 bytes that are read at once"
        if shape.gives_registers and (shape.warp_groups != 2 or shape.blocks_per_sm > 1):
            return "registers are left by one group of warps to two others alone"
        needed, most = shape.registers(weights), shape.most_registers
        return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        """What a multiprocessor multiplies and reads."""
        shape, blocks = config.shape, config.cluster_k
        rows, cols = tiles_of(problem, config)
        at_a_time = clusters_at_a_time(device.sm_count, blocks)
        each = -(-rows * cols // at_a_time)  # blocks of one multiprocessor, one after the other or beside each other
        products = (
            -(-steps_of(problem, config) // blocks) * shape.block_k(weights_of(problem)) // 16 * shape.warp_groups * shape.col_tiles
        )
        multiplying_us = products * (WIDEN_NS + ROW_NS * shape.block_m) / 1e3
        if shape.warp_groups * min(each, shape.blocks_per_sm) == 1:
            multiplying_us *= ALONE
        sent = shape.block_m * shape.block_n * 4 * (blocks - 1) / blocks
        ending_us = TILE_US + (TILE_US + sent / TILE_GBPS / 1e3 if blocks > 1 else 0.0)
        return LAUNCH_US[shape.blocks_per_sm] + max(each * (multiplying_us + ending_us), problem.bytes / DRAM_GBPS / 1e3)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Every shape with every number of blocks, best first."""
        shapes = SHAPES[weights_of(problem).bits]
        told = [(shape, size) for shape in shapes for size in CLUSTER_SIZES]
        found = [Config(shape=shape, cluster_k=size, pdl=True, prefetch_stages=shape.stages) for shape, size in told]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def near_sizes(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterable[int]:  # noqa: ARG002 - the same for all
        """One block more or less divides K."""
        return (size for size in CLUSTER_SIZES if abs(size - config.cluster_k) == 1)

    def splits(self, config: Config) -> int:
        return config.cluster_k

    def claims(self, problem: Problem, config: Config) -> Claims:
        """Weights are rounded to a's dtype when zero points are subtracted, and when scales change along K."""
        weights = weights_of(problem)
        rounds = weights.zero is not None or any(factor.group for factor in weights.factors.values())
        return float32_sums(splits=config.cluster_k, weights=problem.dtype if rounds else None)

    def values(self, weights: Weights, shape: Shape) -> dict[str, Any]:
        return {
            "k16_batch": shape.k16_batch_of(weights),
            "room_bytes": shape.room_bytes,
            "shared_bytes": [shape.shared_bytes(weights, cluster_k) for cluster_k in CLUSTER_SIZES],
            "scaled": weights.scale is not None and not weights.scale.group,
        }

    def tell(self, work: Work, problem: Problem, config: Config) -> tuple[Aligned, ...]:
        staged_bytes = problem.out.dtype.itemsize if problem.epilogue is None else torch.float32.itemsize
        work.whole_chunks, aligned = aligned_out(Work.whole_chunks, problem.out, CHUNK_BYTES // staged_bytes)
        work.sums_beside = config.shape.receives_beside(weights_of(problem), config.cluster_k)
        return aligned

    def map_of_a(self, problem: Problem, config: Config) -> TensorMap:
        """Rows as lines."""
        return TensorMap(
            operand=A,
            dtype=problem.dtype,
            sizes=(problem.k, problem.m),
            pitches=(pitch_bytes(problem.a),),
            box=(LINE_BYTES // 2, config.shape.block_m),
            swizzle=Swizzle.BYTES_128,
            promotion_bytes=PROMOTION_BYTES,
        )

    def grid(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        return config.cluster_k, *tiles_of(problem, config)
