"""A slow-down of known size: a choice that keeps the core busy after each call of another one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gemmtune.choice import Choice, Kernel, Scalars, Tensors

__all__ = ["Slowed"]


@dataclass(frozen=True, kw_only=True)
class Slowed(Choice):
    """``inner``, and then work on one core for ``share`` of the time that the call took, whatever the clock. For CPUs."""

    inner: Choice
    share: float

    @classmethod
    def of(cls, inner: Choice, share: float) -> Slowed:
        """The choice, slower by that share."""
        return cls(
            name=f"{inner.name}+busy", backend=inner.backend, problem=inner.problem, claims=inner.claims, inner=inner, share=share
        )

    @property
    def content_hash(self) -> str:
        """Of both."""
        return f"{self.inner.content_hash}+{self.share}"

    def bind(self, loaded: object) -> Kernel:  # noqa: ARG002
        """Build the inner one."""
        run, factor = self.inner.build().run, 1 + self.share

        def slowed(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            begun = time.perf_counter_ns()
            run(out, tensors, scalars)
            end = begun + factor * (time.perf_counter_ns() - begun)
            while time.perf_counter_ns() < end:
                pass

        return Kernel(run=slowed)

    @property
    def packed_format(self) -> str | None:
        """As the inner one."""
        return self.inner.packed_format

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """As the inner one."""
        return self.inner.pack(b)
