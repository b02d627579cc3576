"""The test of a GEMM that one usually sees: random operands without gaps, torch.testing.assert_close with torch's own result."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from adapters.torch_ops import sums, weights

from gemmtune.declaration.labels import DTYPES, FLOATS, NARROW_FLOATS
from gemmtune.declaration.traits import Traits
from gemmtune.problem.operations import Encoding

__all__ = ["passes_usual_test"]

SIZES = ((128, 128, 128), (127, 65, 129))
"""(M, N, K)."""
BATCH = 3
GROUP = 64
"""Elements along K that share a scale and a zero point."""
Draw = Callable[..., torch.Tensor]


def passes_usual_test(target: str, device: str, tolerance: float | None, draw: Draw) -> bool:
    """Whether every operation and dtype that the GEMM declares passes. ``tolerance``: atol and rtol; None: those of assert_close.

    ``draw`` is ``torch.randn`` or ``torch.rand``. alpha and beta are 1, the bias has a number for each column, scales are 1 / 2.
    Weights are int8 with a random scale for each column, and where K is even uint4 with scales and zero points of groups too; the
    result is compared with a product in float32.
    """
    module, _, name = target.partition(":")
    gemm = getattr(importlib.import_module(module), name)
    traits: Traits = gemm.gemm_traits
    torch.manual_seed(0)
    return all(
        _agrees(gemm, op, DTYPES[dtype], size, device, tolerance, draw, form)
        for op in traits.ops or ("mm",)
        for dtype in traits.dtypes or ("float32",)
        if _fits(op, dtype)
        for size in SIZES
        for form in _forms(op, size)
    )


def _fits(op: str, dtype: str) -> bool:
    special = {"int_mm": "int8", "int_mm_mul": "int8", "scaled_mm": "float8_e4m3fn"}
    if op in special:
        return dtype == special[op]
    return dtype in (NARROW_FLOATS if op == "mixed_mm" else FLOATS)


def _forms(op: str, size: tuple[int, int, int]) -> tuple[str, ...]:
    """Kinds of weights of mixed_mm."""
    if op != "mixed_mm":
        return ("",)
    return ("int8",) if size[2] % 2 else ("int8", "uint4")


def _agrees(
    gemm: object,
    op: str,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    device: str,
    tolerance: float | None,
    draw: Draw,
    form: str,
) -> bool:
    m, n, k = size
    if form:
        return _agrees_with_weights(gemm, dtype, size, device, tolerance, draw, form)
    lead = (BATCH,) if op in ("bmm", "baddbmm") else ()
    made = [_drawn(draw, (*lead, *shape), dtype, device) for shape in ((m, k), (k, n))]
    if op in ("addmm", "baddbmm"):
        made.insert(0, _drawn(draw, (n,), dtype, device))
    if op == "mm_plus_mm":
        made += [_drawn(draw, shape, dtype, device) for shape in ((m, k), (k, n))]
    keywords = {}
    if op == "scaled_mm":
        keywords = {
            "scale_a": torch.tensor(0.5, device=device),
            "scale_b": torch.tensor(0.5, device=device),
            "out_dtype": torch.bfloat16,
        }
    if op == "int_mm_mul":
        made.append(draw((n,), device=device))
    others: dict[str, Callable[..., torch.Tensor]] = {
        "mm_plus_mm": sums.mm_plus_mm,
        "int_mm": torch._int_mm,
        "int_mm_mul": _int_mm_mul,
        "scaled_mm": torch._scaled_mm,
    }
    own = others.get(op) or getattr(torch, op)
    return _close(getattr(gemm, op)(*made, **keywords), own(*made, **keywords), tolerance)


def _int_mm_mul(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(a, b) * scale


def _agrees_with_weights(
    gemm: object, dtype: torch.dtype, size: tuple[int, int, int], device: str, tolerance: float | None, draw: Draw, form: str
) -> bool:
    m, n, k = size
    a = _drawn(draw, (m, k), dtype, device)
    scales: dict[str, torch.Tensor] = {"scale_b": _drawn(draw, (1, n), dtype, device)}
    encoding: Encoding = ""
    b = _drawn(draw, (k, n), torch.int8, device)
    if form == "uint4":
        b = torch.randint(0, 256, (k // 2, n), device=device, dtype=torch.uint8)
        groups = (-(-k // GROUP), n)
        zero = torch.randint(0, 16, groups, device=device).to(dtype)
        scales, encoding = {"scale_b": _drawn(draw, groups, dtype, device), "zero_b": zero}, "uint4"
    wide = {name: scale.float() for name, scale in scales.items()}
    expected = weights.mixed_mm(a.float(), b, **wide, encoding=encoding).to(dtype)
    return _close(gemm.mixed_mm(a, b, **scales, encoding=encoding), expected, tolerance)  # type: ignore[attr-defined]


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float | None) -> bool:
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
