"""Choices of the persistent template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....device import DeviceInfo
from ....problem import Problem
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..configs import Config, unalike
from ..descriptors import turned
from ..geometry import Geometry, geometry
from ..launch import Blocks
from ..legality import Predicate
from .configs import halved, persistent_configs, persistent_resources, programs_of, stores_described

__all__ = ["PersistentChoice", "operand_blocks", "persistent_choices"]

MOST_ALIKE = 1
"""Configs of one tile that differ in their stages alone."""


@dataclass(frozen=True, kw_only=True)
class PersistentChoice(KernelChoice):
    """The persistent template with one config."""

    family = "persistent"
    template = "persistent/persistent.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """The programs that are resident go from tile to tile."""
        return dataclasses.replace(geometry(problem, config), programs=programs_of(problem, device, config))

    @property
    def values(self) -> Mapping[str, Any]:
        """How the blocks lie, and whether a tile is stored in two halves."""
        return {"a_turned": turned(self.problem.a), "b_turned": turned(self.problem.b), "halved": halved(self.config)}

    @property
    def blocks(self) -> Blocks:
        """Blocks of a and b, and of out where that is stored through a descriptor."""
        out = (self.config.block_m, self.config.block_n // (2 if halved(self.config) else 1))
        return operand_blocks(self.problem, self.config) | ({"out": out} if stores_described(self.problem) else {})

    def expected(self, device: DeviceInfo) -> Expected:
        """What the copy engine feeds a warp group with."""
        need = persistent_resources(self.problem, device, self.config)
        return Expected(instruction=instruction(Predicate(self.problem, device), self.config), smem_bytes=need.smem_bytes)


def operand_blocks(problem: Problem, config: Config) -> dict[str, tuple[int, int]]:
    """The lines, and elements of a line, that are moved at a time of a and b as tensor descriptors."""
    m, n, k = config.block_m, config.block_n, config.block_k
    return {"a": (k, m) if turned(problem.a) else (m, k), "b": (n, k) if turned(problem.b) else (k, n)}


def persistent_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[PersistentChoice]:
    """Up to ``count`` choices, the best by the model first; all for None, none where the template has nothing to offer."""
    configs = unalike(persistent_configs(problem, device), count, MOST_ALIKE)
    return [PersistentChoice.of(problem, device, config) for config in configs]
