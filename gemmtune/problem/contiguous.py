"""Layouts of contiguous operands, named by BLAS letters."""

from __future__ import annotations

import math

import torch

from ..errors import InvalidProblemError
from ..operand_kinds import BiasShape as BiasShape
from .dtypes import is_float8
from .layout import Layout

MOST = 2**31 - 1
"""The largest size of a dimension: the libraries count in 32 bits."""
MOST_ELEMENTS = 2**46
"""The limit on the elements of one operand, larger than an address space."""


def operand_layouts(
    lead: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    letters: str,
    a: torch.dtype,
    b: torch.dtype | None = None,
    out: torch.dtype | None = None,
) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of a, b and out for these sizes and dtypes. b and out default to the dtype of a.

    ``letters`` has one letter for a and one for b: ``n`` is row-major, ``t`` is stored transposed.

    Raises:
        InvalidProblemError: ``letters`` is not one of nn, nt, tn, tt, or a size is out of range.
    """
    for name, size in (*((("batch", lead[0]),) if lead else ()), ("m", m), ("n", n), ("k", k)):
        check_size(name, size)
    if len(letters) != 2 or set(letters) - {"n", "t"}:
        raise InvalidProblemError(f"layout: got {letters!r}, expected one of nn, nt, tn, tt")
    first, second = (letter == "t" for letter in letters)
    return (
        _layout((*lead, m, k), a, transposed=first),
        _layout((*lead, k, n), b or a, transposed=second),
        Layout.contiguous((*lead, m, n), out or a),
    )


def blocked_layouts(m: int, n: int, k: int, letters: str, dtype: torch.dtype) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of a, b and out for a block-sparse b."""
    if letters not in ("nt", "tt"):
        raise InvalidProblemError(f"layout: got {letters!r}, expected nt or tt: b is the transpose of a weight [N, K]")
    result = torch.bfloat16 if is_float8(dtype) else dtype if dtype.is_floating_point else torch.int32
    a, b, out = operand_layouts((), m, n, k, letters, dtype, out=result)
    return a, b, out if letters == "nt" else _layout((m, n), result, transposed=True)


def grouped_layouts(
    groups: int, m: int, n: int, k: int, letters: str, a: torch.dtype, b: torch.dtype | None = None, out: torch.dtype | None = None
) -> tuple[Layout, Layout, Layout, Layout]:
    """Return the layouts of a, b, out and offs for groups of rows: as ``operand_layouts``, with one matrix of b for each group."""
    rows, _, result = operand_layouts((), m, n, k, letters, a, b, out)
    _, matrices, _ = operand_layouts((groups,), m, n, k, letters, a, b, out)
    return rows, matrices, result, Layout.contiguous((groups,), torch.int32)


def bias_shapes(out: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that an operand added to a result of shape ``out`` may have, by name."""
    *_, m, n = out
    return {"n": (n,), "mn": out, "m1": (m, 1), "1n": (1, n), "scalar": ()}


def inp_layout(lead: tuple[int, ...], m: int, n: int, bias: BiasShape, dtype: torch.dtype) -> Layout:
    """Return the layout of the added operand: shape [N], [M, N] (after the batch), [M, 1], [1, N] or a scalar."""
    shapes = bias_shapes((*lead, m, n))
    if bias not in shapes:
        raise InvalidProblemError(f"bias: got {bias!r}, expected one of {', '.join(shapes)}")
    return Layout.contiguous(shapes[bias], dtype)


def check_size(name: str, size: object) -> None:
    """Raise InvalidProblemError unless ``size`` is an integer that a dimension of an operand can have."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST:
        raise InvalidProblemError(f"{name}: got {size!r}, expected an integer from 0 to {MOST}")


def _layout(size: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Layout:
    if math.prod(size) > MOST_ELEMENTS:
        raise InvalidProblemError(f"sizes: got an operand of {size}, expected at most 2^46 elements; take smaller sizes")
    if not transposed:
        return Layout.contiguous(size, dtype)
    return Layout.contiguous((*size[:-2], size[-1], size[-2]), dtype).transposed
