"""Weights made ready ahead of calls: two numbers of four bits in each byte, and layouts that kernels like best."""

from typing import overload

import torch

from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.compositions import packed, unpacked
from ..problem.dtypes import dtype_name
from ..problem.fused import NAMES
from ..problem.operations import ENCODINGS, Encoding
from ..quantized.weight import QuantizedWeight

_DTYPES = {name: row.dtypes_of_b for name, row in NAMES.items() if row.prepacks}
"""The operations that take a prepacked operand, and the dtypes that it may have."""
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
    least, most = map(int, weight.aminmax()) if weight.numel() else (low, high)
    if least < low or most > high:
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


@overload
def prepack(b: QuantizedWeight, *, op: str | None = None) -> QuantizedWeight: ...  # type: ignore[overload-overlap]
@overload
def prepack(b: torch.Tensor, *, op: str | None = None) -> PackedOperand: ...
def prepack(b: torch.Tensor | QuantizedWeight, *, op: str | None = None) -> PackedOperand | QuantizedWeight:
    """Return ``b`` with room for copies in the layouts that kernels read fast, so that packing is not part of each call.

    Args:
        b: [K, N], any strides: the right operand of a product, such as ``linear.weight.t()``; or int4 weights [K/2, N] for
            ``mixed_mm`` with an encoding; or a ``QuantizedWeight``; or a sparse_bsr tensor [M, K] for ``bsr_mm``. It is kept, not
            copied.
        op: the operation that uses it, such as ``"mixed_mm"``. Its dtype is then checked here, and not in the first call.

    Returns:
        An operand for mm, addmm, int_mm, int_mm_mul, mixed_mm and scaled_mm in place of ``b``, and for bsr_mm and bsr_addmm in
        place of ``bsr``. For a ``QuantizedWeight`` it is one with prepacked numbers. Packed copies need memory in addition to
        ``b``. After a change of ``b`` the next call packs it again. torch does not count writes through ``b.data``, DLPack, numpy
        or raw pointers. On a GPU call ``refresh()`` of the result after such a write. On a CPU it is noticed if it changes one of
        a thousand sampled elements.

    Raises:
        InvalidProblemError: ``b`` is not a 2-D tensor, or not of a dtype that ``op`` takes.
    """
    if isinstance(b, QuantizedWeight):
        weight = QuantizedWeight(prepack(b.tensor, op=op), b.scales, b.zero_points, b.encoding, dtype=b.dtype)
        return weight.t() if b.transposed else weight  # type: ignore[return-value]
    if not isinstance(b, torch.Tensor) or b.dim() != 2:
        got = f"a {b.dim()}-D tensor" if isinstance(b, torch.Tensor) else type(b).__name__
        raise InvalidProblemError(f"prepack: b must be a 2-D tensor [K, N], got {got}")
    if op is not None and op not in _DTYPES:
        raise InvalidProblemError(f"prepack: op: got {op!r}, expected one of {', '.join(_DTYPES)}, or None")
    if op is not None and b.dtype not in _DTYPES[op]:
        expected = ", ".join(map(dtype_name, _DTYPES[op]))
        raise InvalidProblemError(f"prepack: dtype of b: got {b.dtype}, expected for {op} one of {expected}")
    return PackedOperand(b)
