"""Quantization of a weight: the rounding of ``QuantizedWeight.quantize``."""

import math
from typing import Literal, NamedTuple

import torch

from ..dispatch.checks import why_composed
from ..errors import InvalidProblemError
from ..problem.compositions import packed
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

_CACHED = 2**19
"""Elements of a weight on a CPU that are rounded before the next ones, so that all passes over them find them in its cache."""


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
    dtype, block, plain = scale_dtype or default, _BLOCKS[scales], weight.detach()
    columns = max(_CACHED // plain.shape[0], 1) if plain.device.type == "cpu" and block[1] == 1 else plain.shape[1]
    parts = [_rounded(plain[:, begin : begin + columns], kind, block, dtype) for begin in range(0, plain.shape[1], columns)]
    if len(parts) == 1:
        return parts[0]
    numbers, zeros = [part.numbers for part in parts], [part.zero_points for part in parts if part.zero_points is not None]
    joined = torch.cat([x.t() for x in numbers]).t() if numbers[0].stride(0) == 1 else torch.cat(numbers, 1)
    return Rounded(joined, torch.cat([part.scales for part in parts], 1), torch.cat(zeros, 1) if zeros else None, parts[0].encoding)


def _rounded(weight: Tensor, kind: Kind, block: Block, dtype: torch.dtype) -> Rounded:
    """Round a weight whose blocks have scales of ``dtype``. Passes change their own copy in place."""
    blocks = _blocks(weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32), block)
    least, most = blocks.amin((1, 3), True).clamp(max=0), blocks.amax((1, 3), True).clamp(min=0)
    if not weight.is_meta and not bool((least.isfinite() & most.isfinite()).all()):
        raise InvalidProblemError("quantize: weight: got infinity or NaN, expected finite numbers")

    def matrix(x: Tensor) -> Tensor:
        """Return blocks, or a number for each, as a matrix."""
        return x.flatten(0, 1).flatten(1)

    def numbers_of(x: Tensor, dtype: torch.dtype) -> Tensor:
        return matrix(x)[: weight.shape[0], : weight.shape[1]].to(dtype)

    overflow = torch.finfo(weight.dtype).max
    if kind not in _BITS:
        float8 = getattr(torch, kind)
        largest = torch.finfo(float8).max
        scale = _positive(torch.maximum(-least, most) / largest, dtype, overflow / largest)
        # A scale that was rounded down leaves numbers above the largest, which a cast would make NaN or infinity.
        return Rounded(numbers_of((blocks / scale.to(blocks.dtype)).clamp_(-largest, largest), float8), matrix(scale), None, "")
    steps, signed = 2 ** _BITS[kind] - 1, not kind.startswith("u")
    if signed:
        scale = _positive(torch.maximum(-least, most) / (steps // 2), dtype, overflow / (steps // 2))
    else:
        scale = _positive(most / steps - least / steps, dtype)
    wide_scale = scale.to(blocks.dtype)
    zero = None if signed else (-least / wide_scale).round().clamp(0, steps).to(dtype)
    # Numbers whose product with the scale would overflow the weight's dtype are rounded towards zero instead.
    most_number = (overflow / wide_scale).floor()
    values = (blocks / wide_scale).round_().clamp_(-most_number, most_number)
    if zero is not None:
        values += zero.to(blocks.dtype)
    low = -(steps // 2) - 1 if signed else 0
    numbers = numbers_of(values.clamp_(low, low + steps), torch.int8 if signed else torch.uint8)
    four_bits, zeros = _BITS[kind] == 4, None if zero is None else matrix(zero)
    return Rounded(packed(numbers) if four_bits else numbers, matrix(scale), zeros, kind if four_bits else "")  # type: ignore[arg-type]


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


def check_plain(weight: Tensor) -> None:
    """Raise InvalidProblemError for a weight whose numbers are not in its memory, such as one of another library."""
    if not isinstance(weight, HasNoMemory) and (why := why_composed([weight], floats=False)) is not None:
        raise InvalidProblemError(
            f"quantize: weight: {why}, expected a plain tensor; quantize a model before it is sharded, and by one library only"
        )


def _check_weight(weight: object, kind: str) -> None:
    if kind not in _KINDS:
        raise InvalidProblemError(f"quantize: kind: got {kind!r}, expected one of {', '.join(_KINDS)}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.numel() or not weight.dtype.is_floating_point:
        got = f"{weight.dtype} of shape {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidProblemError(
            f"quantize: weight: got {got}, expected a tensor [K, N], or [G, K, N] for experts, of a float dtype, not empty"
        )
    check_plain(weight)
    if _BITS.get(kind) == 4 and weight.shape[0] % 2:
        raise InvalidProblemError(
            f"quantize: weight: got {weight.shape[0]} rows, expected an even number for {kind}; add one of zeros"
        )


def _blocks(weight: Tensor, block: Block) -> Tensor:
    """Return the blocks of a weight [K, N] as [blocks along K, K, blocks along N, N], with zeros past its end."""
    (k, n), (rows, cols) = weight.shape, (block[0] or weight.shape[0], block[1] or weight.shape[1])
    padded = weight
    if (missing := (-k % rows, -n % cols)) != (0, 0):  # the result has the order in memory of what it is padded from
        x, (last, first) = (weight.t(), missing[::-1]) if weight.stride(0) == 1 else (weight, missing)
        padded = torch.nn.functional.pad(x, (0, first, 0, last))
        padded = padded.t() if x is not weight else padded
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)


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
