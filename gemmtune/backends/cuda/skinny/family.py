"""Family of kernels for few rows times 4-bit or 8-bit weights, and its time model with an H200's rates."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....toolchain.record import A, Aligned, TensorMap
from ..family import float32_sums
from ..hopper import BARRIER_BYTES, HALF_SMEM_BYTES, IDLE_CLUSTERS, LINE_BYTES, MMA, clusters_at_a_time, registers_per_thread
from ..kernel import aligned_out
from ..mixed import family
from ..mixed.family import NUMBERS, PROMOTION_BYTES, MixedFamily, pitch_bytes, steps_of, tiles_of
from ..mixed.weights import MixedConfig, Weights, weights_of

BASE_REGISTERS = 64
"""Registers of a thread in addition to its sums: numbers in flight, and addresses."""
EXTRA_COLS = 4
"""Padding between rows of sums in shared memory. It spreads a warp's stores over all banks."""
MOST_ROWS = 32
"""Maximum rows of a. With more, instructions per weight take longer than memory does."""
NEAR_SIZES = 3
"""Number of cluster sizes that launch variants try, the likeliest."""
LAUNCH_US = {1: 3.5, 2: 2.5}
"""Launch overhead by the blocks per multiprocessor. With two, a block of the next launch starts before the last one ends."""
DRAM_GBPS = 4300.0
L2_GBPS = 5500.0
"""Bandwidth from L2 to all multiprocessors. b is read once, and a once for each tile."""
HALF_RATE_BYTES = 2 * 2**20
"""Bytes in flight on all multiprocessors that reach half of either bandwidth."""
FILLED = 0.9
"""Share of the multiprocessors that saturates memory."""
EXCHANGE_US = 0.3
"""Time that each block of a cluster after the first adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` by ``block_n``, with 128 bytes per column and stage. ``warps_n`` divide columns, ``warps_k`` K."""

    block_m: int
    block_n: int
    stages: int
    warps_n: int
    warps_k: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps_n * self.warps_k + 1)

    @property
    def col_tiles(self) -> int:
        """Products of 16 columns that a warp computes side by side."""
        return self.block_n // 16 // self.warps_n

    @property
    def sums(self) -> int:
        return self.col_tiles * self.block_m // 2

    @property
    def line_bytes(self) -> int:
        return LINE_BYTES

    def block_k(self, weights: Weights) -> int:
        """Return the elements of K in a stage."""
        return weights.block_k()

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:
        """Return the shared memory of a block: stages, or sums that reuse their space, barriers, and received sums."""
        sums_bytes = self.warps_k * self.block_m * (self.block_n + EXTRA_COLS) * 4
        received_bytes = self.block_m * self.block_n * 4 + 128 if cluster_k > 1 else 0
        return (
            max(self.stages * weights.stage_bytes(self.block_m, self.block_n), sums_bytes)
            + 2 * BARRIER_BYTES * (self.stages + 1)
            + received_bytes
        )

    def registers(self, weights: Weights) -> int:
        """Estimate a thread's registers: sums, partial sums if the scale changes along K, and numbers in flight."""
        scaled = weights.scale is not None and weights.scale.group > 0
        return BASE_REGISTERS + self.sums * (2 if scaled else 1)

    def blocks_per_sm(self, weights: Weights) -> int:
        """Return the blocks per multiprocessor. With two, a block of the next launch can start while one of the last ends."""
        fits = self.shared_bytes(weights) <= HALF_SMEM_BYTES and self.registers(weights) <= registers_per_thread(self.threads, 2)
        return 2 if fits else 1

    def label(self, weights: Weights) -> str:
        """Return a name such as ``16x128x256_s4_w2x4``: block_m, block_n, block_k, stages, warps_n, warps_k."""
        return f"{self.block_m}x{self.block_n}x{weights.block_k()}_s{self.stages}_w{self.warps_n}x{self.warps_k}"


SHAPES: tuple[Shape, ...] = tuple(
    Shape(block_m=block_m, block_n=block_n, stages=stages, warps_n=warps_n, warps_k=warps_k)
    for block_m, block_n, stages, warps_n, warps_k in (
        (8, 128, 4, 4, 2),
        (8, 128, 8, 2, 4),
        (8, 64, 8, 2, 4),
        (8, 256, 3, 4, 2),
        (16, 128, 4, 2, 2),
        (16, 128, 8, 2, 4),
        (16, 64, 8, 2, 4),
        (16, 256, 3, 4, 2),
        (32, 128, 4, 2, 2),
        (32, 128, 6, 4, 2),
        (32, 64, 4, 2, 4),
        (32, 256, 4, 8, 1),
    )
)
"""Shapes for up to 8, 16 and 32 rows: two blocks per multiprocessor, or more stages; few wide tiles, or many narrow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape of this kernel plus launch parameters."""

    shape: Shape


