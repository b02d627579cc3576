"""torch's own operation, for calls that no choice takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["torch_call"]

log = logging.getLogger("gemmtune")


def torch_call(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    inp: torch.Tensor | None,
    alpha: float,
    beta: float,
    out: torch.Tensor | None,
    epilogue: Callable[..., torch.Tensor] | None,
    epilogue_args: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """``op`` by torch, then the epilogue function on its result."""
    direct = out if epilogue is None else None
    if inp is None:
        result = getattr(torch, op)(a, b) if direct is None else getattr(torch, op)(a, b, out=direct)
    else:
        scalars: dict[str, Any] = {"alpha": alpha, "beta": beta}
        result = (
            getattr(torch, op)(inp, a, b, **scalars) if direct is None else getattr(torch, op)(inp, a, b, **scalars, out=direct)
        )
    if epilogue is None:
        return result  # type: ignore[no-any-return]
    value = epilogue(result, *epilogue_args)
    return value if out is None else out.copy_(value)
