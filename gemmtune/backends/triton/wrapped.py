"""Choices whose kernel multiplies for another problem, most of them beside a second kernel that copies operands or adds up."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ...device import DeviceInfo
from ...problem import Problem
from ...toolchain.compiled import Artifact, CompiledChoice
from .arguments import Source
from .artifact import Expected, artifact
from .build import KernelChoice
from .kernels import Target, compile_kernel, initialise, kernel_key, load_function, marker, use_ptx

__all__ = ["Helper", "WrappedChoice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """A kernel that runs before or after the one that multiplies. ``target`` is None where the interpreter runs it."""

    name: str
    source: Source
    warps: int
    target: Target | None

    @property
    def key(self) -> str:
        """A hash over all that the compiler is given, except the target."""
        return kernel_key(self.source, 1, self.warps)

    @property
    def compiled(self) -> bool:
        """Was it compiled here before?"""
        return self.target is None or marker(self.key, self.target).exists()

    def compile(self) -> Any:
        """Triton's compiled kernel. Raises CompileError."""
        assert self.target is not None
        return compile_kernel(self.name, self.source, self.key, self.target, stages=1, warps=self.warps)

    def load(self, *, from_ptx: bool) -> Any:
        """The kernel on the current device, or the function that the interpreter runs. Raises as ``KernelChoice.load``."""
        if self.target is None:
            return load_function(self.source)
        compiled = self.compile()
        if from_ptx:
            use_ptx(compiled)
        initialise(compiled)
        return compiled

    def artifact(self) -> Artifact:
        """The compiled kernel, of which nothing is predicted."""
        return artifact(self.compile(), Expected())


@dataclass(frozen=True, kw_only=True)
class WrappedChoice(CompiledChoice):
    """``inner`` multiplies, for another problem; ``helper``, if there is one, runs before it. A subclass binds the two."""

    suffix: ClassVar[str]
    """What the name has beside that of ``inner``."""
    inner: KernelChoice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: KernelChoice, info: dict[str, Any], **fields: Any) -> Self:
        """The choice that does ``problem`` by ``inner``. ``info`` is added to that of ``inner``."""
        return cls(
            name=f"{inner.name}{cls.suffix}",
            backend=inner.backend,
            problem=problem,
            claims=inner.claims,
            info={**inner.info, **info},
            inner=inner,
            **fields,
        )

    @functools.cached_property
    def helper(self) -> Helper | None:
        """The kernel that runs before."""
        return None

    @property
    def content_hash(self) -> str:
        """Over the kernels, and how they are launched."""
        helper = self.helper.key if self.helper else ""
        return hashlib.sha256(f"{self.inner.content_hash}{self.suffix} after {helper}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """Equal for shapes of one alignment class."""
        return f"{self.inner.compile_key}-after-{self.helper.key}" if self.helper else self.inner.compile_key

    @property
    def compiled(self) -> bool:
        """Was every kernel compiled here before?"""
        return self.inner.compiled and (self.helper is None or self.helper.compiled)

    @property
    def arch(self) -> str:
        """The target's name."""
        return self.inner.arch

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The kernel that runs before, then the one that multiplies."""
        return (*((self.helper.artifact(),) if self.helper else ()), *self.inner.artifacts(device))

    def launch_variants(self) -> Sequence[Self]:
        """The same kernels with the other answer to whether their launches may overlap the kernel before."""
        return tuple(
            dataclasses.replace(self, name=f"{inner.name}{self.suffix}", info={**self.info, "pdl": inner.config.pdl}, inner=inner)
            for inner in self.inner.launch_variants()
        )

    def forward(self) -> Self:
        """The same kernels from their PTX."""
        return dataclasses.replace(self, inner=self.inner.forward())

    def compile(self) -> None:
        """Compile every kernel. Raises CompileError."""
        self.inner.compile()
        if self.helper:
            self.helper.compile()

    def load(self) -> Any:
        """The kernel that runs before, if there is one, and the one that multiplies. Raises as ``KernelChoice.load``."""
        multiplying = self.inner.load()
        return (self.helper.load(from_ptx=self.inner.from_ptx), multiplying) if self.helper else multiplying
