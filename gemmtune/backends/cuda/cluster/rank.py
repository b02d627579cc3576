"""Which configs are tried for a problem, best first: a model of what a launch does, one after the other.

Its constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

import dataclasses

from ....device import DeviceInfo
from ....problem import Problem
from ..hopper import clusters_at_a_time
from .configs import SHAPES, Config, Shape, clusters_of, tiles_of

LAUNCH_US = 2.4
DRAM_GBPS = 4300.0
L2_GBPS = 8000.0
"""The rate from L2 to all multiprocessors; what is copied to several blocks counts once. In the last of several waves some get
nothing."""
ARRIVING_GBPS = 74.0
"""The rate at each multiprocessor, also of what is copied once for several: few steps are on their way at a time."""
EXCHANGE_GBPS = 3000.0
"""The rate of sums between the multiprocessors of a cluster and through memory."""
FIRST_LEVEL_US, SECOND_LEVEL_US = 0.15, 0.2
"""What either level of adding up takes beside sending the sums."""
ALONE_US, DEEP = 0.15, 0.95
"""Where a multiprocessor has room for one block alone: a launch takes longer, as it cannot begin beside the last blocks of the one
before it; but with twice the stages the copies wait for one less often, and reading takes this share of its time."""
FILLED = {1: 0.9, 2: 0.7}
"""The share of a multiprocessor's blocks that read all that memory can give, by their number. With two, the next launch has the
others."""
LEAST_STEPS = 4
"""The steps that a block has at least, but where K has fewer."""
LEAST_K = {"quick": 8192, "default": 4096, "exhaustive": 128}
FEW_ROWS, LEAST_K_OF_FEW, MOST_BYTES_OF_FEW = 32, 2048, 2**27
"""Rows, or columns, beside weights that are read in some tens of microseconds: how a launch begins and ends is a part of it."""
FEW = 64
"""Rows or columns, beside which the other dimension may be long."""
SMALL = 256
"""Rows and columns: a few tiles, which as many clusters share as there is room for."""


def why_not_likely(problem: Problem, device: DeviceInfo, search: str) -> str | None:
    """Why the kernel is not tried in such a search, or None: a division of K pays where tiles are few and the sum is long."""
    small, large = sorted((problem.m, problem.n))
    few = search != "quick" and small <= FEW_ROWS and problem.bytes <= MOST_BYTES_OF_FEW
    if few and problem.k >= LEAST_K_OF_FEW:
        return None
    if problem.k < LEAST_K[search]:
        return f"K is {problem.k}, tried from {LEAST_K[search]} on"
    # A tile of 64 columns takes in as many bytes of 64 rows as of its own columns: multiprocessors just keep up with memory if
    # clusters of two blocks run for all tiles at a time, and not if some of them take in two tiles.
    most = device.sm_count // 2
    tiles = -(-small // FEW) * -(-large // FEW) * problem.batch
    if tiles > most:
        return f"the result has {tiles} tiles of {FEW}x{FEW}, tried with up to {most}"
    if search != "exhaustive" and small > FEW and large * problem.batch > SMALL:
        return f"a result of {problem.m}x{problem.n}: tried with up to {SMALL}x{SMALL}, or {FEW} rows or columns"
    return None


def cluster_counts(shape: Shape, tile_clusters: int, problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
    """How many clusters may share a tile: as many as run at a time, one or two blocks on a multiprocessor.

    ``tile_clusters`` clusters cover the result once. Where tiles are shared, there are never more than run at a time: those with
    room would look for the sums of the others until they lose patience, and leave their work to the last, in twenty times the
    time.
    """
    at_a_time = clusters_at_a_time(device.sm_count, shape.cluster)
    steps = -(-problem.k // shape.block_k)
    most = max(1, steps // (LEAST_STEPS * shape.cluster_k))
    once, nearest = at_a_time // tile_clusters, round(at_a_time / tile_clusters)
    # Where one cluster for each tile leaves multiprocessors idle, a second block on each fills them.
    ordered = (once, nearest) if once > 1 or shape.blocks_per_sm == 1 else (2 * at_a_time // tile_clusters, nearest)
    room = max(shape.blocks_per_sm * at_a_time // tile_clusters, 1)
    return tuple(dict.fromkeys(min(max(groups, 1), most, room) for groups in ordered))


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, tiles, tile_clusters = config.shape, tiles_of(problem, config), clusters_of(problem, config)
    blocks = tiles * config.parts
    busy = min(1.0, blocks / (FILLED[shape.blocks_per_sm] * device.sm_count))
    at_a_time, clusters = clusters_at_a_time(device.sm_count, shape.cluster), tile_clusters * config.clusters_per_tile
    waves = -(-clusters // at_a_time)
    # What tiles of a cluster share is read once for all of them.
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
    """Every shape, either way round, with the likeliest number of clusters for each tile; best first."""
    found = [_filled(shape, problem, device, swap_ab=swap_ab) for shape in SHAPES for swap_ab in (False, True)]
    # Columns of the transpose are stored one by one.
    return sorted(found, key=lambda config: (estimate_us(problem, device, config), config.swap_ab, str(config)))


def _filled(shape: Shape, problem: Problem, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, pdl=True)
    groups = cluster_counts(shape, clusters_of(problem, config), problem, device)
    return min(
        (dataclasses.replace(config, clusters_per_tile=n) for n in groups), key=lambda told: estimate_us(problem, device, told)
    )
