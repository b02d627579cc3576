"""What a search tries of the families that divide long sums: each only where it was measured to have a chance.

Split-K whose programs add to one sum in memory is here as a whole: the order, and with it the last bits, changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ....choice import Choice, Claims
from ....device import DeviceInfo
from ....effort import EFFORT
from ....problem import Problem
from ....problem.operations import DENSE_OPS, QUANTIZED_OPS
from ....problem.rules import why_not
from ..arch import can_overlap
from ..build import KernelChoice
from ..configs import Config, Geometry, tiles_of
from ..legality import Predicate
from ..workspace import Buffers
from .decompose import DecomposedChoice, decomposed_choice, sliced_problem, why_not_decomposed, why_not_slices

MOST_SUMS = 2**20
Best = Callable[[Problem], Sequence[Config]]
"""The configs that the mm template is tried with, best first."""

TILE_BYTES = 64 * 2**10
"""Sums of the tile that a library gives to one multiprocessor."""
WAVES = (1, 2)
"""Slices for which a search tries as many tiles as there are multiprocessors, and twice as many."""
PARTS_OF_SLICE = 4
EXHAUSTIVE_SLICES = (4, 8, 16, 32, 64, 128, 256)
ROW_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class AtomicChoice(KernelChoice):
    """The atomic template with one config."""

    family = "atomic"
    template = "splits/atomic.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """What the family says of the problem, then of the config."""
        return why_not_atomic(problem, device) or why_not_added(problem, device, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Floats are added in the order of arrival."""
        return dataclasses.replace(super().claimed(problem, where), deterministic=not problem.accumulator.is_floating_point)

    @property
    def buffers(self) -> Buffers:
        """The sums of every tile."""
        elements = self.where.tiles * self.config.block_m * self.config.block_n
        return Buffers(dtype=self.problem.accumulator, sums=elements, counters=self.where.tiles)


def why_not_atomic(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the template has nothing for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not(problem, (*DENSE_OPS, *QUANTIZED_OPS))
    if reason is not None:
        return reason
    if device.type == "cuda" and device.capability < 80:
        return f"{device.arch}: no tensor cores for Triton, beside whose absence adding up costs nothing"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    return None


def why_not_added(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem that the template can serve, or None."""
    reason = Predicate(problem, device).check(config)
    if reason is not None:
        return reason
    if config.split_k == 1:
        return "split_k 1: nothing is added up in memory"
    elements = tiles_of(problem, config) * config.block_m * config.block_n
    if elements > MOST_SUMS:
        return f"{elements} sums: at most {MOST_SUMS} are kept at zero between launches"
    return None


def choices_for_long_sums(problem: Problem, device: DeviceInfo, search: str, best: Best) -> Sequence[Choice]:
    """Decompose-K and atomic split-K."""
    return (*decomposed_choices(problem, device, search, best), *atomic_choices(problem, device, search, best))


def atomic_choices(problem: Problem, device: DeviceInfo, search: str, best: Best) -> list[AtomicChoice]:
    """The splits that the mm template is tried with, added up in memory. The settings decide whether they may run."""
    if why_not_atomic(problem, device) is not None:
        return []
    legal = (config for config in best(problem) if config.split_k > 1 and why_not_added(problem, device, config) is None)
    overlaps = can_overlap(device.capability)
    configs = itertools.islice(legal, EFFORT[search].configs["triton:atomic"])
    return [AtomicChoice.of(problem, device, dataclasses.replace(config, pdl=overlaps)) for config in configs]


def decomposed_choices(problem: Problem, device: DeviceInfo, search: str, best: Best) -> list[DecomposedChoice]:
    """K cut into a batch.

    The second kernel adds up on every multiprocessor, where that of split-K leaves a tile to the last program to arrive. This
    outweighs the second launch where FMAs or float64 multiply, whose batches libraries do better than their long sums, and where
    there are so few tiles that each has many parts. Otherwise tensor cores are done before the partial sums are written and read.
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
    """(slices, config, or None for torch's product)."""
    tiles = math.ceil(problem.m * problem.n * problem.accumulator.itemsize / TILE_BYTES)
    if problem.dtype == torch.float64 or (problem.dtype == torch.float32 and problem.precision.input_mode == "ieee"):
        for slices in dict.fromkeys(divisor(problem, waves * device.sm_count // tiles) for waves in WAVES):
            if slices is not None:
                yield slices, None
    elif tiles <= PARTS_OF_SLICE:
        # Each product is divided in some tiles, so that there are fewer partial sums.
        slices = divisor(problem, device.sm_count // PARTS_OF_SLICE)
        if slices is not None:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:1])


def divisor(problem: Problem, most: int) -> int | None:
    """The largest number of slices up to ``most``, and more than half of it, that are equal and begin at whole vectors; None where
    there is none. A slice is not shorter than a side of the result, else there is more to add up than to multiply."""
    most = min(most, problem.k // max(problem.m, problem.n))
    unit = ROW_BYTES // problem.dtype.itemsize
    return next((slices for slices in range(most, max(most // 2, 1), -1) if problem.k % (slices * unit) == 0), None)


def _everything(problem: Problem, device: DeviceInfo, best: Best) -> Iterator[tuple[int, Config | None]]:
    # Torch's product keeps float32 sums of narrower operands on CUDA alone.
    by_torch = device.type == "cuda" or problem.dtype == problem.accumulator
    for slices in EXHAUSTIVE_SLICES:
        if problem.k % slices == 0:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:2])
            if by_torch:
                yield slices, None
