"""The cluster kernel with one config as a choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from ....choice import Claims, Run
from ....device import DeviceInfo
from ....problem import Problem
from ...compiled import Artifact
from ...shared_object import kernel_artifact
from ..choice import NAME, CudaChoice
from ..library import Library
from .configs import Config
from .launch import bind
from .legality import by_k, check_config, operands_of, spreads_of
from .rank import groups_of
from .source import KERNEL, Source

__all__ = ["ClusterChoice"]

INSTRUCTIONS = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""In SASS, by the operands' dtype."""


@dataclass(frozen=True, kw_only=True)
class ClusterChoice(CudaChoice):
    """The cluster kernel with one config, for ``device``."""

    config: Config = field(repr=False)

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

    def variants(self) -> tuple[ClusterChoice, ...]:
        """The same kernel told otherwise: more or fewer clusters for a tile, how it begins."""
        legal = (config for config in self._near() if check_config(self.problem, self.device, config) is None)
        return tuple(ClusterChoice.of(config, self.problem, self.device) for config in legal)

    def _near(self) -> Iterator[Config]:
        config = self.config
        yield dataclasses.replace(config, pdl=not config.pdl, ahead=0)
        if config.pdl:
            yield dataclasses.replace(config, ahead=0 if config.ahead else config.shape.stages)
        for groups in groups_of(config.shape, spreads_of(self.problem, config), self.problem, self.device):
            if groups != config.groups:
                yield dataclasses.replace(config, groups=groups)

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        problem, inp = self.problem, self.problem.inp_read
        p, q, _ = operands_of(problem, swapped=self.config.swapped)
        extra = problem.epilogue.operands if problem.epilogue else ()
        return Source(
            shape=self.config.shape,
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            p_by_k=bool(by_k(p)),
            q_by_k=bool(by_k(q)),
            alpha=problem.alpha,
            beta=problem.beta if inp is not None else "zero",
            added=inp is not None,
            epilogue=problem.epilogue,
            operands=tuple(x.dtype for x in (*((inp,) if inp is not None else ()), *extra)),
        )

    def bind(self, library: Library) -> Run:
        """The launch for the problem on the current device. Raises ErrorFromChoice: the device cannot run it."""
        return bind(library, self.config, self.problem, self.name)

    def describe(self, path: Path, library: Library) -> Artifact:
        """Its kernel, and what was expected of it."""
        expected, predicted_bytes = INSTRUCTIONS[self.problem.dtype], self.config.shape.shared_bytes
        return kernel_artifact(path, library, kernel=KERNEL, expected=expected, predicted_bytes=predicted_bytes)


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
