"""Family of wgmma kernels for many rows times 4-bit or 8-bit weights, and its time model.

The constants are fitted to the times of 3,600 choices for 22 weights on H100s, which they give within a tenth.
"""

import ctypes
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, even_parts, numbers_of_weights, reduction_of
from ....problem import Problem
from ....toolchain.record import A, Aligned, TensorMap
from .. import groups
from ..family import float32_sums
from ..hopper import MOST_BOX, SYSTEM_BYTES, WGMMA, clusters_at_a_time
from ..kernel import PRODUCTS, TILES, KernelSource, aligned_out
from ..mixed import family
from ..mixed.family import MixedFamily, map_of_lines, steps_of, tiles_of
from ..mixed.weights import Weights, weights_of
from .configs import CHUNK_BYTES, CLUSTER_SIZES, SHAPES, SHAPES_FOR_GROUPS, Config, Shape

LAUNCH_US = {1: 1.0, 2: 0.5}
"""Launch overhead by the blocks per multiprocessor. The second begins before the last one of the previous launch ends."""
WIDEN_NS, ROW_NS = {8: 23.4, 4: 18.0}, 0.26
"""Time of a product of 64 columns and 16 along K: a constant by the bits of a weight, and a part per row."""
ALONE = 1.4
"""Slowdown with a single warp group on a multiprocessor: nothing multiplies while it widens weights."""
THREE_GROUPS = 0.93
"""Time of a product with three warp groups, of which two multiply while one widens, over that with two."""
DRAM_GBPS = 2600.0
"""Bandwidth at which b and a are read, once."""
TILE_US, TILE_GBPS = 0.9, 21.7
"""Time of a tile's end, and the rate at which each block of a cluster sends its sums."""
MANY_ROWS = 64
"""Rows of the smallest shape that serves any number of rows."""
LEAST_ROWS, LEAST_ROWS_OF_GROUP = 9, 33
"""Minimum rows of a, and mean rows of a group, that a search tries. With fewer the skinny kernels do no unneeded work.

With 16 and 32 rows of a an H100 takes up to 23% less time here. Groups of so few rows were not measured.
"""


