"""Compiled choices with a fault planted on purpose. Imported by tests and by their worker processes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gemmtune.backends.triton.build import KernelChoice, TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.choice import Choice, Claims, Kernel
from gemmtune.device import DeviceInfo, preset
from gemmtune.problem import Problem
from gemmtune.toolchain.compiled import Artifact, CompiledChoice
from gemmtune.toolchain.triton_kernels import Source

BF16 = Problem.mm(512, 1024, 2048, device_type="cuda")
GOOD = Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4)


@dataclass(frozen=True, kw_only=True)
class Rewritten(TritonChoice):
    """A Triton choice in whose kernel ``old`` is replaced by ``new``."""

    old: str
    new: str

    @functools.cached_property
    def source(self) -> Source:
        """The rewritten kernel."""
        whole = KernelChoice.source.func(self)  # type: ignore[attr-defined]
        if self.old not in whole.text:
            raise LookupError(f"{self.old!r} is not in the kernel")
        return replace(whole, text=whole.text.replace(self.old, self.new))


@dataclass(frozen=True, kw_only=True)
class Segfaulting(TritonChoice):
    """A choice whose compiler crashes."""

    def compilation(self) -> Callable[[], object]:
        """Return a read of address 0."""
        return functools.partial(ctypes.string_at, 0)

    @property
    def compiled(self) -> bool:
        """Never."""
        return False


def triton_choice(arch: str, config: Config = GOOD, problem: Problem = BF16) -> TritonChoice:
    """The choice with ``config``, legal or not."""
    return TritonChoice.of(problem, preset(arch), config)


def planted(kind: type[TritonChoice], arch: str, config: Config = GOOD, **fields: Any) -> TritonChoice:
    """As ``triton_choice``, of another class and under another name."""
    good = triton_choice(arch, config)
    own = {name: getattr(good, name) for name in ("backend", "problem", "claims", "info", "config", "where", "target")}
    return kind(name=f"planted:{kind.__name__.lower()}", **own, **fields)


CPU = preset("portable")
ON_CPU = Problem.mm(64, 48, 32, dtype=torch.float32, device_type="cpu")
CLAIMS = Claims(accumulate=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Simple(CompiledChoice):
    """Multiplies on the CPU, in one of several ways; for what runs and verifies choices."""

    how: str = "right"

    @property
    def content_hash(self) -> str:
        """Its name."""
        return self.name

    @property
    def arch(self) -> str:
        """Any."""
        return "sm80"

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """One that fits."""
        return (Artifact(kernel="simple", threads=128, shared_bytes=0, registers=32, stack_bytes=0, code=""),)

    def forward(self) -> Choice:
        """Another one, so that a test sees which was built."""
        return replace(self, how={"right": "forwarded", "forwarded": "wrong"}.get(self.how, self.how))

    def bind(self, loaded: object) -> Kernel:
        """``how`` says what happens."""

        def run(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
            a, b, *_rest = tensors
            match self.how:
                case "segfault":
                    ctypes.string_at(0)
                case "raise":
                    raise RuntimeError("an illegal memory access was encountered")
            torch.mm(a, b, out=out)
            if self.how == "wrong":
                out[-1, -1] += 1

        return Kernel(run=run)


def simple(how: str) -> Simple:
    """A choice for ``ON_CPU``."""
    return Simple(name=f"simple:{how}", backend="simple", problem=ON_CPU, claims=CLAIMS, how=how)


@dataclass(frozen=True, kw_only=True)
class Opaque(Choice):
    """Something has to be compiled, but there is nothing to look at."""

    @property
    def content_hash(self) -> str:
        """Its name."""
        return self.name

    @property
    def compile_key(self) -> str | None:
        """Its name."""
        return self.name

    def bind(self, loaded: object) -> Kernel:
        """Never asked for."""
        raise NotImplementedError(self.name)
