"""Quantization of a weight: the rounding of ``QuantizedWeight.quantize``."""

import math
from typing import Literal, NamedTuple

import torch

from ..dispatch.checks import why_composed
from ..errors import InvalidProblemError
from ..problem.compositions import over_blocks, packed
from ..problem.dtypes import FLOAT8, dtype_name
from ..problem.operations import Encoding
from .views import HasNoMemory

Tensor = torch.Tensor
Kind = Literal["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"]
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}
_KINDS = (*_BITS, *map(dtype_name, FLOAT8))
Block = tuple[int | None, int | None]
_BLOCKS: dict[str, Block] = {
    "tensor": (None, None),
    "column": (None, 1),
    **{f"group_{size}": (size, 1) for size in (32, 64, 128)},
    "block_128x128": (128, 128),
}


class Rounded(NamedTuple):
    """Parts of a quantized weight, as ``QuantizedWeight`` takes them."""

    numbers: Tensor
    scales: Tensor
    zero_points: Tensor | None
    encoding: Encoding


def rounded(weight: Tensor, kind: Kind, scales: str, scale_dtype: torch.dtype | None) -> Rounded:
    """Return the nearest numbers of a kind. Every dequantized number is finite.

    Raises InvalidProblemError for an illegal weight, kind or block, and for scales that overflow their dtype.
    """
    if isinstance(weight, Tensor) and weight.dim() == 3 and weight.shape[0]:
        return _rounded_experts(weight, kind, scales, scale_dtype)
    _check_weight(weight, kind)
    if scales not in _BLOCKS or (scales == "block_128x128" and kind in _BITS):
        raise InvalidProblemError(f"quantize: scales: got {scales!r} for {kind}, expected one of {', '.join(_BLOCKS)}")
    default = weight.dtype if kind in _BITS and weight.dtype in SCALE_DTYPES else torch.float32
    dtype = scale_dtype or default
    size, legal = (weight.shape[0], weight.shape[1]), (_BLOCKS[scales],)
    wide = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    least, most = _extremes(wide, _BLOCKS[scales])
    if kind not in _BITS:
        float8 = getattr(torch, kind)
        largest = torch.finfo(float8).max
        scale = _positive(torch.maximum(-least, most) / largest, dtype, torch.finfo(weight.dtype).max / largest)
        # A scale that was rounded down leaves numbers above the largest, which a cast would make NaN or infinity.
        values = (wide / over_blocks(scale.to(wide.dtype), size, legal, "scales")).clamp(-largest, largest)
        return Rounded(values.to(float8), scale, None, "")
    steps = 2 ** _BITS[kind] - 1
    signed = not kind.startswith("u")
    overflow = torch.finfo(weight.dtype).max
    if signed:
        scale = _positive(torch.maximum(-least, most) / (steps // 2), dtype, overflow / (steps // 2))
    else:
        scale = _positive(most / steps - least / steps, dtype)
    zero = None if signed else (-least / scale.to(wide.dtype)).round().clamp(0, steps).to(dtype)
    whole_scale = over_blocks(scale.to(wide.dtype), size, legal, "scales")
    # Numbers whose product with the scale would overflow the weight's dtype are rounded towards zero instead.
    most_number = (overflow / whole_scale).floor()
    values = (wide / whole_scale).round().clamp(-most_number, most_number)
    if zero is not None:
        values = values + over_blocks(zero.to(wide.dtype), size, legal, "zero_points")
    low = -(steps // 2) - 1 if signed else 0
    numbers = values.clamp(low, low + steps).to(torch.int8 if signed else torch.uint8)
    four_bits = _BITS[kind] == 4
    return Rounded(packed(numbers) if four_bits else numbers, scale, zero, kind if four_bits else "")  # type: ignore[arg-type]


def _rounded_experts(weight: Tensor, kind: Kind, scales: str, scale_dtype: torch.dtype | None) -> Rounded:
    """Quantize each weight (K, N) separately."""
    along_k = _BLOCKS.get(scales, (None, 1))[0] or 1
    if scales in ("tensor", "block_128x128") or kind in ("uint8", "uint4") or (kind not in _BITS and along_k > 1):
        raise InvalidProblemError(
            f"quantize: got {kind} with scales {scales!r} for experts [G, K, N], expected int8 or int4 with scales of columns or "
            "groups, or 8-bit floats with those of columns"
        )
    if weight.shape[1] % along_k:
        raise InvalidProblemError(
            f"quantize: weight: got {weight.shape[1]} rows for each expert, expected a multiple of the {along_k} that share a scale"
        )
    parts = [rounded(matrix, kind, scales, scale_dtype) for matrix in weight]
    numbers = [part.numbers for part in parts]
    stacked = torch.stack([x.t() for x in numbers]).mT if numbers[0].stride(0) == 1 else torch.stack(numbers)
    return Rounded(stacked, torch.stack([part.scales for part in parts]), None, parts[0].encoding)


def _check_weight(weight: object, kind: str) -> None:
    if kind not in _KINDS:
        raise InvalidProblemError(f"quantize: kind: got {kind!r}, expected one of {', '.join(_KINDS)}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.numel() or not weight.dtype.is_floating_point:
        got = f"{weight.dtype} of shape {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidProblemError(
            f"quantize: weight: got {got}, expected a tensor [K, N], or [G, K, N] for experts, of a float dtype, not empty"
        )
    if not isinstance(weight, HasNoMemory) and (why := why_composed([weight], floats=False)) is not None:
        raise InvalidProblemError(f"quantize: weight: {why}, expected a plain tensor; quantize a model before it is sharded")
    if _BITS.get(kind) == 4 and weight.shape[0] % 2:
        raise InvalidProblemError(
            f"quantize: weight: got {weight.shape[0]} rows, expected an even number for {kind}; add one of zeros"
        )
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise InvalidProblemError("quantize: weight: got infinity or NaN, expected finite numbers")


def _extremes(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the least number of each block or 0, and the largest or 0, shaped like the scales of such blocks."""
    (k, n), (rows, cols) = weight.shape, (block[0] or weight.shape[0], block[1] or weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -n % cols, 0, -k % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def _positive(scale: Tensor, dtype: torch.dtype, limit: float = math.inf) -> Tensor:
    """Return the scale in ``dtype``, rounded down above ``limit``, 1 where it is 0. Raises InvalidProblemError on overflow."""
    found = scale.to(dtype)
    if not found.is_meta and not bool(found.isfinite().all()):
        raise InvalidProblemError(
            f"quantize: scales: got a scale of {float(scale.max()):.3g}, which overflows {dtype}; give another scale_dtype, "
            "such as torch.float32 or torch.bfloat16"
        )
    found = torch.where(found.double() > limit, torch.nextafter(found, torch.zeros_like(found)), found)
    return torch.where(found == 0, torch.ones_like(found), found)
