"""What the choices of every family have in common."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...device import DeviceInfo
from ...errors import UnavailableError
from ..shared_object import SharedObjectChoice
from .compiler import CAPABILITY, Source, artifact_path, compile_source
from .library import Library

__all__ = ["NAME", "CudaChoice"]

NAME = "cuda"


@dataclass(frozen=True, kw_only=True)
class CudaChoice(SharedObjectChoice[Library]):
    """A kernel of ours for ``device``. Its name tells all that it is compiled from and told, but for the problem."""

    device: DeviceInfo = field(repr=False)

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
