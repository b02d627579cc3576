"""Large products: persistent programs compute tile after tile, with blocks moved by the copy engine (TMA, sm90 and newer)."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...choice import Choice
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.rules import why_not_dense
from .arch import arch_of, can_overlap
from .artifact import Expected, instruction
from .build import KernelChoice
from .classes import INT32_LIMIT
from .configs import Config, Geometry, Resources, geometry, tiles_of, unalike
from .descriptors import describable, is_transposed
from .legality import Predicate, why_overhanging
from .rank import BLOCK_OVERHEAD_BYTES, LATENCY_US, LAUNCH_US, STORE_US, loop_step_us
from .records import Blocks
from .reductions import summed_by_steps
from .runs import InRuns, RunsConfig, why_not_in_runs

TILES = (
    (128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4), (128, 128, 128, 8), (64, 256, 64, 4),
    (64, 128, 128, 4), (128, 64, 128, 4), (64, 128, 64, 4), (128, 64, 64, 4), (64, 64, 128, 4),
)  # fmt: skip
"""(block_m, block_n, block_k, warps) of each tile."""
FEWEST_STAGES, MOST_STAGES = 3, 6
MOST_RESIDENT = 2
HALVED_ELEMENTS = 128 * 256
"""Smallest tile (in elements) that is stored in two halves."""
LEAST_SHARE = 3
"""Tiles must occupy at least one multiprocessor in this many. Below that K has to be split, which this template does not do."""
SLACK = 1.6
"""Largest ratio of a config's modelled time to the best one."""
SHORT_US = 30.0
"""Launches up to this time overlap the previous kernel first; the gain is about a microsecond."""
SUSTAINED = 0.82
"""Share of the matrix units' rate that large tiles sustain at the clocks of a loaded GPU."""
BARRIER_BYTES = 16
"""Bytes of one stage's barriers; each operand has one."""
BASE_REGISTERS = 40
MOST_ALIKE = 1
"""Most configs of one tile that differ only in stages."""


@dataclass(frozen=True, kw_only=True)
class PersistentChoice(KernelChoice):
    """Choice of the persistent template with one config."""

    family = "persistent"
    template = "persistent.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """Return the geometry with the number of resident programs, which compute tile after tile."""
        need = persistent_resources(problem, device, config)
        by_smem = device.smem_per_sm_bytes // (need.smem_bytes + BLOCK_OVERHEAD_BYTES)
        by_registers = device.registers_per_sm // max(need.registers * config.warps * max(device.warp_size, 1), 1)
        resident = max(min(by_smem, by_registers, MOST_RESIDENT), 1)
        programs = min(tiles_of(problem, config), max(device.sm_count, 1) * resident)
        return dataclasses.replace(geometry(problem, config), programs=programs)

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        """Return one run over K: a program sums its tile alone."""
        return summed_by_steps(problem, where, config, device)

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        return why_not_persistent(problem, device) or why_not_config(problem, device, config)

    @property
    def legal_between(self) -> bool:
        """True, because M may have too few or too many tiles."""
        return True

    def with_parts(self, count: int, device: DeviceInfo) -> Sequence[Choice]:
        config = RunsConfig.of(self.config, count)
        legal = PersistentRunsChoice.why_not(self.problem, device, config) is None
        return [PersistentRunsChoice.of(self.problem, device, config)] if legal else []

    @property
    def values(self) -> Mapping[str, Any]:
        return {
            "a_transposed": is_transposed(self.problem.a),
            "b_transposed": is_transposed(self.problem.b),
            "halved": halved(self.config),
            "in_parts": isinstance(self.config, RunsConfig),
        }

    @property
    def blocks(self) -> Blocks:
        stored, out = self.problem.out, (self.config.block_m, self.config.block_n // (2 if halved(self.config) else 1))
        described = stored.stride[-1] == 1 and describable(stored) and stored.dtype.itemsize >= 2
        return operand_blocks(self.problem, self.config) | ({"out": out} if described else {})

    def expected(self, device: DeviceInfo) -> Expected:
        need = persistent_resources(self.problem, device, self.config)
        return Expected(instruction=instruction(Predicate(self.problem, device), self.config), smem_bytes=need.smem_bytes)


@dataclass(frozen=True, kw_only=True)
class PersistentRunsChoice(InRuns, PersistentChoice):
    """Choice of the persistent template whose programs sum the parts of a tile in turn."""

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, RunsConfig)
        return super().why_not(problem, device, config) or why_not_in_runs(problem, config)


def operand_blocks(problem: Problem, config: Config) -> dict[str, tuple[int, int]]:
    """Return the lines, and elements per line, that one copy of a and of b moves through tensor descriptors."""
    m, n, k = config.block_m, config.block_n, config.block_k
    return {"a": (k, m) if is_transposed(problem.a) else (m, k), "b": (n, k) if is_transposed(problem.b) else (k, n)}


def persistent_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[PersistentChoice]:
    """Return up to ``count`` choices (None: all), best by the model first; none if the template does not serve the problem."""
    configs = unalike(_configs(problem, device), count, MOST_ALIKE)
    return [PersistentChoice.of(problem, device, config) for config in configs]


@functools.lru_cache(maxsize=1024)
def _configs(problem: Problem, device: DeviceInfo) -> tuple[Config, ...]:
    if why_not_persistent(problem, device) is not None:
        return ()
    predicate, overlaps = Predicate(problem, device), can_overlap(device.capability)
    legal = (config for config in _pool(problem, device) if why_not_config(problem, device, config) is None)
    timed = sorted(((_estimate_us(predicate, c), -c.stages, str(c), c) for c in legal), key=lambda item: item[:3])
    return tuple(
        replace(config, pdl=overlaps and time_us < SHORT_US) for time_us, *_, config in timed if time_us <= SLACK * timed[0][0]
    )


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[Config]:
    """Yield each tile with the most stages that fit for one program on a multiprocessor, and for two."""
    for block_m, block_n, block_k, warps in TILES:
        depths = []
        for resident in range(1, MOST_RESIDENT + 1):
            room = min(device.smem_per_block_bytes, device.smem_per_sm_bytes // resident - BLOCK_OVERHEAD_BYTES)
            for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
                config = Config(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps)
                if persistent_resources(problem, device, config).smem_bytes <= room:
                    depths.append(config)
                    break
        yield from dict.fromkeys(depths)


def why_not_persistent(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why the template does not serve the problem on this device, or None. ``check_problem`` must have found nothing."""
    if (reason := why_not_dense(problem)) is not None:
        return reason
    if device.type != "cpu" and (device.type != "cuda" or not arch_of(device).warp_group):
        return f"{device.arch}: no copy engine that feeds a warp group"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype_label}: only 16-bit operands are served"
    if problem.batched:
        return f"{problem.op}: a batch is not served, only a single product"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    for name, layout in (("a", problem.a), ("b", problem.b)):
        if not describable(layout):
            return f"{name} {layout}: rows or columns must be contiguous, and begin at multiples of {ALIGNED_BYTES} bytes"
    return None


