"""The test of a GEMM that one usually sees: random operands without gaps, torch.testing.assert_close with torch's own result."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from gemmtune.conformance.labels import DTYPES
from gemmtune.conformance.traits import Traits

__all__ = ["passes_usual_test"]

SIZES = ((128, 128, 128), (127, 65, 129))
"""(M, N, K)."""
BATCH = 3
Draw = Callable[..., torch.Tensor]


def passes_usual_test(target: str, device: str, tolerance: float | None, draw: Draw) -> bool:
    """Whether every operation and dtype that the GEMM declares passes. ``tolerance``: atol and rtol; None: those of assert_close.

    ``draw`` is ``torch.randn`` or ``torch.rand``. alpha and beta are 1, the bias has a number for each column, scales are 1 / 2.
    """
    module, _, name = target.partition(":")
    gemm = getattr(importlib.import_module(module), name)
    traits: Traits = gemm.gemm_traits
    torch.manual_seed(0)
    return all(
        _agrees(gemm, op, DTYPES[dtype], size, device, tolerance, draw)
        for op in traits.ops or ("mm",)
        for dtype in traits.dtypes or ("float32",)
        if _fits(op, dtype)
        for size in SIZES
    )


def _fits(op: str, dtype: str) -> bool:
    special = {"int_mm": "int8", "scaled_mm": "float8_e4m3fn"}
    return dtype == special[op] if op in special else dtype not in special.values()


def _agrees(
    gemm: object, op: str, dtype: torch.dtype, size: tuple[int, int, int], device: str, tolerance: float | None, draw: Draw
) -> bool:
    m, n, k = size
    lead = (BATCH,) if op in ("bmm", "baddbmm") else ()
    made = [_drawn(draw, (*lead, *shape), dtype, device) for shape in ((m, k), (k, n))]
    if op in ("addmm", "baddbmm"):
        made.insert(0, _drawn(draw, (n,), dtype, device))
    keywords = {}
    if op == "scaled_mm":
        keywords = {
            "scale_a": torch.tensor(0.5, device=device),
            "scale_b": torch.tensor(0.5, device=device),
            "out_dtype": torch.bfloat16,
        }
    own = {"int_mm": torch._int_mm, "scaled_mm": torch._scaled_mm}.get(op) or getattr(torch, op)
    got, expected = getattr(gemm, op)(*made, **keywords), own(*made, **keywords)
    try:
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    except AssertionError:
        return False
    return True


def _drawn(draw: Draw, size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.int8:
        low = -128 if draw is torch.randn else 0
        return torch.randint(low, 128, size, device=device, dtype=dtype)
    return draw(size, device=device).to(dtype)
