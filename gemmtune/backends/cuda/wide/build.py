"""The kernel for more rows with one config as a choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ..mixed.choice import MixedChoice
from ..mixed.source import asked_of
from ..mixed.weights import weights_of
from .configs import Config
from .legality import check_config
from .rank import BLOCKS
from .source import KERNEL, Source

__all__ = ["WideChoice"]

INSTRUCTIONS = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""In SASS, by the dtype of a."""


@dataclass(frozen=True, kw_only=True)
class WideChoice(MixedChoice[Config]):
    """The kernel for more rows with one config, for ``device``."""

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo) -> Self:
        """The choice of ``config``, which must be legal for both."""
        weights, shape = weights_of(problem), config.shape
        info = {
            "tile": [shape.rows, shape.cols, shape.depth(weights)],
            "stages": shape.stages,
            "warps": shape.threads // 32,
            "cluster": config.blocks,
        }
        return cls.named(
            f"wide_i{weights.bits}_{config.label(weights)}",
            config,
            problem,
            device,
            splits=config.blocks,
            rounds=weights.zero is not None or bool(weights.along_k),
            info=info,
        )

    def near(self) -> Iterator[Config]:
        """How it begins, and how many blocks of a cluster divide K, one more or less."""
        config = self.config
        yield dataclasses.replace(config, pdl=not config.pdl, ahead=0)
        if config.pdl:
            yield dataclasses.replace(config, ahead=0 if config.ahead else config.shape.stages)
        if config.blocks > 1:
            yield dataclasses.replace(config, takes_turns=not config.takes_turns)
        for blocks in BLOCKS:
            if abs(blocks - config.blocks) == 1:
                yield dataclasses.replace(config, blocks=blocks)

    def why_not(self, config: Config) -> str | None:
        """The legality predicate."""
        return check_config(self.problem, self.device, config)

    @property
    def kernel(self) -> str:
        """Its name."""
        return KERNEL

    @property
    def instruction(self) -> str:
        """Of a group of warps."""
        return INSTRUCTIONS[self.problem.dtype]

    @property
    def predicted_bytes(self) -> int:
        """Of shared memory, of a block."""
        return self.config.shape.shared_bytes(weights_of(self.problem))

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        return Source(shape=self.config.shape, **asked_of(self.problem))
