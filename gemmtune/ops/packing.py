"""Two numbers of four bits in each byte: the packing of mixed_mm's weights."""

from __future__ import annotations

import torch

from ..errors import InvalidProblemError
from ..problem.compositions import packed, unpacked
from ..problem.operations import ENCODINGS, Encoding

__all__ = ["pack_int4", "unpack_int4"]

_RANGES = {"int4": (-8, 7), "uint4": (0, 15)}


def pack_int4(weight: torch.Tensor, *, encoding: Encoding = "int4") -> torch.Tensor:
    """The packed form of a weight, as ``mixed_mm`` takes it.

    Row j of the result holds row 2j of the weight in its low four bits and row 2j + 1 in its high four bits: two neighbours along K
    share a byte. ``int4`` is two's complement.

    Args:
        weight: [K, N] of an integer dtype, K even, any strides: of -8 … 7, or for the encoding ``uint4`` of 0 … 15.

    Returns:
        uint8 [K/2, N], row- or column-major as ``weight`` is.

    Raises:
        InvalidProblemError: another shape or dtype, or a number out of that range.
    """
    low, high = _range(encoding, "pack_int4")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[0] % 2:
        got = f"shape {list(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InvalidProblemError(f"pack_int4: weight must be a 2-D tensor [K, N] with even K, got {got}")
    if weight.dtype.is_floating_point or weight.dtype.is_complex or weight.dtype == torch.bool:
        raise InvalidProblemError(f"pack_int4: weight must have an integer dtype, got {weight.dtype}; round it and cast it")
    if weight.numel() and not low <= int(weight.min()) <= int(weight.max()) <= high:
        least, most = int(weight.min()), int(weight.max())
        raise InvalidProblemError(f"pack_int4: {encoding} has numbers from {low} to {high}, got {least} to {most}; clamp them")
    return packed(weight)


def unpack_int4(packed_weight: torch.Tensor, *, encoding: Encoding = "int4") -> torch.Tensor:
    """The weight of which ``pack_int4`` made ``packed_weight``: [K/2, N] uint8 → [K, N] int8, or uint8 for ``uint4``.

    Raises:
        InvalidProblemError: another shape or dtype.
    """
    _range(encoding, "unpack_int4")
    if not isinstance(packed_weight, torch.Tensor) or packed_weight.dim() != 2 or packed_weight.dtype != torch.uint8:
        tensor = isinstance(packed_weight, torch.Tensor)
        got = f"{packed_weight.dtype} of shape {list(packed_weight.shape)}" if tensor else type(packed_weight).__name__
        raise InvalidProblemError(f"unpack_int4: expected a uint8 tensor [K/2, N], got {got}")
    return unpacked(packed_weight, encoding)


def _range(encoding: str, name: str) -> tuple[int, int]:
    if encoding not in _RANGES:
        expected = ", ".join(text for text in ENCODINGS if text)
        raise InvalidProblemError(f"{name}: encoding: got {encoding!r}, expected one of {expected}")
    return _RANGES[encoding]
