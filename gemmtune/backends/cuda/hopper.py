"""Facts of SM90, the only architecture that the kernels target."""

import torch

CAPABILITY = 90
ARCH = "sm_90a"
"""Compiler name of SM90 with its architecture-specific instructions."""

SMEM_BYTES = 227 * 1024
"""Maximum shared memory of a block."""
SYSTEM_BYTES = 1024
"""Shared memory that the system reserves for each block."""
HALF_SMEM_BYTES = (SMEM_BYTES + SYSTEM_BYTES) // 2 - SYSTEM_BYTES
"""Maximum shared memory of a block if two blocks share a multiprocessor."""
BARRIER_BYTES = 8
"""Size of an mbarrier."""

SCHEDULERS, SCHEDULER_REGISTERS, MOST_REGISTERS = 4, 16384, 255
"""Schedulers of a multiprocessor, registers of each scheduler, and the most registers that a thread can address."""
GIVEN_REGISTERS, LEFT_REGISTERS = 40, 232
"""Registers of a copying thread, and of a thread in one of the two warp groups that get the rest (setmaxnreg)."""

MOST_CLUSTER = 8
"""Portable cluster limit: every GPU with clusters has room for this many blocks."""
IDLE_CLUSTERS = {1: 0, 2: 0, 3: 6, 4: 3, 8: 1}
"""Clusters, by size, that a GPU has multiprocessors for but cannot place in its graphics processing clusters.

GPUs of one model differ: an H200 places 41 clusters of three, some H100s fewer than 40, and 40 take twice as long as 36.
"""
MOST_GRID = 2**16 - 1
"""Maximum second and third grid dimension."""

TMA_BYTES = 16
"""Alignment that TMA requires of addresses and pitches."""
LINE_BYTES = 128
"""Longest line that TMA swizzles."""
SWIZZLED_LINES = 8
"""Lines after which the swizzle pattern repeats."""
MOST_BOX = 256
"""Maximum elements of a TMA box along one dimension."""

WGMMA_M = 64
"""Rows that a warp group multiplies with one instruction."""
WGMMA = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""SASS patterns of warp-group products, by operand dtype."""
MMA = {torch.bfloat16: "HMMA.*.F32.BF16", torch.float16: "HMMA.*.F32"}
"""SASS patterns of warp products (mma), by operand dtype."""


def registers_per_thread(threads: int, blocks: int) -> int:
    """Return the most registers per thread if ``blocks`` blocks of ``threads`` threads share a multiprocessor."""
    warps = -(-threads // 32 * blocks // SCHEDULERS)
    return min(SCHEDULER_REGISTERS // (32 * warps) // 8 * 8, MOST_REGISTERS)


def clusters_at_a_time(sm_count: int, cluster: int) -> int:
    """Return how many clusters of ``cluster`` blocks run at once, with one block per multiprocessor."""
    return max(sm_count // cluster - IDLE_CLUSTERS[cluster], 1)
