"""GEMMs for the gate to time, found by name."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def into(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(a, b, out=out)


into.gemm_traits = {"out": True}  # type: ignore[attr-defined]


def crash(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"got {tuple(a.shape)}, expected something else")
