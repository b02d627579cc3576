"""Family of persistent wgmma kernels: blocks walk over tiles, and divide those that would leave blocks idle.

The constants of the time model are fitted to times on an H100.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, even_parts
from ....problem import Problem
from ....toolchain.record import MAP_BYTES, WORKSPACE, A, Address, Aligned, Record, TensorMap
from ...cpp.printer import STORAGE_TYPES
from .. import wgmma
from ..family import INT32_LIMIT, beginnings
from ..groups import strip_of_rows
from ..hopper import WGMMA
from ..kernel import PRODUCTS, KernelSource, aligned_out, files_of, structs_of
from ..mixed import family as mixed
from ..mixed.family import PARTS, MixedFamily, map_of_lines, steps_of, tiles_of
from ..mixed.weights import MixedConfig, Weights, weights_of
from ..wgmma.configs import BARRIERS_BYTES, CHUNK_BYTES
from ..wgmma.configs import Shape as WholeShape
from ..wgmma.family import claims_of, reduction_in, step_us, why_not_shape

ROUND_ROWS = 16
"""Rows of a 16-bit result that are reordered at a time. Float32 sums are twice as large, and half as many."""
REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers of a copying and of a multiplying thread, by the warp groups that multiply."""
MOST_BLOCKS = 256
"""Maximum persistent blocks. More than multiprocessors would only wait."""
MOST_PARTS = 6
"""Maximum parts of a tile. Its owner adds the sums of all parts but one."""
LEAST_STEPS = 4
"""Fewest steps of a part. With fewer, exchanging sums takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(WholeShape):
    """Tile and stages as in the kernel with one tile per block, with space for results next to the stages."""

    @property
    def gives_registers(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        return 128 * self.warp_groups + 128

    @property
    def most_registers(self) -> int:
        return REGISTERS[self.warp_groups][1]

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:  # noqa: ARG002 - no cluster divides K
        """Return the shared memory of a block: barriers, stages, and two buffers for rows of the result."""
        stages_bytes = self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)
        return BARRIERS_BYTES + stages_bytes + 2 * ROUND_ROWS * (2 * self.block_n + CHUNK_BYTES)


def _shape(block_m: int, warp_groups: int, line_bytes: int, stages: int) -> Shape:
    return Shape(block_m=block_m, warp_groups=warp_groups, col_tiles=1, line_bytes=line_bytes, stages=stages)


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (_shape(128, 3, 64, 5), _shape(192, 2, 64, 5), _shape(256, 2, 64, 4)),
    4: (_shape(128, 3, 64, 4), _shape(192, 2, 64, 3), _shape(256, 2, 64, 3)),
}
"""Shapes by the bits of a weight. Three warp groups leave fewer blocks idle. On an H200, other batches, warp groups that take turns
and blocks that share rows change times by 3% at most. Products of widened weights in shared memory take 1.2 to 1.4 times as long,
also if other warp groups widen them: without these loads and stores of shared memory they would be as fast as those of bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape plus at most ``blocks`` persistent blocks, which divide tiles that do not fill them along K except with ``whole``.

    A block then sums a tile in ``runs`` parts of K, one after another, and adds them.
    """

    shape: Shape
    blocks: int = 132
    whole: bool = False
    runs: int = 1

    def label(self, weights: Weights) -> str:
        """Return a name such as ``i4_256x128x128_s3_w2t1b4_b132_whole_pdl3``."""
        kernel, _, launch = super(Config, self).label(weights).rpartition("_k1")
        return f"{kernel}_b{self.blocks}{f'_runs{self.runs}' if self.runs > 1 else '_whole' if self.whole else ''}{launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of tiles with ``steps`` of K each: every block has ``waves`` whole tiles, and ``left`` tiles have ``parts`` each."""

    steps: int
    blocks: int
    waves: int
    left: int
    parts: int

    @classmethod
    def of(cls, tiles: int, steps: int, config: Config) -> Division:
        blocks = min(config.blocks, tiles) if config.whole else config.blocks
        waves, left = divmod(tiles, blocks)
        parts = 1 if config.whole or not left else max(1, min(blocks // left, steps // LEAST_STEPS, MOST_PARTS))
        return cls(steps=steps, blocks=min(blocks, parts * tiles), waves=waves, left=left, parts=parts)

    @property
    def divided(self) -> int:
        """Number of divided tiles, which come first."""
        return self.left if self.parts > 1 else 0

    @property
    def helpers(self) -> int:
        """Blocks that sum a part for the block with the tile's first steps."""
        return self.divided * (self.parts - 1)

    def head(self, lead: float) -> int:
        """Return the first steps of a divided tile, which its owner sums: ``lead`` more than each helper."""
        return max(1, min(round((self.steps + (self.parts - 1) * lead) / self.parts), self.steps - self.parts + 1))


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
    likely = 1.25
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
        division, tile_us = division_of(problem, config), steps_of(problem, config) * step_us(weights_of(problem), config.shape)
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
            work.head = division.head(lead_us(division) / step_us(weights_of(problem), config.shape))
            work.each, work.more = divmod(division.steps - work.head, division.parts - 1)
        return aligned

    def map_of_a(self, problem: Problem, config: Config) -> TensorMap:
        return map_of_lines(A, problem.a, config.shape.block_m)

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


def lead_us(division: Division) -> float:
    """Return how much longer an owner multiplies than a helper, so that the tile is finished early.

    After whole tiles, the owner finds the helpers' sums and only adds them. Without, it waits for them.
    """
    return EXCHANGE_US * (2 - division.parts) if division.waves else EXCHANGE_US + FLAG_US
