"""Stream-K: the blocks of all tiles' sums are dealt out evenly, so that no multiprocessor waits for a last, mostly empty wave.

The published method (Osama et al., "Stream-K", PPoPP 2023), with the remainder of the tiles and one whole wave cut in shares, and
the other tiles worked off whole.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

from ....choice import Kernel
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.compiled import Artifact
from ..artifact import persistent_artifact
from ..build import KernelChoice, tiled
from ..legality import Predicate
from ..persistent.configs import turned
from ..persistent.launch import Blocks, bind_described, interpret_described
from ..source import Source, render_source
from ..spec import KernelSpec
from ..workspace import Buffers
from .stream_configs import StreamConfig, StreamGeometry, stream_geometry, stream_resources

__all__ = ["StreamChoice", "stream_choice"]

TEMPLATE = "splits/streamk.py.jinja"


@dataclass(frozen=True, kw_only=True)
class StreamChoice(KernelChoice):
    """The stream-K template with one config."""

    where: StreamGeometry = field(repr=False)

    @property
    def _config(self) -> StreamConfig:
        assert isinstance(self.config, StreamConfig)
        return self.config

    @property
    def spec(self) -> KernelSpec:
        """Blocks begin anywhere along K, as in a split."""
        return dataclasses.replace(super().spec, split=True)

    @functools.cached_property
    def source(self) -> Source:
        """The rendered kernel."""
        values = (
            ("described", self._config.described),
            ("a_turned", turned(self.problem.a)),
            ("b_turned", turned(self.problem.b)),
        )
        return render_source(self.spec, TEMPLATE, values=values, described=tuple(self._blocks.items()))

    @property
    def _blocks(self) -> Blocks:
        if not self._config.described:
            return {}
        m, n, k = self.config.block_m, self.config.block_n, self.config.block_k
        return {
            "a": (k, m) if turned(self.problem.a) else (m, k),
            "b": (n, k) if turned(self.problem.b) else (k, n),
        }

    @functools.cached_property
    def content_hash(self) -> str:
        """Over the kernel, the config and the number of programs."""
        return hashlib.sha256(f"{self._kernel_key} {self.config} {self.where.programs}".encode()).hexdigest()

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The only kernel."""
        need = stream_resources(self.problem, device, self._config).smem_bytes
        return (persistent_artifact(self.kernel(), Predicate(self.problem, device), self.config, need),)

    def bind(self, loaded: Any) -> Kernel:
        """Bind to the problem. On a GPU to the current device, which must be the current device at each call."""
        where, arguments, blocks = self.where, self.source.arguments, self._blocks
        elements = self.config.block_m * self.config.block_n * where.slots
        buffers = Buffers(dtype=self.problem.accumulator, partials=elements, counters=where.counters)
        if self.target is None:
            return Kernel(run=interpret_described(loaded, arguments, self.problem, where, where.grid, blocks, buffers))
        return Kernel(run=bind_described(loaded, arguments, self.problem, where, where.grid, blocks, buffers, pdl=self.config.pdl))


def stream_choice(problem: Problem, device: DeviceInfo, config: StreamConfig) -> StreamChoice:
    """The choice that runs ``problem`` with ``config``, which must be legal for both."""
    where = stream_geometry(problem, device, config)
    fields = tiled(problem, device, config, where, "streamk")
    fields["info"]["schedule"] = "streamk"
    return StreamChoice(**fields, where=where)