class Work(family.Work):
    """Parameters of the wgmma kernel.

    ``whole_chunks``: a chunk that a thread stores is contiguous in the result, and aligned. ``sums_beside``: received sums have
    space of their own next to the stages. There are ``tiles_n`` tiles along N. A group of ``groups`` processes ``strip`` rows of
    tiles column by column.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("groups", ctypes.c_int), ("tiles_n", ctypes.c_int), ("strip", ctypes.c_int),
        ("whole_chunks", ctypes.c_bool), ("sums_beside", ctypes.c_bool),
    )  # fmt: skip


class Wgmma(MixedFamily[Config]):
    """Family of ``wgmma.cu.jinja``."""

    name = "wgmma"
    likely = 1.25
    instruction = WGMMA
    operations = ("mixed_mm", "mixed_grouped_mm")
    package = __package__
    work = Work
    files = (PRODUCTS, (__package__, "numbers.cuh.jinja"))

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - device-independent
        if search == "exhaustive":
            return None
        least, rows = LEAST_ROWS_OF_GROUP if problem.groups else LEAST_ROWS, _rows_of(problem)
        what = "a group has, on the mean," if problem.groups else "a has"
        return f"{what} {rows} rows, tried from {least} on" if rows < least else None

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = super().why_not(problem, device)
        return reason or (groups.why_not_placed(problem) if problem.groups else None)

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        if (reason := super().why_not_config(problem, device, config)) is not None:
            return reason
        shape, weights = config.shape, weights_of(problem)
        if problem.groups and config.prefetch_stages:
            return f"prefetch_stages is {config.prefetch_stages}, expected 0: the previous launch may write the group offsets"
        if shape.cluster_n > 1 and (config.cluster_k > 1 or problem.groups or tiles_of(problem, config)[1] < shape.cluster_n):
            return (
                f"{shape.cluster_n} tiles side by side share rows of a: expected cluster_k 1, no groups, and as many tiles along N"
            )
        shared_bytes = shape.shared_bytes(weights, config.cluster_k)
        if shape.blocks_per_sm * (shared_bytes + SYSTEM_BYTES) > device.smem_per_block_bytes + SYSTEM_BYTES:
            return f"takes {shared_bytes} bytes of shared memory, too many for {shape.blocks_per_sm} blocks on a multiprocessor"
        if shape.gives_registers and (shape.warp_groups != 2 or shape.blocks_per_sm > 1):
            return f"{shape.warp_groups} warp groups of {shape.blocks_per_sm} blocks would get registers, expected 2 of 1"
        return why_not_shape(shape, weights)

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        shape, blocks = config.shape, config.cluster_k
        rows, cols = tiles_of(problem, config)
        below = groups.tiles_below(problem, shape.block_m) if problem.groups else rows
        at_a_time = clusters_at_a_time(device.sm_count, blocks)
        each = math.ceil(below * cols / at_a_time)  # blocks of one multiprocessor, in sequence or concurrently
        weights = weights_of(problem)
        multiplying_us = -(-steps_of(problem, config) // blocks) * step_us(weights, shape)
        if shape.warp_groups * min(each, shape.blocks_per_sm) == 1:
            multiplying_us *= ALONE
        sent = shape.block_m * shape.block_n * 4 * (blocks - 1) / blocks
        ending_us = TILE_US + (TILE_US + sent / TILE_GBPS / 1e3 if blocks > 1 else 0.0)
        return LAUNCH_US[shape.blocks_per_sm] + max(each * (multiplying_us + ending_us), problem.bytes / DRAM_GBPS / 1e3)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return the shapes with every cluster size, best first. Those of few rows serve one tile of them."""
        shapes = (SHAPES_FOR_GROUPS if problem.groups else SHAPES)[weights_of(problem).bits]
        found = [
            Config(shape=shape, cluster_k=size, pdl=True, prefetch_stages=0 if problem.groups else shape.stages)
            for shape in shapes
            if _rows_of(problem) <= shape.block_m or shape.block_m >= MANY_ROWS
            for size in (CLUSTER_SIZES if shape.cluster_n == 1 else CLUSTER_SIZES[:1])
        ]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def near_sizes(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterable[int]:  # noqa: ARG002 - config decides
        """Return the cluster sizes with one block more or less, and none for tiles side by side."""
        sizes = CLUSTER_SIZES if config.shape.cluster_n == 1 else ()
        return (size for size in sizes if abs(size - config.cluster_k) == 1)

    def claims(self, problem: Problem, config: Config) -> Claims:
        return claims_of(problem, config.cluster_k)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return the parts of K, one for each block of a cluster."""
        if not self.batch_invariant(problem, config):
            return None
        block_k = config.shape.block_k(weights_of(problem))
        order = f"interleaved by {block_k}" if config.interleaved_k and config.cluster_k > 1 else ""
        return reduction_in(problem, even_parts(problem.k, block_k, config.cluster_k), order)

    def batch_invariant(self, problem: Problem, config: Config) -> bool:
        """Return False if each of several blocks finishes some rows, beginning with its own sums. Two sums commute."""
        return config.cluster_k <= 2 and not problem.divides_terms

    def source(self, problem: Problem, config: Config) -> KernelSource:
        made = super().source(problem, config)
        return dataclasses.replace(made, files=(*made.files, TILES)) if problem.groups else made

    def values(self, weights: Weights, shape: Shape) -> dict[str, Any]:
        return {
            "k16_batch": shape.k16_batch_of(weights),
            "room_bytes": shape.room_bytes,
            "shared_bytes": [shape.shared_bytes(weights, cluster_k) for cluster_k in CLUSTER_SIZES],
            "terms": False,
            "scaled": weights.scale is not None and not weights.scale.group,
        }

    def tell(self, work: Work, problem: Problem, config: Config) -> tuple[Aligned, ...]:
        staged_bytes = problem.out.dtype.itemsize if problem.epilogue is None else torch.float32.itemsize
        work.whole_chunks, aligned = aligned_out(Work.whole_chunks, problem.out, CHUNK_BYTES // staged_bytes)
        work.sums_beside = config.shape.receives_apart(weights_of(problem), config.cluster_k)
        work.groups, work.tiles_n = problem.groups, tiles_of(problem, config)[1]
        work.strip = groups.strip_of_rows(config.shape.block_m)
        return aligned

    def map_of_a(self, problem: Problem, config: Config) -> TensorMap:
        return map_of_lines(A, problem.a, config.shape.block_m // config.shape.cluster_n)

    def grid(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        """Return one cluster per tile. With groups, each cluster finds its tile, and the grid covers the maximum tile count."""
        rows, cols = tiles_of(problem, config)
        if problem.groups:
            return config.cluster_k * groups.most_below(problem, config.shape.block_m) * cols, 1, 1
        return config.cluster, rows, -(-cols // config.shape.cluster_n)


def _rows_of(problem: Problem) -> int:
    """Return the rows of a, or the mean of a group."""
    return -(-problem.m // max(1, problem.groups))


def step_us(weights: Weights, shape: Shape) -> float:
    """Return the time of a stage's products while all multiprocessors are busy."""
    products = shape.block_k(weights) // 16 * shape.warp_groups * shape.col_tiles
    overlap = THREE_GROUPS if shape.warp_groups == 3 else 1.0
    return products * overlap * (WIDEN_NS[weights.bits] + ROW_NS * shape.block_m) / 1e3


def why_not_shape(shape: Shape, weights: Weights) -> str | None:
    """Return the reason why the products of a tile break a limit of copies, batches or registers, or None."""
    if shape.block_n > MOST_BOX:
        return f"a tile has {shape.block_n} columns, at most {MOST_BOX} are copied at once"
    block_k = shape.block_k(weights)
    if block_k % 64 or block_k // 16 // shape.k16_batch_of(weights) % 2:
        return f"a stage has {block_k} elements of K, expected an even number of batches of {16 * shape.k16_batch_of(weights)}"
    if shape.k16_batch_of(weights) % (8 // weights.bits):
        return f"a batch has {16 * shape.k16_batch_of(weights)} of K, less than the 16 bytes that are read at once"
    needed, most = shape.registers(weights), shape.most_registers
    return f"needs about {needed} registers for each thread, {most} are left" if needed > most else None


def claims_of(problem: Problem, splits: int) -> Claims:
    """Return the claims. Weights are rounded to a's dtype if zero points are subtracted or scales change along K."""
    weights = weights_of(problem)
    rounds = weights.zero is not None or any(factor.group for factor in weights.factors.values())
    return float32_sums(splits=splits, weights=problem.dtype if rounds else None)


def reduction_in(problem: Problem, parts: tuple[int, ...] = (), order: str = "") -> Reduction:
    """Return the sum of ``parts`` of K in rising order of K, as the instructions of other kernels add it."""
    return reduction_of(problem, "cuda", parts=parts, order=order, own=numbers_of_weights(problem, "cuda wgmma"))
