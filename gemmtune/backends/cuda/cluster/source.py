"""The text of the kernel."""

from __future__ import annotations

from ....problem import Problem
from ...cpp.printer import STORAGE_TYPES
from ..epilogue import epilogue_values
from ..parameters import structs_of
from ..source import COMMON, ELEMENTS, PRODUCTS, KernelSource, flag
from .configs import Config
from .legality import by_k, operands_of
from .parameters import KERNEL, Work

__all__ = ["source"]

FILES = (
    "device.cuh.jinja",
    "warp_groups.cuh.jinja",
    "steps.cuh.jinja",
    "exchange.cuh.jinja",
    "store.cuh.jinja",
    "groups.cuh.jinja",
)
PATIENCE = 40
"""How often a warp looks for the sums of other clusters before it leaves its work to the last of them."""


def source(problem: Problem, config: Config) -> KernelSource:
    """The same for every size and stride, and for every division of K among clusters."""
    shape, out_type = config.shape, STORAGE_TYPES[problem.out.dtype]
    p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
    return KernelSource(
        kernel=KERNEL,
        files=((__package__, "cluster.cu.jinja"), *COMMON, PRODUCTS, *((__package__, file) for file in FILES)),
        values=epilogue_values(problem)
        | {
            "name": str(shape),
            "structs": structs_of(
                Work, {"out": f"{out_type}*", "parts": "uint4*", "arrivals": "unsigned long long*", "left": "unsigned*"}
            ),
            "element": ELEMENTS[problem.dtype],
            "out_type": out_type,
            "block_m": shape.block_m,
            "block_n": shape.block_n,
            "block_k": shape.block_k,
            "stages": shape.stages,
            "cluster_k": shape.cluster_k,
            "cluster_m": shape.cluster_m,
            "cluster_n": shape.cluster_n,
            "blocks_per_sm": shape.blocks_per_sm,
            "threads": shape.threads,
            "shared_bytes": shape.shared_bytes,
            "in_flight": shape.in_flight,
            "p_by_k": flag(bool(by_k(p))),
            "q_by_k": flag(bool(by_k(q))),
            "p_transposed": int(not by_k(p)),
            "q_transposed": int(not by_k(q)),
            "patience": PATIENCE,
        },
    )
