"""The text of the kernel."""

from __future__ import annotations

from ....problem import Problem
from ..mixed.source import PTX, WORK, mixed_values
from ..mixed.weights import weights_of
from ..source import COMMON, KernelSource
from .configs import Config
from .parameters import KERNEL, Work

__all__ = ["source"]

FILES = ("device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja", "store.cuh.jinja")


def source(problem: Problem, config: Config) -> KernelSource:
    """The same for every size and stride, and for every division of K among blocks."""
    shape, weights = config.shape, weights_of(problem)
    return KernelSource(
        kernel=KERNEL,
        files=((__package__, "skinny.cu.jinja"), *COMMON, PTX, WORK, *((__package__, file) for file in FILES)),
        values=mixed_values(problem, Work)
        | {
            "name": f"i{weights.bits}_{shape.label(weights)}",
            "block_m": shape.block_m,
            "block_n": shape.block_n,
            "stages": shape.stages,
            "warps_n": shape.warps_n,
            "warps_k": shape.warps_k,
            "blocks_per_sm": shape.blocks_per_sm(weights),
            "threads": shape.threads,
            "shared_bytes": [shape.shared_bytes(weights, cluster_k) for cluster_k in (1, 2)],
        },
    )
