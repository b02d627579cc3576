"""GEMMs for the gate to time, found by name."""

from __future__ import annotations

import torch


def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the product twice."""
    torch.mm(a, b)
    return torch.mm(a, b)