def halved(config: Config) -> bool:
    return config.block_m * config.block_n >= HALVED_ELEMENTS


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    if (reason := why_overhanging(problem, config, "mnk")) is not None:
        return reason
    if config.split_k > 1:
        return f"split_k {config.split_k}: the template does not split"
    tiles = tiles_of(problem, config)
    if tiles >= INT32_LIMIT // 2:
        return f"{tiles} tiles: tile indices do not fit 32 bits"
    if device.type == "cpu":
        return None
    if tiles < device.sm_count // LEAST_SHARE:
        return f"{tiles} tiles: too few for {device.sm_count} multiprocessors"
    return persistent_resources(problem, device, config).why_not_on(device)


def persistent_resources(problem: Problem, device: DeviceInfo, config: Config) -> Resources:
    """Return an upper bound of the shared memory (stages, barriers, a tile or an epilogue operand) and an estimate of registers."""
    stages = config.stages * ((config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize + BARRIER_BYTES)
    whole = config.block_m * config.block_n
    stored = whole // 2 if halved(config) else whole
    # Epilogue operands may have an own row and column for each element.
    added = (problem.inp_read, *(problem.epilogue.operands if problem.epilogue else ()))
    reads = any(x is not None and 0 not in x.expanded((problem.m, problem.n)).stride for x in added)
    tile_bytes = stored * max(problem.out.dtype.itemsize, problem.accumulator.itemsize if reads else 0)
    sums = 2 * whole if isinstance(config, RunsConfig) else whole
    registers = BASE_REGISTERS + (sums + (stored if reads else 0)) // (32 * config.warps)
    return Resources(smem_bytes=stages + tile_bytes + arch_of(device).barrier_bytes, registers=registers)


def _estimate_us(predicate: Predicate, config: Config) -> float:
    """Return the modelled time: waves of tiles on each multiprocessor, or memory traffic if that is slower."""
    problem, device = predicate.problem, predicate.device
    tiles = math.ceil(tiles_of(problem, config) / device.sm_count)
    steps = -(-problem.k // config.block_k)
    tile_us = steps * loop_step_us(predicate, config, sustained=SUSTAINED) + STORE_US * config.block_m * config.block_n / 16384
    memory_us = 1e-3 * predicate.least_bytes / (predicate.arch.dram_gbps * device.sm_count)
    return LAUNCH_US + LATENCY_US + max(tiles * tile_us, memory_us)
