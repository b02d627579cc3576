"""The layouts of contiguous operands, as a call without views or padding has them."""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import InvalidProblemError
from .layout import Layout

__all__ = ["BiasShape", "device_type_here", "inp_layout", "operand_layouts"]

BiasShape = Literal["n", "mn", "m1", "1n", "scalar"]


def device_type_here() -> str:
    """cuda if there is a CUDA device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def operand_layouts(
    lead: tuple[int, ...], m: int, n: int, k: int, letters: str, a: torch.dtype, b: torch.dtype, out: torch.dtype
) -> tuple[Layout, Layout, Layout]:
    """a, b and out of these sizes and dtypes. ``letters`` says for a and for b: ``n`` row-major, ``t`` stored transposed.

    Raises:
        InvalidProblemError: other letters, or a negative size.
    """
    if len(letters) != 2 or set(letters) - {"n", "t"}:
        raise InvalidProblemError(f"layout: got {letters!r}, expected one of nn, nt, tn, tt")
    first, second = (letter == "t" for letter in letters)
    return (
        _operand((*lead, m, k), a, transposed=first),
        _operand((*lead, k, n), b, transposed=second),
        Layout.contiguous((*lead, m, n), out),
    )


def inp_layout(lead: tuple[int, ...], m: int, n: int, bias: BiasShape, dtype: torch.dtype) -> Layout:
    """The added operand of shape [N], [M, N] (with the batch before it), [M, 1], [1, N] or a scalar."""
    shapes = {"n": (n,), "mn": (*lead, m, n), "m1": (m, 1), "1n": (1, n), "scalar": ()}
    if bias not in shapes:
        raise InvalidProblemError(f"bias: got {bias!r}, expected one of {', '.join(shapes)}")
    return Layout.contiguous(shapes[bias], dtype)


def _operand(size: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Layout:
    if any(n < 0 for n in size):
        raise InvalidProblemError(f"sizes must be 0 or more, got {size}")
    if not transposed:
        return Layout.contiguous(size, dtype)
    return Layout.contiguous((*size[:-2], size[-1], size[-2]), dtype).transposed
