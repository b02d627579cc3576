"""Prepacked weights: b in the order in which threads multiply it, ``order.cuh.jinja``'s, made by torch on b's own device."""

from __future__ import annotations

import torch

ROWS = 64
"""Columns of b, which are rows of the operand that goes through registers, in an atom of the layout: those of a warp group."""


def atom_depth(bits: int) -> int:
    """Elements along K in an atom: 16 bytes for each of 128 threads."""
    return 128 * 16 * 8 // bits // ROWS


def format_name(bits: int) -> str:
    """The name of the layout, which does not depend on what the bits mean."""
    return f"cutlass_shuffled{bits}"


def shuffled(b: torch.Tensor, bits: int) -> torch.Tensor:
    """b [K, N], or for 4 bits [K/2, N] with two numbers in each byte, as bytes in the order of ``order.cuh.jinja``.

    Zero beyond its end, up to whole atoms. Any strides; the result is 1-D uint8, contiguous.
    """
    given = b.view(torch.uint8)
    in_a_byte = 8 // bits
    depth = atom_depth(bits) // in_a_byte
    rows, cols = given.shape
    padded = torch.nn.functional.pad(given, (0, -cols % ROWS, 0, -rows % depth))
    # An index along K is (atom, step of 16, pair, thread, element of a pair); of a column it is (atom, warp, row of two, thread).
    columns = (padded.shape[1] // ROWS, 4, 2, 8)
    if bits == 8:
        atoms = padded.reshape(-1, depth // 16, 2, 4, 2, *columns)
        return atoms.permute(5, 0, 6, 8, 3, 1, 2, 4, 7).reshape(-1)
    numbers = torch.stack([padded & 15, padded >> 4])  # two of a byte are a pair
    atoms = numbers.reshape(2, -1, depth // 8, 2, 4, *columns)
    low, high = atoms.permute(7, 5, 1, 6, 8, 4, 2, 0, 3).unbind(0)
    return (low | high << 4).reshape(-1)
