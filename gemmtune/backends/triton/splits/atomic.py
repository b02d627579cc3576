"""Split-K whose programs add to one sum in memory: the order, and with it the last bits, changes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ....problem.operations import DENSE_OPS, QUANTIZED_OPS
from ....problem.rules import why_not
from ..build import KernelChoice
from ..configs import Config, Geometry, tiles_of
from ..legality import Predicate
from ..workspace import Buffers

__all__ = ["AtomicChoice", "why_not_added", "why_not_atomic"]

MOST_SUMS = 2**20


@dataclass(frozen=True, kw_only=True)
class AtomicChoice(KernelChoice):
    """The atomic template with one config."""

    family = "atomic"
    template = "splits/atomic.py.jinja"

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
