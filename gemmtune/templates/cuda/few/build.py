"""The kernel for few rows with one config as a choice."""

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
from ..choice import NAME, TMA_BYTES, CudaChoice
from .configs import Config, weights_of
from .launch import Launch, launch_of
from .legality import check_config, is_along_k
from .rank import blocks_of
from .source import KERNEL, Source

__all__ = ["FewChoice"]

INSTRUCTIONS = {torch.bfloat16: "HMMA.*.F32.BF16", torch.float16: "HMMA.*.F32"}
"""In SASS, by the dtype of a."""
NEAR_BLOCKS = 3
"""The likeliest numbers of blocks, which variants have."""


@dataclass(frozen=True, kw_only=True)
class FewChoice(CudaChoice[Config]):
    """The kernel for few rows with one config, for ``device``."""

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo) -> Self:
        """The choice of ``config``, which must be legal for both."""
        weights = weights_of(problem)
        claims = Claims(
            accumulate=torch.float32,
            partials=torch.float32,
            epilogue_input=torch.float32,
            splits=config.blocks * config.shape.warps_k,
            weights=problem.dtype if problem.zero_b is not None else None,
        )
        return cls(
            name=f"{NAME}:few_i{weights.bits}_{config.label(weights)}",
            backend=NAME,
            problem=problem,
            claims=claims,
            info=_info(config, problem),
            config=config,
            device=device,
        )

    def near(self) -> Iterator[Config]:
        """How it begins, how the blocks of a cluster divide K, and how many they are."""
        config = self.config
        yield dataclasses.replace(config, pdl=not config.pdl, ahead=0)
        if config.pdl:
            yield dataclasses.replace(config, ahead=0 if config.ahead else config.shape.stages)
        if config.blocks > 1:
            yield dataclasses.replace(config, takes_turns=not config.takes_turns)
        for blocks in blocks_of(config.shape, self.problem, self.device)[:NEAR_BLOCKS]:
            if blocks != config.blocks:
                yield dataclasses.replace(config, blocks=blocks)

    def why_not(self, config: Config) -> str | None:
        """The legality predicate."""
        return check_config(self.problem, self.device, config)

    def launch(self, device: int) -> Launch:
        """All but addresses."""
        return launch_of(self.config, self.problem, device)

    @property
    def aligned_operands(self) -> list[tuple[int, int]]:
        """Scales and zero points that TMA copies."""
        return [(i, TMA_BYTES) for i, along_k in enumerate(is_along_k(self.problem)) if along_k]

    @property
    def kernel(self) -> str:
        """Its name."""
        return KERNEL

    @property
    def instruction(self) -> str:
        """Of a warp."""
        return INSTRUCTIONS[self.problem.dtype]

    @property
    def predicted_bytes(self) -> int:
        """Of shared memory, of a block."""
        return self.config.shape.shared_bytes(weights_of(self.problem))

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        problem = self.problem
        return Source(
            shape=self.config.shape,
            weights=weights_of(problem),
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            epilogue=problem.epilogue,
            operands=tuple(x.dtype for x in problem.epilogue.operands) if problem.epilogue else (),
        )


def _info(config: Config, problem: Problem) -> dict[str, Any]:
    shape = config.shape
    return {
        "tile": [8 * shape.eights, shape.cols, weights_of(problem).depth],
        "stages": shape.stages,
        "warps": shape.threads // 32,
        "cluster": config.blocks,
        "splits": config.blocks * shape.warps_k,
        "pdl": config.pdl,
        "ahead": config.ahead,
        "takes_turns": config.takes_turns,
    }
