"""Prepacked weights: b in register order as in ``order.cuh.jinja``, reordered by torch on b's own device."""

from __future__ import annotations

import torch

ROWS = 64
"""Columns of b in an atom of the layout. They are the operand rows that one warp group holds in registers."""


def atom_depth(bits: int) -> int:
    """Return the elements along K in an atom: 16 bytes for each of 128 threads."""
    return 128 * 16 * 8 // bits // ROWS


def format_name(bits: int) -> str:
    """Return the layout name, which depends only on the width of the elements."""
    return f"cutlass_shuffled{bits}"


def shuffled(b: torch.Tensor, bits: int) -> torch.Tensor:
    """Return b [K, N], or for 4 bits [K/2, N] with two numbers in each byte, as bytes in the order of ``order.cuh.jinja``.

    b may have any strides. Zeros pad it to whole atoms. The result is 1-D contiguous uint8.
    """
    given = b.view(torch.uint8)
    in_a_byte = 8 // bits
    depth = atom_depth(bits) // in_a_byte
    rows, cols = given.shape
    padded = torch.nn.functional.pad(given, (0, -cols % ROWS, 0, -rows % depth))
    # An index along K is (atom, step of 16, pair, thread, element of a pair). A column index is (atom, warp, one of two rows,
    # thread).
    columns = (padded.shape[1] // ROWS, 4, 2, 8)
    if bits == 8:
        atoms = padded.reshape(-1, depth // 16, 2, 4, 2, *columns)
        return atoms.permute(5, 0, 6, 8, 3, 1, 2, 4, 7).reshape(-1)
    numbers = torch.stack([padded & 15, padded >> 4])  # the two numbers of a byte are a pair
    atoms = numbers.reshape(2, -1, depth // 8, 2, 4, *columns)
    low, high = atoms.permute(7, 5, 1, 6, 8, 4, 2, 0, 3).unbind(0)
    return (low | high << 4).reshape(-1)
