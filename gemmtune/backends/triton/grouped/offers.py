"""Candidate kernels for a grouped problem, ordered by a model of their limits."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from ....choice import Offers, Refusal
from ....device import DeviceInfo
from ....effort import EFFORT
from ....problem import Problem
from ..arch import arch_of, can_overlap
from ..build import KernelChoice
from ..configs import repeats
from ..legality import LEAST_BLOCK, WARP_GROUP_ROWS, Predicate
from ..persistent import BARRIER_BYTES
from ..rank import BLOCK_OVERHEAD_BYTES, LAUNCH_US, loop_step_us
from .choice import CombinedChoice, RowsChoice, TermsChoice
from .configs import GroupedConfig, multiplied, oriented, why_not_config
from .words import WordRowsChoice, words_configs

BLOCKS_M, BLOCKS_N, BLOCKS_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128)
STAGES = (3, 4, 5)
MOST_ELEMENTS = 128 * 256
MOST_ALIKE = 2
"""Configs of one tile that are tried before configs of other tiles."""
MOST_RESIDENT = 3
INTERPRETED = (
    GroupedConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    GroupedConfig(block_m=32, block_n=16, block_k=32, stages=1, warps=1, swap=True),
)
"""Configs for the interpreter, which only checks values."""


def grouped_offers(problem: Problem, device: DeviceInfo, search: str) -> Offers:
    """Return the kernels that a search tries for a grouped problem, best by the model first."""
    rows = RowsChoice if problem.weights is None else CombinedChoice
    family: type[KernelChoice] = TermsChoice if problem.divides_terms else rows
    if problem.k == 0:
        return Offers(refusals=(Refusal(name=f"triton:{family.family}", reason="K is 0: nothing is multiplied"),))
    configs = ranked(problem, device) if device.type != "cpu" else _interpreted(problem, device)
    if not configs:
        return Offers(refusals=(Refusal(name=f"triton:{family.family}", reason=f"no config is legal on {device.arch}"),))
    most = EFFORT[search].configs["triton:grouped"]
    words = words_configs(problem, device)[: most and most // 2]
    chosen = configs[: most and most - len(words)]
    return Offers(
        choices=(
            *(WordRowsChoice.of(problem, device, config) for config in words),
            *(family.of(problem, device, config) for config in chosen),
        )
    )


def _interpreted(problem: Problem, device: DeviceInfo) -> tuple[GroupedConfig, ...]:
    configs = (replace(c, swap=c.swap and not problem.divides_terms) for c in INTERPRETED)
    return tuple(config for config in configs if why_not_config(problem, device, config) is None)


@functools.lru_cache(maxsize=256)
def ranked(problem: Problem, device: DeviceInfo) -> tuple[GroupedConfig, ...]:
    """Return the legal configs for a GPU ordered by ``estimate_us``, with the best few of each tile first."""
    predicate = Predicate(problem, device)
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    legal.sort(key=lambda config: (estimate_us(predicate, config), str(config)))
    return tuple(sorted(legal, key=repeats(lambda config: (config.tile, config.swap), MOST_ALIKE)))


def estimate_us(predicate: Predicate, config: GroupedConfig) -> float:
    """Return the modelled time for equal groups: whole waves of tiles, or the memory that is read."""
    problem, device = predicate.problem, predicate.device
    total = problem.k if problem.divides_terms else problem.m
    used = max(1, min(problem.groups, total))
    share = total / used
    k = share if problem.divides_terms else problem.k
    tiles_n = -(-problem.n // config.block_n)
    tiles = used * math.ceil((problem.m if problem.divides_terms else share) / config.block_m) * tiles_n
    per_sm = tiles / device.sm_count
    waves = math.ceil(per_sm) if per_sm < 2 * config.resident else per_sm
    wide = multiplied(problem, config)
    multiplied_as = oriented(wide)
    step_us = loop_step_us(predicate, multiplied_as) * (0.9 if config.described else 1.0)
    # Bytes in flight must cover the latency of memory.
    inflight = config.resident * (config.stages - 1) * (config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize
    hidden = min(1.0, inflight / 65536)
    read = used * problem.b.size[-1] * problem.k if not problem.divides_terms else problem.batch * problem.m * problem.n
    memory_us = 1e-3 * predicate.number_bytes[1] * read / (predicate.arch.dram_gbps * device.sm_count * max(hidden, 0.1))
    tile_us = math.ceil(k / config.block_k) * step_us + 0.5
    return LAUNCH_US + max(waves * tile_us, memory_us) + 0.01 * waves * tile_us


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[GroupedConfig]:
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    narrow = problem.dtype.itemsize == 2 or problem.float8
    warp_groups = device.type == "cuda" and arch_of(device).warp_group and narrow
    rows = problem.m if problem.divides_terms else -(-problem.m // problem.groups)
    blocks_m = [block for block in BLOCKS_M if block == LEAST_BLOCK or block < 4 * rows]
    for block_m, block_n, block_k, stages in itertools.product(blocks_m, BLOCKS_N, BLOCKS_K, STAGES):
        elements = block_m * block_n * (2 if problem.gated else 1)
        if elements > MOST_ELEMENTS:
            continue
        warps = 8 if elements >= 128 * 128 else 4
        plain = GroupedConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=warps, pdl=overlaps)
        if problem.divides_terms:
            yield plain
            continue
        swaps = (True,) if warp_groups and block_m < WARP_GROUP_ROWS <= block_n else (False,)
        for swap, described in itertools.product(swaps, (True, False) if warp_groups else (False,)):
            config = replace(plain, swap=swap, described=described)
            yield replace(config, resident=_resident(problem, device, multiplied(problem, config)))
            if described and not swap and elements >= 128 * 128:
                yield replace(config, flatten=True)


def _resident(problem: Problem, device: DeviceInfo, config: GroupedConfig) -> int:
    """Return the programs of one multiprocessor that fit its shared memory and registers."""
    need = config.stages * ((config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize + BARRIER_BYTES)
    by_smem = device.smem_per_sm_bytes // (need + BLOCK_OVERHEAD_BYTES)
    registers = 48 + config.block_m * config.block_n // (32 * config.warps)
    by_registers = device.registers_per_sm // (registers * config.warps * max(device.warp_size, 1))
    return max(1, min(by_smem, by_registers, MOST_RESIDENT))
