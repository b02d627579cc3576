"""Choices of the mm template."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...choice import Choice
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from .configs import Config, Geometry
from .kernel_choice import KernelChoice, KernelsChoice
from .reductions import summed_by_steps
from .runs import RunsChoice, RunsConfig

__all__ = ["KernelChoice", "KernelsChoice", "TritonChoice"]


@dataclass(frozen=True, kw_only=True)
class TritonChoice(KernelChoice):
    """Choice of the mm template with one config."""

    family = "mm"
    template = "mm.py.jinja"

    @classmethod
    def label(cls, problem: Problem) -> str:
        """Return the operation; dense ones are named mm or bmm."""
        return problem.op if problem.op in QUANTIZED_OPS else "bmm" if problem.batched else "mm"

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        return summed_by_steps(problem, where, config, device)

    def with_parts(self, count: int, device: DeviceInfo) -> Sequence[Choice]:
        """Return the choice with as many splits, and one whose programs sum the parts in turn, where they are legal."""
        config, problem = dataclasses.replace(self.config, split_k=count), self.problem
        found: list[Choice] = [self.of(problem, device, config)] if self.why_not(problem, device, config) is None else []
        runs = RunsConfig.of(self.config, count)
        return [*found, *([RunsChoice.of(problem, device, runs)] if RunsChoice.why_not(problem, device, runs) is None else [])]

    @property
    def legal_between(self) -> bool:
        """True, because M may be too small or too large for the tile."""
        return True
