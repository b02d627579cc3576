"""GEMMs for the gate to time, found by name."""

from __future__ import annotations

import torch


def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Does the work two times."""
    torch.mm(a, b)
    return torch.mm(a, b)
