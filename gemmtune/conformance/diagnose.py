"""Naming a bug by reproducing it: a wrong result is compared with what each known bug would have given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..numerics.operands import Operands

if TYPE_CHECKING:
    from .bench import Bench

__all__ = ["diagnose"]


def diagnose(bench: Bench, got: torch.Tensor, operands: Operands, bad: torch.Tensor) -> str:  # noqa: ARG001
    """What the result ``got`` (float64 [B, M, N]) with the wrong elements ``bad`` looks like; empty if like nothing known."""
    return ""
