"""The text of the kernel."""

from __future__ import annotations

import torch

from ....problem import Problem
from ..mixed.source import PTX, WORK, mixed_values
from ..mixed.weights import weights_of
from ..source import COMMON, PRODUCTS, KernelSource
from .configs import Config
from .parameters import KERNEL, Work
from .rank import CLUSTER_SIZES

__all__ = ["source"]

FILES = ("device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja", "store.cuh.jinja")


def source(problem: Problem, config: Config) -> KernelSource:
    """The same for every size and stride, and for every division of K among blocks."""
    shape, weights = config.shape, weights_of(problem)
    return KernelSource(
        kernel=KERNEL,
        files=((__package__, "wgmma.cu.jinja"), *COMMON, PRODUCTS, PTX, WORK, *((__package__, file) for file in FILES)),
        values=mixed_values(problem, Work)
        | {
            "name": f"i{weights.bits}_{shape.label(weights)}",
            "block_m": shape.block_m,
            "warp_groups": shape.warp_groups,
            "col_tiles": shape.col_tiles,
            "line_bytes": shape.line_bytes,
            "stages": shape.stages,
            "k16_batch": shape.k16_batch_of(weights),
            "blocks_per_sm": shape.blocks_per_sm,
            "room_bytes": shape.room_bytes,
            "threads": shape.threads,
            "shared_bytes": [shape.shared_bytes(weights, cluster_k) for cluster_k in CLUSTER_SIZES],
            "scaled": weights.scale is not None and not weights.scale.group,
            "direct": problem.epilogue is None and problem.out.dtype != torch.float32,
        },
    )
