"""The kernel with one config as a choice."""

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
from ..finish import finish_of
from .configs import DEPTH, Config
from .launch import Launch, launch_of
from .legality import aligned, by_k, check_config, operands_of
from .source import KERNEL, Source

__all__ = ["UnalignedChoice"]

INSTRUCTIONS = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""In SASS, by the operands' dtype."""
BANDS = (8, 32)


@dataclass(frozen=True, kw_only=True)
class UnalignedChoice(CudaChoice[Config]):
    """The kernel with one config, for ``device``."""

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo) -> Self:
        """The choice of ``config``, which must be legal for both."""
        return cls(
            name=f"{NAME}:unaligned_{config}",
            backend=NAME,
            problem=problem,
            claims=Claims(accumulate=torch.float32, partials=torch.float32, epilogue_input=torch.float32),
            info=_info(config, problem),
            config=config,
            device=device,
        )

    def near(self) -> Iterator[Config]:
        """How it begins, and in which order tiles are done."""
        yield dataclasses.replace(self.config, pdl=not self.config.pdl)
        for band in BANDS:
            if band != self.config.band:
                yield dataclasses.replace(self.config, band=band)

    def why_not(self, config: Config) -> str | None:
        """The legality predicate."""
        return check_config(self.problem, self.device, config)

    def launch(self, device: int) -> Launch:
        """All but addresses and scalars."""
        return launch_of(self.config, self.problem, device)

    @property
    def aligned_bytes(self) -> tuple[int, int, int]:
        """Shifts are those of the addresses that a launch is given; an operand that was aligned is not copied."""
        _, q, _ = operands_of(self.problem, swapped=self.config.swapped)
        return 1, 1, TMA_BYTES if aligned(q) else 1

    @property
    def zero_workspace(self) -> bool:
        """Each launch writes what it reads of the copy."""
        return False

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
        return self.config.shape.shared_bytes(p_by_k=self.source.p_by_k)

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        problem = self.problem
        p, q, oriented = operands_of(problem, swapped=self.config.swapped)
        row, col = oriented.out.stride[-2:]
        return Source(
            shape=self.config.shape,
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            p_by_k=bool(by_k(p)),
            q_by_k=bool(by_k(q)),
            turned=row == 1 and col != 1,
            finish=finish_of(problem),
        )


def _info(config: Config, problem: Problem) -> dict[str, Any]:
    p, q, _ = operands_of(problem, swapped=config.swapped)
    shape = config.shape
    return {
        "tile": [shape.rows, shape.cols, DEPTH],
        "stages": shape.stages(p_by_k=bool(by_k(p))),
        "warps": shape.threads // 32,
        "cluster": shape.cluster,
        "exchanged": config.swapped,
        "copies": not aligned(q),
        "pdl": config.pdl,
    }
