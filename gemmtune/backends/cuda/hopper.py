"""Facts of SM90, the architecture whose own instructions the kernels have."""

from __future__ import annotations

import torch

CAPABILITY = 90
ARCH = "sm_90a"
"""What compilers call it, with the instructions that no other architecture has."""

SMEM_BYTES = 227 * 1024
"""The shared memory that a block can have."""
SYSTEM_BYTES = 1024
"""What the system takes of shared memory for each block."""
HALF_SMEM_BYTES = (SMEM_BYTES + SYSTEM_BYTES) // 2 - SYSTEM_BYTES
"""The shared memory of each of two blocks on one multiprocessor."""
BARRIER_BYTES = 8
"""The size of an mbarrier."""

SCHEDULERS, SCHEDULER_REGISTERS, MOST_REGISTERS = 4, 16384, 255
"""The schedulers of a multiprocessor, the registers of each of them, and the most that a thread can name."""
GIVEN_REGISTERS, LEFT_REGISTERS = 40, 232
"""The registers of a thread that copies, and of those of two warp groups, to which it leaves the others."""

MOST_CLUSTER = 8
"""The blocks of a cluster that every GPU with clusters has room for."""
IDLE_CLUSTERS = {1: 0, 2: 0, 3: 3, 4: 3, 8: 1}
"""Clusters, by their blocks, that an H200 has multiprocessors for but no room in its graphics processing clusters."""
MOST_GRID = 2**16 - 1
"""The second and third dimension of a grid."""

TMA_BYTES = 16
"""What TMA asks addresses and pitches to be multiples of."""
LINE_BYTES = 128
"""The longest line that TMA swizzles."""
SWIZZLED_LINES = 8
"""The lines after which the pattern of a swizzle repeats itself."""
MOST_BOX = 256
"""The elements that one TMA copy has along a dimension at most."""

WGMMA_M = 64
"""The rows that a warp group multiplies with one instruction."""
WGMMA = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""Products of warp groups in SASS, by the dtype of their operands."""
MMA = {torch.bfloat16: "HMMA.*.F32.BF16", torch.float16: "HMMA.*.F32"}
"""Products of warps in SASS, by the dtype of their operands."""


def registers_per_thread(threads: int, blocks: int) -> int:
    """The registers that a thread can have where so many blocks share a multiprocessor, whose warps its schedulers divide."""
    warps = -(-threads // 32 * blocks // SCHEDULERS)
    return min(SCHEDULER_REGISTERS // (32 * warps) // 8 * 8, MOST_REGISTERS)


def clusters_at_a_time(sm_count: int, cluster: int) -> int:
    """How many clusters of so many blocks run at a time, with one block on a multiprocessor."""
    return max(sm_count // cluster - IDLE_CLUSTERS[cluster], 1)
