"""Products whose programs sum parts of K one after the other, with the bits of split-K.

With many tiles this needs no partial sums in memory. Both kernels belong to one reduction class.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from ...choice import Claims
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...problem.rules import why_not_dense
from .configs import MOST_DIRECT_SPLITS, Config, Geometry, geometry
from .kernel_choice import KernelChoice
from .legality import Predicate
from .reductions import summed_by_steps

SUMS_OF_WARP = 32 * 64
"""Elements of a tile for each warp: 64 registers of a thread, twice, beside those of the operands."""
MOST_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsConfig(Config):
    """Config of one instance of the runs template. A program sums K in ``runs`` parts."""

    runs: int = 1

    __str__ = Config.__str__

    @classmethod
    def of(cls, config: Config, runs: int) -> Self:
        """Return the config of the mm template with K in ``runs`` parts, and a tile of which two sums fit in registers."""
        fields: dict[str, Any] = {name: getattr(config, name) for name in Config.__dataclass_fields__}
        warps = MOST_WARPS if config.block_m * config.block_n > SUMS_OF_WARP * config.warps else config.warps
        block_n = min(config.block_n, max(SUMS_OF_WARP * warps // config.block_m, 16))
        return cls(**fields | {"split_k": 1, "runs": runs, "warps": warps, "block_n": block_n})

    @property
    def variant(self) -> str:
        return f"_r{self.runs}"

    @property
    def divided(self) -> Config:
        """Config of the mm template that splits K into the same parts."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in Config.__dataclass_fields__}
        return Config(**fields | {"split_k": self.runs})


@dataclass(frozen=True, kw_only=True)
class InRuns(KernelChoice):
    """Base of choices whose programs sum each part of K alone, with a RunsConfig."""

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        assert isinstance(config, RunsConfig)
        length = geometry(problem, config.divided).k_per_split
        return dataclasses.replace(super().divided(problem, device, config), k_per_split=length)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        return dataclasses.replace(super().claimed(problem, where), splits=-(-problem.k // where.k_per_split))

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:  # noqa: ARG003
        """Return the reduction of the split kernel: parts are added in rising order."""
        assert isinstance(config, RunsConfig)
        return summed_by_steps(problem, geometry(problem, config.divided), config, device)


def why_not_in_runs(problem: Problem, config: RunsConfig) -> str | None:
    """Return why programs may not sum the parts of a config, or None."""
    if problem.alpha == "zero" or not 1 < config.runs <= MOST_DIRECT_SPLITS:
        return f"{config.runs} parts of K: expected 2 to {MOST_DIRECT_SPLITS}, and an alpha other than 0"
    parts = geometry(problem, config.divided).splits
    return None if parts == config.runs else f"K = {problem.k} has {parts} parts of whole blocks of {config.block_k}"


@dataclass(frozen=True, kw_only=True)
class RunsChoice(InRuns):
    """Choice of the runs template with one config."""

    family = "runs"
    template = "runs.py.jinja"

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, RunsConfig)
        reason = why_not_dense(problem) or Predicate(problem, device).check(dataclasses.replace(config, runs=1))
        return reason or why_not_in_runs(problem, config)

    @property
    def legal_between(self) -> bool:
        """True, because M may be too small or too large for the tile."""
        return True