class Work(family.Work):
    """Parameters of the skinny kernel. ``paired``: neighbours in a result row can be stored as pairs."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("paired", ctypes.c_bool),)


class Skinny(MixedFamily[Config]):
    """Family of ``skinny.cu.jinja``."""

    name = "skinny"
    likely = 1.35
    instruction = MMA
    package = __package__
    work = Work
    files = (NUMBERS,)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = super().why_not(problem, device)
        if reason is None and problem.m > MOST_ROWS:
            return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
        return reason

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        shape, weights = config.shape, weights_of(problem)
        if problem.m > shape.block_m:
            return f"a has {problem.m} rows, the kernel takes at most {shape.block_m}"
        if (reason := super().why_not_config(problem, device, config)) is not None:
            return reason
        needed, most = shape.registers(weights), registers_per_thread(shape.threads, shape.blocks_per_sm(weights))
        return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None

    def cluster_sizes(self, shape: Shape, problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
        """Return the cluster sizes that can divide K, the likeliest first."""
        configs = [Config(shape=shape, cluster_k=size) for size in IDLE_CLUSTERS]
        legal = [config for config in configs if config.cluster_k <= steps_of(problem, config)]
        return tuple(config.cluster_k for config in sorted(legal, key=lambda config: self.estimate_us(problem, device, config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        shape, blocks, weights, tiles = config.shape, config.cluster_k, weights_of(problem), tiles_of(problem, config)[1]
        stage_bytes, resident = weights.stage_bytes(shape.block_m, shape.block_n), shape.blocks_per_sm(weights)
        at_a_time = clusters_at_a_time(device.sm_count, blocks)
        each = -(-tiles // at_a_time)  # maximum clusters that have a block on one multiprocessor
        busy = tiles * blocks / each  # busy multiprocessors, averaged over time
        on_their_way = busy * min(each, resident) * shape.stages * stage_bytes
        rate = on_their_way / (on_their_way + HALF_RATE_BYTES) * min(1.0, busy / (FILLED * device.sm_count))
        copied = tiles * steps_of(problem, config) * stage_bytes
        reading_us = max(copied / L2_GBPS, problem.bytes / DRAM_GBPS) / rate / 1e3
        return LAUNCH_US[resident] + reading_us + EXCHANGE_US * (blocks - 1)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return every shape with the fewest sufficient rows, with every cluster size, best first. Early blocks prefetch to L2."""
        block_m = min((shape.block_m for shape in SHAPES if shape.block_m >= problem.m), default=0)
        found = []
        for shape in SHAPES:
            begins_early = shape.blocks_per_sm(weights_of(problem)) > 1
            for blocks in self.cluster_sizes(shape, problem, device) if shape.block_m == block_m else ():
                interleaved = blocks == 2 and begins_early
                prefetch = shape.stages if begins_early else 0
                found.append(Config(shape=shape, cluster_k=blocks, interleaved_k=interleaved, pdl=True, prefetch_stages=prefetch))
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def near_sizes(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterable[int]:
        return self.cluster_sizes(config.shape, problem, device)[:NEAR_SIZES]

    def splits(self, config: Config) -> int:
        return config.cluster_k * config.shape.warps_k

    def claims(self, problem: Problem, config: Config) -> Claims:
        """Return the claims. Weights are rounded to a's dtype if zero points are subtracted; scales multiply sums."""
        return float32_sums(splits=self.splits(config), weights=problem.dtype if weights_of(problem).zero else None)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return sums of warps and blocks, added in rising order. Words of weights deal K to threads in an order of their own."""
        shape, how = config.shape, "interleaved" if config.interleaved_k else "consecutive"
        order = f"{config.cluster_k} {how} blocks of {shape.warps_k} warps, {shape.block_k(weights_of(problem))} a stage"
        return reduction_of(problem, "cuda", order=order, own="cuda skinny")

    def values(self, weights: Weights, shape: Shape) -> dict[str, Any]:
        shared_bytes = [shape.shared_bytes(weights, cluster_k) for cluster_k in (1, 2)]
        return {"blocks_per_sm": shape.blocks_per_sm(weights), "shared_bytes": shared_bytes}

    def tell(self, work: Work, problem: Problem, config: Config) -> tuple[Aligned, ...]:  # noqa: ARG002 - problem decides
        work.paired, aligned = aligned_out(Work.paired, problem.out, 2)
        return aligned

    def map_of_a(self, problem: Problem, config: Config) -> TensorMap:
        """Return the map of a in chunks. A box holds all rows of one chunk, then those of the next."""
        weights = weights_of(problem)
        chunk = weights.chunk
        return TensorMap(
            operand=A,
            dtype=problem.dtype,
            sizes=(chunk, problem.m, problem.k // chunk),
            pitches=(pitch_bytes(problem.a), chunk * 2),
            box=(chunk, config.shape.block_m, weights.block_k() // chunk),
            promotion_bytes=PROMOTION_BYTES,
        )

    def grid(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        return config.cluster_k, tiles_of(problem, config)[1], 1
