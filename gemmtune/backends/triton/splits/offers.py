"""Candidates of the families that divide long sums, each only for problems where measurements gave it a chance.

This module also holds atomic split-K, whose programs add to one sum in memory. Its order of additions, and so the last bits,
varies.
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
"""Function that returns the configs of the mm template for a problem, best first."""

TILE_BYTES = 64 * 2**10
"""Bytes of sums in the tile that a library gives to one multiprocessor."""
WAVES = (1, 2)
"""Waves of tiles for which a search picks numbers of slices."""
PARTS_OF_SLICE = 4
EXHAUSTIVE_SLICES = (4, 8, 16, 32, 64, 128, 256)
ROW_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class AtomicChoice(KernelChoice):
    """Choice of the atomic template with one config."""

    family = "atomic"
    template = "splits/atomic.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """Return why the family or this config may not run the problem, or None."""
        return why_not_atomic(problem, device) or why_not_added(problem, device, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims; floats are added in the order of arrival, so results are not deterministic."""
        return dataclasses.replace(super().claimed(problem, where), deterministic=not problem.accumulator.is_floating_point)

    @property
    def buffers(self) -> Buffers:
        """Buffers for the sums of every tile."""
        elements = self.where.tiles * self.config.block_m * self.config.block_n
        return Buffers(dtype=self.problem.accumulator, sums=elements, counters=self.where.tiles)


def why_not_atomic(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why the template does not serve the problem on this device, or None.

    ``check_problem`` must have found nothing.
    """
    reason = why_not(problem, (*DENSE_OPS, *QUANTIZED_OPS))
    if reason is not None:
        return reason
    if device.type == "cuda" and device.capability < 80:
        return f"{device.arch}: no tensor cores for Triton, so atomic split-K has no benefit"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    return None


def why_not_added(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Return why ``config`` may not be offered for a problem that the template serves, or None."""
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
    """Return the choices of decompose-K and atomic split-K."""
    return (*decomposed_choices(problem, device, search, best), *atomic_choices(problem, device, search, best))


def atomic_choices(problem: Problem, device: DeviceInfo, search: str, best: Best) -> list[AtomicChoice]:
    """Return the mm template's split-K configs with atomic additions. Settings decide if they may run."""
    if why_not_atomic(problem, device) is not None:
        return []
    legal = (config for config in best(problem) if config.split_k > 1 and why_not_added(problem, device, config) is None)
    overlaps = can_overlap(device.capability)
    configs = itertools.islice(legal, EFFORT[search].configs["triton:atomic"])
    return [AtomicChoice.of(problem, device, dataclasses.replace(config, pdl=overlaps)) for config in configs]


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
