"""Which configs are tried for a problem, best first: a model of what a launch does, one after the other.

Its constants are rates of an H200; for other GPUs they are as good for an order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....device import DeviceInfo
from ....problem import Layout, Problem
from .configs import DEPTH, SHAPES, Config, Shape
from .legality import aligned, by_k, check_config, grid_of, operands_of

__all__ = ["candidates", "copies_us", "estimate_us", "select", "why_not_likely"]

LAUNCH_US = 1.0
STEP_US = 0.3
"""From a stage's arrival to the first of its products, once a step."""
SM_TFLOPS = {True: 10.0, False: 4.5}
"""Of one multiprocessor beyond that, with lines of p along and across K."""
DRAM_GBPS = 4300.0
L2_GBPS = 9000.0
"""From L2 to all multiprocessors; what is copied to several blocks counts once."""
TILE_US, STORED = 1.3, 26000.0
"""A tile's first stage and last sums, and its results in a microsecond."""
PAD_US, PAD_GBPS = 1.2, 4700.0
"""Of the small kernel that copies q, where its lines are not aligned."""
COPIES_LAUNCH_US, COPY_US, COPY_GBPS = 2.2, 1.2, 7500.0
"""Of others, which multiply aligned copies: their launch, and each copy, which stays in L2."""
PRODUCT_TFLOPS, PRODUCT_STEP_US = 650.0, 0.2
"""Of their products, on 132 multiprocessors: large ones, and small ones for each step of K."""
WORTH_TRYING = 1.05
"""Times the time of copies: what the model takes for slower than that is not compiled."""
LIKELY = 1.25
"""Times the least time of the model: what takes longer is tried by an exhaustive search alone."""


def estimate_us(problem: Problem, device: DeviceInfo, config: Config) -> float:
    """The model's time of one launch, in microseconds."""
    shape, (below, beside) = config.shape, grid_of(problem, config)
    p, q, _ = operands_of(problem, swapped=config.swapped)
    tiles, steps = below * beside, -(-problem.k // DEPTH)
    turns = -(-tiles // (device.sm_count // shape.cluster * shape.cluster))
    product_us = 2 * shape.rows * shape.cols * DEPTH / SM_TFLOPS[bool(by_k(p))] / 1e6
    lines = shape.rows / shape.cluster + shape.cols
    arriving_us = min(tiles, device.sm_count) * lines * DEPTH * problem.dtype.itemsize / L2_GBPS / 1e3
    step_us = max(STEP_US + product_us, arriving_us)
    tile_us = TILE_US + shape.rows * shape.cols / STORED
    pad_us = 0.0 if aligned(q) else PAD_US + 2 * _bytes(q) / PAD_GBPS / 1e3
    summing_us = max(turns * steps * step_us, problem.bytes / DRAM_GBPS / 1e3)
    return LAUNCH_US + pad_us + summing_us + turns * tile_us


def copies_us(problem: Problem, device: DeviceInfo) -> float:
    """The same of a product of operands that are copied to aligned lines where theirs are not."""
    unaligned = [x for x in (problem.a, problem.b.transposed) if not aligned(x)]
    copying_us = sum(COPY_US + 2 * _bytes(x) / COPY_GBPS / 1e3 for x in unaligned)
    flops = 2 * problem.m * problem.n * problem.k
    product_us = flops / PRODUCT_TFLOPS / 1e6 * (132 / device.sm_count)
    reading_us = problem.bytes / DRAM_GBPS / 1e3
    return COPIES_LAUNCH_US + copying_us + max(product_us, reading_us, -(-problem.k // DEPTH) * PRODUCT_STEP_US)


def _bytes(operand: Layout) -> int:
    return operand.numel * operand.dtype.itemsize


def candidates(problem: Problem, device: DeviceInfo) -> list[Config]:
    """Every shape, either way round; best first."""
    found = [Config(shape=shape, swapped=swapped) for shape in SHAPES for swapped in (False, True)]
    # Results of the transpose are turned on their way, where it is not asked for.
    return sorted(found, key=lambda config: (round(estimate_us(problem, device, config), 1), config.swapped, str(config)))


def why_not_likely(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no config is tried unless every one is, or None: aligned copies, multiplied by another kernel, take less time.

    A copy costs by the operand's size, a shift in every tile by its steps: shifting pays where sums are short and tiles fill the
    GPU once, and about breaks even where they are long and fill it; it loses where tiles are few, which others split along K.
    """
    legal = [config for config in candidates(problem, device) if check_config(problem, device, config) is None]
    least_us = min((estimate_us(problem, device, config) for config in legal), default=0.0)
    other_us = copies_us(problem, device)
    if least_us > WORTH_TRYING * other_us:
        return f"about {least_us:.0f} µs, and about {other_us:.0f} µs for a product of aligned copies"
    return None


def select(problem: Problem, device: DeviceInfo, ordered: Sequence[Config], count: int) -> list[Config]:
    """The likely ones of ``ordered``, at most ``count`` and no shape twice."""
    likeliest: dict[Shape, Config] = {}
    for config in ordered:
        likeliest.setdefault(config.shape, config)
    times_us = {config: estimate_us(problem, device, config) for config in likeliest.values()}
    return [config for config, time_us in times_us.items() if time_us <= LIKELY * min(times_us.values())][:count]
