"""Candidates of decompose-K, only for problems where measurements gave it a chance."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ..arch import can_overlap
from ..configs import Config
from .decompose import DecomposedChoice, decomposed_choice, sliced_problem, why_not_decomposed, why_not_slices

Best = Callable[[Problem], Sequence[Config]]
"""Function that returns the configs of the mm template for a problem, best first."""

TILE_BYTES = 64 * 2**10
"""Bytes of sums in the tile that a library gives to one multiprocessor."""
WAVES = (1, 2)
"""Waves of tiles for which a search picks numbers of slices."""
PARTS_OF_SLICE = 4
EXHAUSTIVE_SLICES = (4, 8, 16, 32, 64, 128, 256)
ROW_BYTES = 16


def decomposed_choices(problem: Problem, device: DeviceInfo, search: str, best: Best) -> list[DecomposedChoice]:
    """Return the decompose-K choices.

    The second kernel adds up on every multiprocessor, while split-K leaves a tile to the last program to arrive. This outweighs the
    second launch in two cases. FMAs or float64 multiply, because libraries compute such batches better than long sums. Or there are
    so few tiles that each has many parts. Otherwise tensor cores finish before the partial sums are written and read.
    """
    if search == "quick" or why_not_decomposed(problem, device) is not None:
        return []
    overlaps = can_overlap(device.capability)
    return [
        decomposed_choice(problem, device, slices, config, pdl=overlaps)
        for slices, config in (_everything if search == "exhaustive" else _likely)(problem, device, best)
        if why_not_slices(problem, slices) is None
    ]


def _likely(problem: Problem, device: DeviceInfo, best: Best) -> Iterator[tuple[int, Config | None]]:
    """Yield (slices, config) pairs; the config is None for torch's product."""
    tiles = math.ceil(problem.m * problem.n * problem.accumulator.itemsize / TILE_BYTES)
    if problem.dtype == torch.float64 or (problem.dtype == torch.float32 and problem.precision.input_mode == "ieee"):
        for slices in dict.fromkeys(divisor(problem, waves * device.sm_count // tiles) for waves in WAVES):
            if slices is not None:
                yield slices, None
    elif tiles <= PARTS_OF_SLICE:
        # Each product covers several tiles, so that there are fewer partial sums.
        slices = divisor(problem, device.sm_count // PARTS_OF_SLICE)
        if slices is not None:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:1])


def divisor(problem: Problem, most: int) -> int | None:
    """Return the largest number of equal slices up to ``most`` and above its half, or None.

    Slices start at whole vectors. A slice is not shorter than a side of the result, or adding up would cost more than multiplying.
    """
    most = min(most, problem.k // max(problem.m, problem.n))
    unit = ROW_BYTES // problem.dtype.itemsize
    return next((slices for slices in range(most, max(most // 2, 1), -1) if problem.k % (slices * unit) == 0), None)


def _everything(problem: Problem, device: DeviceInfo, best: Best) -> Iterator[tuple[int, Config | None]]:
    # On CUDA only, torch's product keeps float32 sums of narrower operands.
    by_torch = device.type == "cuda" or problem.dtype == problem.accumulator
    for slices in EXHAUSTIVE_SLICES:
        if problem.k % slices == 0:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:2])
            if by_torch:
                yield slices, None
