"""What the choices of every family have in common."""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch

from ...choice import Run
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...toolchain.compiled import Artifact
from ...toolchain.launch import Launch, bind
from ...toolchain.shared_object import SharedObjectChoice, kernel_artifact
from .compiler import CAPABILITY, Source, artifact_path, compile_source
from .library import Library, refusal

__all__ = ["NAME", "TMA_BYTES", "CudaChoice"]

NAME = "cuda"
TMA_BYTES = 16
"""Which the addresses of what TMA copies are multiples of."""


C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class CudaChoice(SharedObjectChoice[Library], Generic[C]):
    """A kernel of ours with one ``config``, for ``device``; but for the problem, its name tells all that it is made of and told."""

    config: C = field(repr=False)
    device: DeviceInfo = field(repr=False)

    @classmethod
    @abstractmethod
    def of(cls, config: C, problem: Problem, device: DeviceInfo) -> Self:
        """The choice of ``config``, which must be legal for both."""

    @abstractmethod
    def near(self) -> Iterator[C]:
        """Configs that are the same kernel told otherwise, whether they are legal or not."""

    @abstractmethod
    def why_not(self, config: C) -> str | None:
        """Why ``config`` may not be offered for the problem on the device, or None."""

    @abstractmethod
    def launch(self, device: int) -> Launch:
        """What the kernel is told on the device with that number: all but addresses and scalars."""

    @property
    @abstractmethod
    def kernel(self) -> str:
        """Its name in the shared object."""

    @property
    @abstractmethod
    def instruction(self) -> str:
        """With which it multiplies, a pattern of SASS."""

    @property
    @abstractmethod
    def predicted_bytes(self) -> int:
        """Of shared memory, of a block."""

    @property
    def aligned_bytes(self) -> tuple[int, int, int]:
        """What the addresses of out and of the kernel's a and b are multiples of: what TMA asks of the operands that it copies."""
        return 1, TMA_BYTES, TMA_BYTES

    @property
    def aligned_operands(self) -> Sequence[tuple[int, int]]:
        """The same of other operands, by number."""
        return ()

    @property
    def zero_workspace(self) -> bool:
        """Its workspace has to be zero to begin with."""
        return True

    @property
    def exchanged(self) -> bool:
        """The kernel's a is the problem's b."""
        return False

    def launch_variants(self) -> tuple[Self, ...]:
        """The same kernel told otherwise."""
        return tuple(self.of(config, self.problem, self.device) for config in self.near() if self.why_not(config) is None)

    def launcher(self, library: Library) -> Run:
        """The launch for the problem on the current device. Raises ErrorFromChoice: the device cannot run it."""
        device = torch.cuda.current_device()
        refuse = functools.partial(refusal, name=self.name, problem=self.problem)
        status = library.prepare(device)
        if status:
            raise refuse(status)
        return bind(
            library,
            self.launch(device),
            self.problem,
            self.name,
            refuse=refuse,
            exchanged=self.exchanged,
            aligned_bytes=self.aligned_bytes,
            aligned_operands=self.aligned_operands,
            zero=self.zero_workspace,
        )

    def describe(self, path: Path, library: Library) -> Artifact:
        """Its kernel, and what was expected of it."""
        return kernel_artifact(path, library, kernel=self.kernel, expected=self.instruction, predicted_bytes=self.predicted_bytes)

    @property
    @abstractmethod
    def source(self) -> Source:
        """What has to be compiled: the same for every size, and for all that a launch can be told."""

    @property
    def library(self) -> type[Library]:
        """What its shared object is opened with."""
        return Library

    @property
    def content_hash(self) -> str:
        """Over the source, and what its launches are told."""
        return hashlib.blake2b(f"{self.source.digest} {self.name}".encode(), digest_size=16).hexdigest()

    @property
    def compile_key(self) -> str:
        """Equal for all sizes and launches of one source."""
        return f"{NAME}-{self.source.digest}"

    @property
    def path(self) -> Path:
        """Where its shared object is or will be."""
        return artifact_path(self.source)

    def make(self) -> Path:
        """Its shared object, made if it is missing. Raises CompileError; UnavailableError without nvcc."""
        return compile_source(self.source, self.name)

    @property
    def arch(self) -> str:
        """``sm90``, whose own instructions the kernels have."""
        return f"sm{CAPABILITY}"

    def forward(self) -> Self:
        """Raises UnavailableError: the kernels have instructions of one architecture alone."""
        raise UnavailableError(f"{self.name}: got a newer GPU, expected {self.arch}, whose own instructions it has")
