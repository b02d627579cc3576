"""Time model that orders the configs, as the sum of a launch's phases. The rates of an H200 order configs elsewhere too."""

import dataclasses

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import clusters_at_a_time
from .configs import MIDDLE, ONE_RUN, SHAPES, Config, Shape, clusters_of, tiles_of

LAUNCH_US = 2.4
DRAM_GBPS = 4300.0
L2_GBPS = 8000.0
"""Bandwidth from L2 to all multiprocessors. Multicast data counts once. A partial last wave uses only a part of it."""
ARRIVING_GBPS = 74.0
"""Bandwidth into each multiprocessor, multicast data included. Few steps are in flight at a time."""
EXCHANGE_GBPS = 3000.0
"""Bandwidth of sums between the multiprocessors of a cluster, and through memory."""
FIRST_LEVEL_US, SECOND_LEVEL_US = 0.15, 0.2
"""Overhead of each reduction level in addition to sending the sums."""
ALONE_US, DEEP = 0.15, 0.95
"""Costs of a single block per multiprocessor: a later launch, and the share of reading time that doubled stages leave."""
FILLED = {1: 0.9, 2: 0.7}
"""Share of all blocks that saturates memory, by blocks per multiprocessor. With two, the next launch uses the others."""
LEAST_STEPS = 4
"""Minimum steps of a block, unless K has fewer."""
LEAST_K = {"quick": 8192, "default": 4096, "exhaustive": 128}
SKINNY_ROWS, SKINNY_LEAST_K, SKINNY_MOST_BYTES = 32, 1024, 2**27
"""Limits of a product with few rows or columns. Its weights are read in some tens of microseconds, so launch overhead matters."""
TILE_SIDE = 64
"""Rows or columns with which the other dimension may be long."""
SMALL_SIDE = 256
"""Maximum rows and columns of a result whose few tiles are each shared by all clusters that fit."""
MIDDLE_ROWS, MIDDLE_COLUMNS, MIDDLE_K = 128, 2048, 7168
"""Most rows, least columns and least K of a product for which MIDDLE is tried. Elsewhere other families are as fast."""


