"""Reduction classes of templates that sum K in steps of block_k."""

from ...device import DeviceInfo
from ...numerics.reduction import Reduction, numbers_of_weights, parts_of, reduction_of
from ...problem import Problem
from ...problem.operations import OPERATIONS
from .configs import Config, Geometry
from .legality import Predicate
from .quantized import Quantized, quantized_of


def summed_by_steps(
    problem: Problem, where: Geometry, config: Config, device: DeviceInfo, *, promoted_every: int | None = None, own: str = ""
) -> Reduction | None:
    """Return the reduction of a sum of steps, or of one per split, added in rising order, many in groups. None: unknown."""
    if where.splits > 1 and problem.c is not None:
        return None
    lengths = parts_of(problem.k, where.k_per_split) if where.splits > 1 else ()
    grouped = where.splits > where.splits_per_group
    capability = device.capability if device.type == "cuda" else 0
    quantized = quantized_of(problem, config.block_k, capability=capability)
    if quantized is not None and not own:
        by_group = Predicate(problem, device).instruction(config) == "warp_group"
        narrow = quantized.imprecise if by_group else None  # other instructions multiply 8-bit floats as float16
        promoted_every, own = config.block_k if quantized.fresh else narrow, _numbers(problem, quantized, by_group=by_group)
    if device.type == "cpu":  # the interpreter multiplies each step with numpy, whose order depends on the sizes of the tile
        own = f"interpreted {config.block_m}x{config.block_n}x{config.block_k}"
    return reduction_of(
        problem,
        "triton",
        parts=lengths,
        order=f"added in groups of {where.splits_per_group}" if grouped else "",
        promoted_every=promoted_every,
        own=own,
    )


def summed_by_lanes(problem: Problem, config: Config, own: str = "") -> Reduction:
    """Return the reduction of fused multiply-adds in block_k lanes. The layout of the tile decides how lanes are added up."""
    order = f"{config.block_k} lanes added by {config.warps} warps of {config.block_n} columns"
    return reduction_of(problem, "triton", unit="fma", order=order, own=own)


def _numbers(problem: Problem, quantized: Quantized, *, by_group: bool) -> str:
    """Return the name of the arithmetic of scaled or converted numbers; empty if kernels multiply them as they are.

    Single warps convert weights where they were loaded, and so divide K among instructions by the width of a weight.
    """
    if OPERATIONS[quantized.op].widens_b:
        return numbers_of_weights(problem, "triton") if by_group else "triton words of a thread"
    return "triton" if quantized.on_sums or len(quantized.on_result) > 1 or quantized.product != problem.dtype else ""
