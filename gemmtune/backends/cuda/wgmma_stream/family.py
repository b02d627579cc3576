"""Family of persistent wgmma kernels: blocks walk over tiles, and divide those that would leave blocks idle.

The constants of the time model are fitted to times on an H100.
"""

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, even_parts
from ....problem import Problem
from ....toolchain.record import MAP_BYTES, WORKSPACE, Address, Aligned, Record, TensorMap
from ...cpp.printer import STORAGE_TYPES
from .. import wgmma
from ..family import INT32_LIMIT, beginnings
from ..groups import strip_of_rows
from ..hopper import WGMMA
from ..kernel import PRODUCTS, KernelSource, aligned_out, files_of, structs_of
from ..mixed import family as mixed
from ..mixed.family import PARTS, MixedFamily, steps_of, tiles_of
from ..mixed.weights import Weights, weights_of
from ..wgmma.configs import CHUNK_BYTES
from ..wgmma.family import ROW_NS, WIDEN_NS, claims_of, map_of_rows, reduction_in, why_not_shape
from .configs import MOST_BLOCKS, REGISTERS, ROUND_ROWS, SHAPES, Config, Division, Shape

LEAST_ROWS = {"quick": 193, "default": 129, "exhaustive": 1}
"""Minimum rows of a, by search. With fewer rows a tile per block leaves as few blocks idle."""
LAUNCH_US, TILE_US, DIVIDED_US = 3.0, 2.0, 1.0
"""Overheads of a launch, of each tile of a block, and of tiles that are divided."""
ALONE, MORE = 0.72, 0.33
"""Time of a step with few busy multiprocessors over that of ``wgmma``, and what all of them add: they share L2 and power."""
EXCHANGE_US, FLAG_US = 2.5, 1.0
"""Time in which a helper stores its sums or an owner adds them, and until the owner sees them."""
FLAGS_BYTES = 2**14
"""Size of all flags: 4 bytes for each warp of MOST_BLOCKS blocks."""
DRAM_GBPS = 2600.0
"""Bandwidth at which b and a are read, once."""


