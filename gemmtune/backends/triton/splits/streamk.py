"""Stream-K: the blocks of all tiles' sums are dealt out evenly, so that no multiprocessor waits for a last, mostly empty wave.

The published method (Osama et al., "Stream-K", PPoPP 2023), with the remainder of the tiles and one whole wave cut in shares, and
the other tiles worked off whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....device import DeviceInfo
from ....problem import Problem
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..configs import Config
from ..descriptors import turned
from ..geometry import Geometry
from ..launch import Blocks
from ..legality import Predicate
from ..persistent.choice import operand_blocks
from ..spec import KernelSpec
from .stream_configs import StreamConfig, stream_geometry, stream_resources

__all__ = ["StreamChoice"]


@dataclass(frozen=True, kw_only=True)
class StreamChoice(KernelChoice):
    """The stream-K template with one config."""

    family = "streamk"
    template = "splits/streamk.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """The programs that are resident share the blocks of all tiles."""
        assert isinstance(config, StreamConfig)
        return stream_geometry(problem, device, config)

    @property
    def _config(self) -> StreamConfig:
        assert isinstance(self.config, StreamConfig)
        return self.config

    @property
    def spec(self) -> KernelSpec:
        """Blocks begin anywhere along K, as in a split."""
        return dataclasses.replace(super().spec, split=True)

    @property
    def values(self) -> Mapping[str, Any]:
        """Whether there are descriptors, and how their blocks lie."""
        problem = self.problem
        return {"described": self._config.described, "a_turned": turned(problem.a), "b_turned": turned(problem.b)}

    @property
    def blocks(self) -> Blocks:
        """Blocks of a and b, where the copy engine moves them."""
        return operand_blocks(self.problem, self.config) if self._config.described else {}

    def expected(self, device: DeviceInfo) -> Expected:
        """The instruction of the mm template, and the upper bound of the shared memory."""
        need = stream_resources(self.problem, device, self._config)
        return Expected(instruction=instruction(Predicate(self.problem, device), self.config), smem_bytes=need.smem_bytes)
