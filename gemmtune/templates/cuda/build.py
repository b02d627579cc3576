"""The cluster kernel with one config as a choice."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ..compiled import Artifact, CompiledChoice, binary_usage, find_cuobjdump
from ..made_once import loaded
from ..nvcc import find_compiler
from .compiler import artifact_path, compile_source
from .configs import Config
from .launch import Library, bind, load
from .legality import by_k, check_config, operands_of, tiles_of
from .rank import groups_of
from .source import ARCHITECTURE, KERNEL, Source

__all__ = ["NAME", "CudaChoice"]

NAME = "cuda"
INSTRUCTIONS = {torch.bfloat16: "HGMMA.*.F32.BF16", torch.float16: "HGMMA.*.F32"}
"""In SASS, by the operands' dtype."""


@dataclass(frozen=True, kw_only=True)
class CudaChoice(CompiledChoice):
    """The cluster kernel with one config, for ``device``."""

    config: Config = field(repr=False)
    device: DeviceInfo = field(repr=False)

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

    def variants(self) -> tuple[CudaChoice, ...]:
        """The same kernel told otherwise: more or fewer clusters for a tile, how it begins."""
        legal = (config for config in self._near() if check_config(self.problem, self.device, config) is None)
        return tuple(CudaChoice.of(config, self.problem, self.device) for config in legal)

    def _near(self) -> Iterator[Config]:
        config = self.config
        yield dataclasses.replace(config, pdl=not config.pdl, ahead=0)
        if config.pdl:
            yield dataclasses.replace(config, ahead=0 if config.ahead else config.shape.stages)
        for groups in groups_of(config.shape, tiles_of(self.problem, config), self.problem, self.device):
            if groups != config.groups:
                yield dataclasses.replace(config, groups=groups)

    @functools.cached_property
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""
        problem = self.problem
        p, q, _ = operands_of(problem, swapped=self.config.swapped)
        reads_inp = problem.inp is not None and problem.beta != "zero"
        inp = (problem.inp.dtype,) if problem.inp is not None and reads_inp else ()
        extra = problem.epilogue.operands if problem.epilogue else ()
        return Source(
            shape=self.config.shape,
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            p_by_k=bool(by_k(p)),
            q_by_k=bool(by_k(q)),
            alpha=problem.alpha,
            beta=problem.beta if reads_inp else "zero",
            added=reads_inp,
            epilogue=problem.epilogue,
            operands=(*inp, *(x.dtype for x in extra)),
        )

    @property
    def content_hash(self) -> str:
        """Over source and config."""
        return hashlib.blake2b(f"{self.source.digest} {self.config}".encode(), digest_size=16).hexdigest()

    @property
    def compile_key(self) -> str:
        """Equal for all sizes and launches of one shape and epilogue."""
        return f"cuda-{self.source.digest}"

    @property
    def compiled(self) -> bool:
        """The shared object is in the cache."""
        return artifact_path(self.source).exists()

    @property
    def obstacle(self) -> str | None:
        """Without nvcc, what was not compiled before cannot be run."""
        try:
            find_compiler()
        except UnavailableError as error:
            return None if self.compiled else str(error)
        return None

    @property
    def arch(self) -> str:
        """``sm90``, whose own instructions the kernel has."""
        return f"sm{ARCHITECTURE.removesuffix('a')}"

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:  # noqa: ARG002 - its facts are checked at enumeration
        """The kernel of the shared object."""
        path, library = self._loaded()
        tool = find_cuobjdump()
        usage = binary_usage(path, tool) if tool else None
        return (
            Artifact(
                kernel=KERNEL,
                threads=library.threads,
                shared_bytes=library.shared_bytes,
                registers=usage.registers if usage else None,
                stack_bytes=usage.stack_bytes if usage else None,
                code=usage.code if usage else "",
                spilled_share=usage.spilled_share if usage else 0.0,
                expected=INSTRUCTIONS[self.problem.dtype] if usage else None,
                predicted_bytes=self.config.shape.shared_bytes,
                slack_bytes=0,
            ),
        )

    def forward(self) -> CudaChoice:
        """Raises UnavailableError: the kernel has instructions of one architecture alone."""
        raise UnavailableError(f"{self.name}: got a newer GPU, expected {self.arch}, whose own instructions it has")

    def compile(self) -> None:
        """Make the shared object, unless it is there. Raises CompileError; UnavailableError without nvcc."""
        self._made()

    def build(self) -> Kernel:
        """Load the shared object and bind it to the problem and the current device.

        Raises:
            CompileError: it was not compiled yet, and nvcc refused it.
            UnavailableError: it was not compiled yet, and there is no nvcc; or it cannot be loaded here.
            ErrorFromChoice: the device cannot run it.
        """
        _, library = self._loaded()
        return Kernel(run=bind(library, self.config, self.problem, self.name))

    def _made(self) -> Path:
        return compile_source(self.source, self.name)

    def _loaded(self) -> tuple[Path, Library]:
        try:
            return loaded(self._made, lambda path: (path, load(path)))
        except OSError as error:
            raise UnavailableError(f"{self.name}: its shared object cannot be loaded here: {error}") from error


def _info(config: Config) -> dict[str, Any]:
    shape = config.shape
    return {
        "tile": [shape.rows, shape.cols, shape.depth],
        "stages": shape.stages,
        "warps": shape.threads // 32,
        "cluster": shape.blocks,
        "splits": config.parts,
        "exchanged": config.swapped,
        "pdl": config.pdl,
        "ahead": config.ahead,
    }
