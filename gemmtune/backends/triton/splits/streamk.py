"""Stream-K: the blocks of all tiles' sums are dealt out evenly, so that no multiprocessor waits for a last, mostly empty wave.

The published method (Osama et al., "Stream-K", PPoPP 2023), with the remainder of the tiles and one whole wave cut in shares, and
the other tiles worked off whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ....problem.operations import DENSE_OPS, QUANTIZED_OPS
from ....problem.rules import why_not
from ..arch import can_overlap
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..classes import INT32_LIMIT
from ..configs import Config, Geometry, tiles_of
from ..descriptors import turned
from ..legality import Predicate
from ..persistent import BARRIER_BYTES, SUSTAINED, operand_blocks, why_not_persistent
from ..rank import BLOCK_OVERHEAD_BYTES, LATENCY_US, LAUNCH_US, SM_GBPS, SPLIT_US, STORE_US, loop_step_us, ranked
from ..records import Blocks
from ..resources import Resources
from ..spec import KernelSpec

LEAST_CAPABILITY = 80
TILES = (
    (128, 256, 128, 8),
    (256, 128, 128, 8),
    (128, 128, 128, 8),
    (128, 128, 128, 4),
    (64, 128, 256, 4),
    (128, 64, 256, 4),
    (64, 64, 256, 4),
)
"""(block_m, block_n, bytes along K, warps) where tensor cores multiply."""
FMA_TILES = ((64, 64, 64, 4), (128, 64, 64, 4), (64, 128, 64, 4), (64, 64, 128, 4))
"""The same where FMAs multiply, or tensor cores float64."""
MOST_STAGES, FEWEST_STAGES = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig(Config):
    """A config of the stream-K template: ``resident`` programs for each multiprocessor; ``waves`` whole waves of tiles are cut in
    shares with the remainder; with ``described`` the copy engine moves the blocks."""

    resident: int = 1
    waves: int = 1
    described: bool = False

    __str__ = Config.__str__

    @property
    def variant(self) -> str:
        """The programs, the waves, and who moves the blocks."""
        return f"_x{self.resident}" + (f"_v{self.waves}" if self.waves != 1 else "") + "_tma" * self.described


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGeometry(Geometry):
    """``programs`` programs; the blocks of the first ``cut_tiles`` tiles are dealt out, ``blocks_per_program`` to each."""

    cut_tiles: int
    blocks_per_program: int

    @property
    def slots(self) -> int:
        """Two parts of each program: the end of its first tile, and the beginning of its last."""
        return 2 * self.grid[0]

    @property
    def counters(self) -> int:
        """Counters of the parts of each tile."""
        return self.cut_tiles


def stream_geometry(problem: Problem, device: DeviceInfo, config: StreamConfig) -> StreamGeometry:
    """The launch of ``config``."""
    tiles = tiles_of(problem, config)
    blocks = -(-problem.k // config.block_k)
    programs = min(max(device.sm_count, 1) * config.resident, tiles * blocks)
    rest = tiles % programs
    cut_tiles = min(tiles, rest + config.waves * programs) if rest else 0
    share = max(-(-cut_tiles * blocks // programs), 1)
    parts = 1 if cut_tiles == 0 else -(-(blocks - 1) // share) + 1
    return StreamGeometry(
        tiles=tiles,
        splits=parts,
        splits_per_group=parts,
        k_per_split=share * config.block_k,
        group_m=config.group_m,
        programs=programs,
        cut_tiles=cut_tiles,
        blocks_per_program=share,
    )


@dataclass(frozen=True, kw_only=True)
class StreamChoice(KernelChoice):
    """The stream-K template with one config."""

    family = "streamk"
    template = "splits/streamk.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """The programs that are resident share the blocks of all tiles."""
        assert isinstance(config, StreamConfig)
        return stream_geometry(problem, device, config)

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """What the family says of the problem, then of the config."""
        assert isinstance(config, StreamConfig)
        return why_not_stream(problem, device) or why_not_config(problem, device, config)

    @property
    def batch_invariant(self) -> bool:
        """The number of tiles decides where sums are cut."""
        return False

    @property
    def _config(self) -> StreamConfig:
        assert isinstance(self.config, StreamConfig)
        return self.config

    @property
    def spec(self) -> KernelSpec:
        """Blocks begin anywhere along K, as in a split."""
        return dataclasses.replace(super().spec, split=True)

    @property
    def values(self) -> Mapping[str, Any]:
        """Whether there are descriptors, and how their blocks lie."""
        problem = self.problem
        return {"described": self._config.described, "a_turned": turned(problem.a), "b_turned": turned(problem.b)}

    @property
    def blocks(self) -> Blocks:
        """Blocks of a and b, where the copy engine moves them."""
        return operand_blocks(self.problem, self.config) if self._config.described else {}

    def expected(self, device: DeviceInfo) -> Expected:
        """The instruction of the mm template, and the upper bound of the shared memory."""
        need = stream_resources(self.problem, device, self._config)
        return Expected(instruction=instruction(Predicate(self.problem, device), self.config), smem_bytes=need.smem_bytes)


def why_not_stream(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the template has nothing for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not(problem, (*DENSE_OPS, *QUANTIZED_OPS))
    if reason is not None:
        return reason
    if device.type == "cuda" and device.capability < LEAST_CAPABILITY:
        return f"{device.arch}: no tensor cores for Triton, so that no wave is short enough to be cut"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    return None


def why_not_config(problem: Problem, device: DeviceInfo, config: StreamConfig) -> str | None:
    """Why ``config`` may not be offered for a problem that the template can serve, or None."""
    if config.split_k > 1:
        return f"split_k {config.split_k}: the template deals out blocks, and does not split"
    reason = why_not_persistent(problem, device) if config.described else None
    reason = reason or Predicate(problem, device).check(config)
    if reason is not None:
        return reason
    where = stream_geometry(problem, device, config)
    if where.tiles * -(-problem.k // config.block_k) >= INT32_LIMIT // 2:
        return f"{where.tiles} tiles: the numbers of their blocks do not fit 32 bits"
    if where.cut_tiles == 0:
        return f"{where.tiles} tiles are whole waves of {where.programs} programs: there is nothing to deal out"
    need = stream_resources(problem, device, config)
    if config.resident * (need.smem_bytes + BLOCK_OVERHEAD_BYTES) > device.smem_per_sm_bytes + BLOCK_OVERHEAD_BYTES:
        return f"resident {config.resident}: needs {config.resident} times {need.smem_bytes} bytes of shared memory"
    registers = config.resident * need.registers * config.warps * device.warp_size
    if config.resident > 1 and registers > device.registers_per_sm:
        return f"resident {config.resident}: needs about {registers} registers"
    return None


def stream_resources(problem: Problem, device: DeviceInfo, config: StreamConfig) -> Resources:
    """An upper bound of the shared memory, and an estimate of the registers of one thread."""
    need = Predicate(problem, device).resources(config)
    if not config.described:
        return need
    stage = (config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize + BARRIER_BYTES
    converted = config.block_m * config.block_n * problem.accumulator.itemsize
    barriers = BARRIER_BYTES + Predicate(problem, device).arch.barrier_bytes
    return Resources(smem_bytes=max(config.stages * stage, converted) + barriers, registers=need.registers)


@functools.lru_cache(maxsize=1024)
def stream_configs(problem: Problem, device: DeviceInfo) -> tuple[StreamConfig, ...]:
    """The legal configs, the best by the model first."""
    if why_not_stream(problem, device) is not None:
        return ()
    predicate, overlaps = Predicate(problem, device), can_overlap(device.capability)
    timed = ranked((estimate_us(predicate, config), config) for config in _pool(predicate))
    return tuple(replace(config, pdl=overlaps) for _, config in timed)


def _pool(predicate: Predicate) -> Iterator[StreamConfig]:
    """Each tile with the most stages that fit, for one program on a multiprocessor and for two."""
    problem, device = predicate.problem, predicate.device
    small = problem.dtype == torch.float64 or (problem.dtype == torch.float32 and problem.precision.input_mode == "ieee")
    for block_m, block_n, row_bytes, warps in FMA_TILES if small else TILES:
        base = StreamConfig(block_m=block_m, block_n=block_n, block_k=row_bytes // problem.dtype.itemsize, stages=1, warps=warps)
        for described, resident, waves in ((d, r, w) for d in (True, False) for r in (1, 2) for w in (1, 0)):
            for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
                config = replace(base, stages=stages, described=described, resident=resident, waves=waves)
                where = stream_geometry(problem, device, config)
                same = waves == 0 and where.cut_tiles == where.tiles
                if not same and why_not_config(problem, device, config) is None:
                    yield config
                    break


def estimate_us(predicate: Predicate, config: StreamConfig) -> float:
    """The model's time of one launch in microseconds: a program's share of the blocks, then its whole tiles."""
    problem = predicate.problem
    where = stream_geometry(problem, predicate.device, config)
    whole = -(-(where.tiles - where.cut_tiles) // where.grid[0])
    steps = where.blocks_per_program + whole * -(-problem.k // config.block_k)
    step_us = max(config.resident * loop_step_us(predicate, config, sustained=SUSTAINED), LATENCY_US / (config.stages - 1))
    store_us = STORE_US * config.block_m * config.block_n / 16384
    memory_us = 1e-3 * predicate.least_bytes / (predicate.arch.dram_gbps * predicate.device.sm_count)
    tile_bytes = config.block_m * config.block_n * problem.accumulator.itemsize
    added_us = SPLIT_US + 1e-3 * (where.splits + 1) * tile_bytes / SM_GBPS if where.splits > 1 else 0.0
    return LAUNCH_US + LATENCY_US + max(steps * step_us + (whole + 1) * store_us, memory_us) + added_us