def why_not_likely(problem: Problem, device: DeviceInfo, search: str) -> str | None:
    """Return the reason why a search does not try the kernel, or None. Split-K pays if tiles are few and K is long."""
    small, large = sorted((problem.m, problem.n))
    short = search != "quick" and small <= TILE_SIDE and problem.bytes <= SKINNY_MOST_BYTES
    least_k = min(SKINNY_LEAST_K if short else LEAST_K[search], LEAST_K[search])
    if problem.k < least_k:
        return f"K is {problem.k}, tried from {least_k} on"
    if short and small <= SKINNY_ROWS:
        return None
    # A tile with 64 columns reads as many bytes for its 64 rows as for its columns. Multiprocessors just keep up with memory if
    # clusters of two blocks run for all tiles at once, and not if some of them read two tiles.
    most = device.sm_count // 2
    side = MIDDLE_ROWS if is_middle(problem) else TILE_SIDE
    tiles = -(-small // side) * -(-large // TILE_SIDE) * problem.batch
    if tiles > most:
        return f"the result has {tiles} tiles of {side}x{TILE_SIDE}, tried with up to {most}"
    if search != "exhaustive" and small > side and large * problem.batch > SMALL_SIDE:
        limits = f"{SMALL_SIDE}x{SMALL_SIDE}, or {TILE_SIDE} rows or columns"
        return f"a result of {problem.m}x{problem.n}: tried with up to {limits}"
    return None


def is_middle(problem: Problem) -> bool:
    """Return True if a product has the sizes for which MIDDLE is tried."""
    return TILE_SIDE < problem.m <= MIDDLE_ROWS and problem.n >= MIDDLE_COLUMNS and problem.k >= MIDDLE_K


def is_likely(problem: Problem, device: DeviceInfo, config: Config) -> bool:
    """Return True if a search may try a config: SHAPES, or for the middle MIDDLE if all clusters run at once."""
    if is_middle(problem):
        return config.shape in MIDDLE and clusters_of(problem, config) <= clusters_at_a_time(device.sm_count, config.shape.cluster)
    return config.shape in SHAPES


def cluster_counts(shape: Shape, tile_clusters: int, problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
    """Return how many clusters may share a tile: as many as run at once, with one or two blocks per multiprocessor.

    ``tile_clusters`` clusters cover the result once. Clusters that share tiles never exceed those that run at once. Otherwise
    running ones would poll for the others' sums until they give up. The last one would then do their work, which takes twenty times
    as long.
    """
    at_a_time = clusters_at_a_time(device.sm_count, shape.cluster)
    steps = -(-problem.k // shape.block_k)
    most = max(1, steps // (LEAST_STEPS * shape.cluster_k))
    once, nearest = at_a_time // tile_clusters, round(at_a_time / tile_clusters)
    # If one cluster per tile leaves multiprocessors idle, a second block on each fills them.
    ordered = (once, nearest) if once > 1 or shape.blocks_per_sm == 1 else (2 * at_a_time // tile_clusters, nearest)
    room = max(shape.blocks_per_sm * at_a_time // tile_clusters, 1)
    return tuple(dict.fromkeys(min(max(groups, 1), most, room) for groups in ordered))


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    shape, tiles, tile_clusters = config.shape, tiles_of(problem, config), clusters_of(problem, config)
    blocks = tiles * config.parts
    busy = min(1.0, blocks / (FILLED[shape.blocks_per_sm] * device.sm_count))
    at_a_time, clusters = clusters_at_a_time(device.sm_count, shape.cluster), tile_clusters * config.clusters_per_tile
    waves = -(-clusters // at_a_time)
    # Data that the tiles of a cluster share is read once.
    lines = shape.block_m * shape.cluster_m + shape.block_n * shape.cluster_n
    copied = tile_clusters * lines * problem.k * problem.dtype.itemsize
    copying_us = copied / L2_GBPS / 1e3 * waves * at_a_time / clusters
    arriving = tiles * (shape.block_m + shape.block_n) * problem.k * problem.dtype.itemsize
    arriving_us = arriving / min(blocks, device.sm_count) / ARRIVING_GBPS / 1e3
    reading_us = max(problem.bytes / DRAM_GBPS / busy / 1e3, copying_us, arriving_us)
    launch_us = LAUNCH_US
    if shape.blocks_per_sm == 1:
        launch_us, reading_us = launch_us + ALONE_US, reading_us * DEEP
    adding_us = FIRST_LEVEL_US + blocks * shape.sent_bytes / EXCHANGE_GBPS / 1e3 if shape.cluster_k > 1 else 0.0
    if config.clusters_per_tile > 1:
        stored = tiles * config.clusters_per_tile * shape.block_m * shape.block_n * 4
        adding_us += SECOND_LEVEL_US + 2 * stored / EXCHANGE_GBPS / 1e3
    return launch_us + reading_us + adding_us


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Return every shape in both orientations with its likeliest clusters per tile (ONE_RUN: one), best first."""
    both = (False, True)
    found = [_filled(shape, problem, device, swap_ab=swap_ab) for shape in (*SHAPES, *MIDDLE) for swap_ab in both]
    found += [Config(shape=shape, swap_ab=swap_ab, pdl=True) for shape in ONE_RUN for swap_ab in both]
    # swap_ab ranks lower among equals: it stores columns one by one.
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), config.swap_ab, str(config)))


def _filled(shape: Shape, problem: Problem, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, pdl=True)
    groups = cluster_counts(shape, clusters_of(problem, config), problem, device)
    return min(
        (dataclasses.replace(config, clusters_per_tile=n) for n in groups), key=lambda one: estimate_us(problem, device, one)
    )