class Work(mixed.Work):
    """Parameters of the persistent kernel.

    There are ``tiles_m`` by ``tiles_n`` tiles, in strips of ``strip`` rows of tiles. The first ``divided`` tiles have ``helpers``
    blocks. Their owners sum ``head`` steps, and each helper ``each`` or, the first ``more`` of a tile, one more. Runs of a block
    that sums a tile in several have as many.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("sums", ctypes.c_void_p), ("flags", ctypes.c_void_p), ("tiles_m", ctypes.c_int), ("tiles_n", ctypes.c_int),
        ("strip", ctypes.c_int), ("divided", ctypes.c_int), ("helpers", ctypes.c_int), ("head", ctypes.c_int),
        ("each", ctypes.c_int), ("more", ctypes.c_int), ("whole_chunks", ctypes.c_bool),
    )  # fmt: skip


class WgmmaStream(MixedFamily[Config]):
    """Family of ``wgmma_stream.cu.jinja``."""

    name = "wgmma_stream"
    likely = 1.15
    instruction = WGMMA
    package = __package__
    work = Work

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - device-independent
        least = LEAST_ROWS[search]
        return f"a has {problem.m} rows, tried from {least} on" if problem.m < least else None

    def why_not_config(self, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        shape, (rows, cols) = config.shape, tiles_of(problem, config)
        if shape.block_m % (2 * ROUND_ROWS) or shape.warp_groups not in REGISTERS or shape.blocks_per_sm > 1 or config.cluster > 1:
            return f"got {shape}, expected rows in multiples of {2 * ROUND_ROWS}, 2 or 3 warp groups, and one block at a time"
        reason = super().why_not_config(problem, device, config) or why_not_shape(shape, weights_of(problem))
        if reason is not None:
            return reason
        if config.runs > 1 and not (config.whole and config.runs <= steps_of(problem, config)):
            return f"{config.runs} runs, expected 1, or whole tiles with as many steps along K"
        if not 0 < config.blocks <= MOST_BLOCKS:
            return f"{config.blocks} blocks, expected 1 to {MOST_BLOCKS}"
        if rows * cols + 2 * config.blocks >= INT32_LIMIT:
            return f"{rows * cols} tiles cannot be counted in 32 bits"
        return None

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        division, tile_us = division_of(problem, config), steps_of(problem, config) * step_us_of(problem, config.shape)
        rounds = division.waves + (1 / division.parts if division.left else 0.0)
        busy = (division.waves * division.blocks + division.left) / (rounds * device.sm_count)
        tile_ends_us = TILE_US + 2 * EXCHANGE_US * (config.runs - 1)
        each_us = (division.waves + (division.left > 0)) * tile_ends_us + (DIVIDED_US if division.divided else 0.0)
        return LAUNCH_US + max(rounds * tile_us * (ALONE + MORE * busy) + each_us, problem.bytes / DRAM_GBPS / 1e3)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return every shape with divided and with whole tiles, best first. Whole tiles come first if nothing would be divided.

        Two runs have the bits of clusters of two blocks, which are fast for fewer rows.
        """
        found = [
            Config(shape=shape, blocks=device.sm_count, whole=whole, runs=runs, pdl=True, prefetch_stages=shape.stages)
            for shape in SHAPES[weights_of(problem).bits]
            for whole, runs in ((False, 1), (True, 1), (True, 2))
        ]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), not config.whole, str(config)))

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - config decides
        yield from beginnings(config, config.shape.stages)
        if config.runs == 1:
            yield dataclasses.replace(config, whole=not config.whole)

    def near_sizes(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterable[int]:  # noqa: ARG002 - no clusters
        return ()

    def claims(self, problem: Problem, config: Config) -> Claims:
        return claims_of(problem, max(division_of(problem, config).parts, config.runs))

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return the runs of one block per tile, or None if tiles are divided: then the place of a tile decides how."""
        parts = even_parts(problem.k, config.shape.block_k(weights_of(problem)), config.runs)
        return reduction_in(problem, parts) if config.whole else None

    def batch_invariant(self, problem: Problem, config: Config) -> bool:  # noqa: ARG002 - the config decides
        """Return False if tiles are divided: their number and order decide where."""
        return config.whole

    def source(self, problem: Problem, config: Config) -> KernelSource:
        made, result = super().source(problem, config), STORAGE_TYPES[problem.out.dtype]
        structs = structs_of(Work, {"out": f"{result}*", "sums": "float4*", "flags": "unsigned*"})
        own = (*files_of(wgmma.__name__, "numbers", "device", "sums", "store"), *files_of(__package__, "flags", "steps", "results"))
        values = {**made.values, "structs": structs, "in_runs": config.runs > 1}
        return dataclasses.replace(made, files=(PRODUCTS, *PARTS[:2], *own), values=values)

    def values(self, weights: Weights, shape: Shape) -> dict[str, Any]:
        return {
            "k16_batch": shape.k16_batch_of(weights),
            "shared_bytes": shape.shared_bytes(weights),
            "terms": False,
            "given_registers": REGISTERS[shape.warp_groups][0],
            "left_registers": REGISTERS[shape.warp_groups][1],
            "scaled": weights.scale is not None and not weights.scale.group,
        }

    def tell(self, work: Work, problem: Problem, config: Config) -> tuple[Aligned, ...]:
        staged_bytes = problem.out.dtype.itemsize if problem.epilogue is None else torch.float32.itemsize
        work.whole_chunks, aligned = aligned_out(Work.whole_chunks, problem.out, CHUNK_BYTES // staged_bytes)
        work.tiles_m, work.tiles_n = tiles_of(problem, config)
        work.strip = strip_of_rows(config.shape.block_m)
        division = division_of(problem, config)
        work.each, work.more = divmod(division.steps, config.runs)
        if division.divided:
            work.divided, work.helpers = division.divided, division.helpers
            work.head = division.head(lead_us(division) / step_us_of(problem, config.shape))
            work.each, work.more = divmod(division.steps - work.head, division.parts - 1)
        return aligned

    def map_of_a(self, problem: Problem, config: Config) -> TensorMap:
        return map_of_rows(problem, config.shape.block_m)

    def grid(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        return division_of(problem, config).blocks, 1, 1

    def record(self, problem: Problem, config: Config) -> Record:
        """Return the launch record. The workspace has the flags of helpers' warps, then the sums that each block leaves.

        Launches for any M share a workspace, and only flags are clear after a launch. So flags have a place of their own.
        """
        record, shape, division = super().record(problem, config), config.shape, division_of(problem, config)
        leaving = division.blocks if config.runs > 1 else division.helpers
        if not leaving:
            return record
        first = MAP_BYTES * len(record.maps)
        workspace = (
            Address(offset=first + Work.flags.offset, operand=WORKSPACE),
            Address(offset=first + Work.sums.offset, operand=WORKSPACE, more_bytes=FLAGS_BYTES),
        )
        sums_bytes = leaving * 4 * shape.block_m * shape.block_n
        return dataclasses.replace(record, addresses=(*record.addresses, *workspace), workspace_bytes=FLAGS_BYTES + sums_bytes)


def division_of(problem: Problem, config: Config) -> Division:
    rows, cols = tiles_of(problem, config)
    return Division.of(rows * cols, steps_of(problem, config), config)


def step_us_of(problem: Problem, shape: Shape) -> float:
    weights = weights_of(problem)
    products = shape.block_k(weights) // 16 * shape.warp_groups * shape.col_tiles
    return products * (WIDEN_NS[weights.bits] + ROW_NS * shape.block_m) / 1e3


def lead_us(division: Division) -> float:
    """Return how much longer an owner multiplies than a helper, so that the tile is finished early.

    After whole tiles, the owner finds the helpers' sums and only adds them. Without, it waits for them.
    """
    return EXCHANGE_US * (2 - division.parts) if division.waves else EXCHANGE_US + FLAG_US
