"""The cluster kernel with one config as a choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..choice import NAME, CudaChoice
from ..finish import finish_of
from .configs import Config
from .launch import Launch, launch_of
from .legality import by_k, check_config, operands_of, spreads_of
from .rank import groups_of
from .source import KERNEL, Source

__all__ = ["ClusterChoice"]

INSTRUCTIONS = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""In SASS, by the operands' dtype."""


@dataclass(frozen=True, kw_only=True)
class ClusterChoice(CudaChoice[Config]):
    """The cluster kernel with one config, for ``device``."""

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo) -> Self:
        """The choice of ``config``, which must be legal for both."""
        return cls(
            name=f"{NAME}:cluster_{config}",
            backend=NAME,
            problem=problem,
            claims=Claims(accumulate=torch.float32, partials=torch.float32, epilogue_input=torch.float32, splits=config.parts),
            info=_info(config),
            config=config,
            device=device,
        )

    def near(self) -> Iterator[Config]:
        """More or fewer clusters for a tile, how it begins."""
        config = self.config
        yield dataclasses.replace(config, pdl=not config.pdl, ahead=0)
        if config.pdl:
            yield dataclasses.replace(config, ahead=0 if config.ahead else config.shape.ahead)
        for groups in groups_of(config.shape, spreads_of(self.problem, config), self.problem, self.device):
            if groups != config.groups:
                yield dataclasses.replace(config, groups=groups)

    def why_not(self, config: Config) -> str | None:
        """The legality predicate."""
        return check_config(self.problem, self.device, config)

    def launch(self, device: int) -> Launch:
        """All but addresses and scalars."""
        return launch_of(self.config, self.problem, device)

    @property
    def exchanged(self) -> bool:
        """The kernel's a is the transpose of b."""
        return self.config.swapped

    @property
    def kernel(self) -> str:
        """Its name."""
        return KERNEL

    @property
    def instruction(self) -> str:
        """Of a warp group."""
        return INSTRUCTIONS[self.problem.dtype]

    @property
    def predicted_bytes(self) -> int:
        """Of shared memory, of a block."""
        return self.config.shape.shared_bytes

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        problem = self.problem
        p, q, _ = operands_of(problem, swapped=self.config.swapped)
        return Source(
            shape=self.config.shape,
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            p_by_k=bool(by_k(p)),
            q_by_k=bool(by_k(q)),
            finish=finish_of(problem),
        )


def _info(config: Config) -> dict[str, Any]:
    shape = config.shape
    return {
        "tile": [shape.rows, shape.cols, shape.depth],
        "stages": shape.stages,
        "warps": shape.threads // 32,
        "cluster": shape.cluster,
        "splits": config.parts,
        "exchanged": config.swapped,
        "pdl": config.pdl,
        "ahead": config.ahead,
    }
