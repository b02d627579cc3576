"""Choices of the persistent template."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ....choice import Claims, Kernel
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.compiled import Artifact
from ..artifact import persistent_artifact
from ..build import KernelChoice, target_of
from ..configs import Config
from ..geometry import geometry
from ..legality import Predicate
from ..source import Source, render_source
from .configs import halved, persistent_configs, persistent_resources, programs_of, stores_described, turned
from .launch import bind_described, interpret_described

__all__ = ["PersistentChoice", "persistent_choice", "persistent_choices"]

TEMPLATE = "persistent/persistent.py.jinja"
MOST_ALIKE = 1
"""Configs of one tile that differ in their stages alone."""


@dataclass(frozen=True, kw_only=True)
class PersistentChoice(KernelChoice):
    """The persistent template with one config, launched with ``programs`` programs."""

    programs: int = field(repr=False)

    @functools.cached_property
    def source(self) -> Source:
        """The rendered kernel."""
        values = (
            ("a_turned", turned(self.problem.a)),
            ("b_turned", turned(self.problem.b)),
            ("halved", halved(self.config)),
        )
        return render_source(self.spec, TEMPLATE, values=values, described=described_blocks(self.problem, self.config))

    @functools.cached_property
    def content_hash(self) -> str:
        """Over the kernel, the config and the number of programs."""
        return hashlib.sha256(f"{self._kernel_key} {self.config} {self.programs}".encode()).hexdigest()

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The only kernel."""
        need = persistent_resources(self.problem, device, self.config)
        return (persistent_artifact(self.kernel(), Predicate(self.problem, device), self.config, need.smem_bytes),)

    def bind(self, loaded: Any) -> Kernel:
        """Bind to the problem. On a GPU to the current device, which must be the current device at each call."""
        grid, blocks = (self.programs, 1, 1), dict(described_blocks(self.problem, self.config))
        where, arguments = geometry(self.problem, self.config), self.source.arguments
        if self.target is None:
            return Kernel(run=interpret_described(loaded, arguments, self.problem, where, grid, blocks))
        return Kernel(run=bind_described(loaded, arguments, self.problem, where, grid, blocks, pdl=self.config.pdl))


def described_blocks(problem: Problem, config: Config) -> tuple[tuple[str, tuple[int, int]], ...]:
    """The operands that the kernel has as tensor descriptors, with the lines and elements of a line that are moved at a time."""
    m, n, k = config.block_m, config.block_n, config.block_k
    blocks = [("a", (k, m) if turned(problem.a) else (m, k)), ("b", (n, k) if turned(problem.b) else (k, n))]
    if stores_described(problem):
        blocks.append(("out", (m, n // 2 if halved(config) else n)))
    return tuple(blocks)


def persistent_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[PersistentChoice]:
    """Up to ``count`` choices, the best by the model first; all for None, none where the template has nothing to offer."""
    configs = persistent_configs(problem, device)
    if count is not None:
        alike: Counter[tuple[int, ...]] = Counter()
        chosen = []
        for config in configs:
            tile = (*config.tile, config.block_k, config.warps)
            if alike[tile] < MOST_ALIKE:
                chosen.append(config)
                alike[tile] += 1
        configs = tuple(chosen[:count])
    return [persistent_choice(problem, device, config) for config in configs]


def persistent_choice(problem: Problem, device: DeviceInfo, config: Config) -> PersistentChoice:
    """The choice that runs ``problem`` with ``config``, which must be legal for both."""
    programs = programs_of(problem, device, config)
    return PersistentChoice(
        name=f"triton:persistent_{config}",
        backend="triton",
        problem=problem,
        claims=Claims(accumulate=problem.accumulator, partials=problem.accumulator, epilogue_input=problem.accumulator),
        info={
            "template": "persistent",
            "tile": [config.block_m, config.block_n, config.block_k],
            "stages": config.stages,
            "warps": config.warps,
            "group_m": config.group_m,
            "pdl": config.pdl,
            "grid": [programs, 1, 1],
        },
        config=config,
        target=target_of(device),
        programs=programs,
    )
