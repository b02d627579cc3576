"""A weight of few bits with all that belongs to it, as one operand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..errors import InvalidProblemError
from ..problem.compositions import dequantized, packed, spread
from ..problem.dtypes import FLOAT8, dtype_name
from ..problem.operations import ENCODINGS, Encoding
from ..problem.scales import BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, Blocks, block_of, scale_shapes
from .prepack import PackedOperand

__all__ = ["QuantizedWeight", "float8_parts", "parts_of"]

Tensor = torch.Tensor
Kind = Literal["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"]
_BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}
_KINDS = (*_BITS, *map(dtype_name, FLOAT8))
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCKS = {"tensor": (None, None), "column": (None, 1), "group_32": (32, 1), "group_64": (64, 1), "group_128": (128, 1),
           "block_128x128": (128, 128)}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight (numbers − zero_points) · scales of shape [K, N], which ``mixed_mm`` and ``scaled_mm`` take in place of ``b``.

    Args:
        numbers: [K, N] int8, uint8, float8_e4m3fn or float8_e5m2, or with an ``encoding`` uint8 [K/2, N] as ``pack_int4`` makes it,
            any strides; or ``prepack`` of that.
        scales: float32, float16 or bfloat16: one element, [1, N], or [⌈K/g⌉, N] with a number for each g = 32, 64 or 128 elements
            along K of a column; of 8-bit floats also [⌈K/128⌉, ⌈N/128⌉]. None means 1.
        zero_points: as ``scales``, for integers; needs scales. None means 0.
        encoding: ``int4`` (two's complement) or ``uint4`` for packed numbers.

    Raises:
        InvalidProblemError: the parts do not fit together.
    """

    numbers: Tensor | PackedOperand
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    encoding: Encoding = ""

    def __post_init__(self) -> None:
        _check_numbers(self.tensor, self.encoding)
        if self.zero_points is not None and (self.scales is None or self.tensor.dtype in FLOAT8):
            raise InvalidProblemError(
                "QuantizedWeight: got zero_points without scales or for 8-bit floats, expected integers with both"
            )
        for name, part in (("scales", self.scales), ("zero_points", self.zero_points)):
            if part is not None:
                self._check_part(name, part)

    def _check_part(self, name: str, part: Tensor) -> None:
        if not isinstance(part, Tensor) or part.dtype not in _SCALE_DTYPES:
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise InvalidProblemError(f"QuantizedWeight: {name}: got {got}, expected a tensor of float32, float16 or bfloat16")
        if part.device != self.device:
            raise InvalidProblemError(
                f"QuantizedWeight: {name}: got one on {part.device}, expected {self.device}; move one of them"
            )
        if block_of(tuple(part.shape), self._size, self._blocks) is None:
            legal = " or ".join(str(list(shape)) for shape in dict.fromkeys(scale_shapes(self._size, self._blocks)))
            raise InvalidProblemError(
                f"QuantizedWeight: {name}: got shape {list(part.shape)} for a weight {list(self._size)}, expected {legal}"
            )

    @classmethod
    def quantize(
        cls, weight: Tensor, kind: Kind = "int8", *, scales: str = "column", scale_dtype: torch.dtype | None = None
    ) -> QuantizedWeight:
        """Round a weight to the nearest of few numbers.

        Args:
            weight: [K, N] of a float dtype, all finite, such as ``linear.weight.t()``; K even for four bits. The numbers are
                row- or column-major as it is.
            kind: signed integers are around zero; unsigned ones have zero points; 8-bit floats have neither.
            scales: what has a number of its own: ``tensor``, ``column``, ``group_32``, ``group_64`` or ``group_128`` elements along
                K of a column, or for 8-bit floats ``block_128x128``.
            scale_dtype: of scales and zero points; by default that of ``weight``, and float32 for 8-bit floats, as ``scaled_mm``
                wants it.

        Raises:
            InvalidProblemError: a weight, kind or block that is not one of these.
        """
        _check_weight(weight, kind)
        if scales not in _BLOCKS or (scales == "block_128x128" and kind in _BITS):
            raise InvalidProblemError(f"quantize: scales: got {scales!r} for {kind}, expected one of {', '.join(_BLOCKS)}")
        default = weight.dtype if kind in _BITS and weight.dtype in _SCALE_DTYPES else torch.float32
        dtype = scale_dtype or default
        size, legal = (weight.shape[0], weight.shape[1]), (_BLOCKS[scales],)
        wide = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        least, most = _extremes(wide, _BLOCKS[scales])
        if kind not in _BITS:
            float8 = getattr(torch, kind)
            scale = _positive(torch.maximum(-least, most) / torch.finfo(float8).max, dtype)
            return cls((wide / spread(scale.to(wide.dtype), size, legal, "scales")).to(float8), scale)
        steps = 2 ** _BITS[kind] - 1
        signed = not kind.startswith("u")
        scale = _positive(torch.maximum(-least, most) / (steps // 2) if signed else (most - least) / steps, dtype)
        zero = None if signed else (-least / scale.to(wide.dtype)).round().clamp(0, steps).to(dtype)
        values = (wide / spread(scale.to(wide.dtype), size, legal, "scales")).round()
        if zero is not None:
            values = values + spread(zero.to(wide.dtype), size, legal, "zero_points")
        low = -(steps // 2) - 1 if signed else 0
        numbers = values.clamp(low, low + steps).to(torch.int8 if signed else torch.uint8)
        four_bits = _BITS[kind] == 4
        return cls(packed(numbers) if four_bits else numbers, scale, zero, kind if four_bits else "")  # type: ignore[arg-type]

    @property
    def tensor(self) -> Tensor:
        """The numbers as a tensor, also where they are prepacked."""
        return self.numbers.tensor if isinstance(self.numbers, PackedOperand) else self.numbers

    @property
    def shape(self) -> torch.Size:
        """The weight's shape, [K, N]; numbers of four bits count one by one."""
        return torch.Size(self._size)

    @property
    def device(self) -> torch.device:
        """The device on which the parts live."""
        return self.tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, without packed copies."""
        return sum(x.nbytes for x in (self.tensor, self.scales, self.zero_points) if x is not None)

    @property
    def _size(self) -> tuple[int, int]:
        rows, cols = self.tensor.shape
        return (rows * 2 if self.encoding else rows, cols)

    @property
    def _blocks(self) -> Blocks:
        return tuple(dict.fromkeys((*BLOCKS_OF_WEIGHTS, *BLOCKS_OF_B))) if self.tensor.dtype in FLOAT8 else BLOCKS_OF_WEIGHTS

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [K, N] in ``dtype``, by default that of the scales, or float32 without any."""
        dtype = dtype or (torch.float32 if self.scales is None else self.scales.dtype)
        return dequantized(self.tensor, self.scales, self.zero_points, self.encoding, dtype, legal=self._blocks)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on another device; prepacked numbers stay prepacked."""
        tensor = self.tensor.to(device)
        return replace(
            self,
            numbers=PackedOperand(tensor) if isinstance(self.numbers, PackedOperand) else tensor,
            scales=None if self.scales is None else self.scales.to(device),
            zero_points=None if self.zero_points is None else self.zero_points.to(device),
        )

    def __repr__(self) -> str:
        kind = self.encoding or dtype_name(self.tensor.dtype)
        scales = "no scales" if self.scales is None else f"scales {list(self.scales.shape)} {dtype_name(self.scales.dtype)}"
        zeros = "" if self.zero_points is None else ", zero points"
        prepacked = ", prepacked" if isinstance(self.numbers, PackedOperand) else ""
        return f"QuantizedWeight({list(self.shape)} {kind}, {scales}{zeros}{prepacked}, {self.device})"


def parts_of(
    name: str,
    b: Tensor | PackedOperand | QuantizedWeight,
    scale_b: Tensor | None,
    zero_b: Tensor | None = None,
    encoding: Encoding = "",
) -> tuple[Tensor | PackedOperand, Tensor | None, Tensor | None, Encoding]:
    """b, scale_b, zero_b and encoding of a call. Raises InvalidProblemError where a QuantizedWeight is not given alone."""
    if not isinstance(b, QuantizedWeight):
        return b, scale_b, zero_b, encoding
    parts = {"scale_b": scale_b, "zero_b": zero_b, "encoding": encoding or None}
    given = [part for part, value in parts.items() if value is not None]
    if given:
        raise InvalidProblemError(f"{name}: got {' and '.join(given)} beside a QuantizedWeight, expected it alone: it has its own")
    return b.numbers, b.scales, b.zero_points, b.encoding


def float8_parts(
    name: str, b: Tensor | PackedOperand | QuantizedWeight, scale_b: Tensor | None
) -> tuple[Tensor | PackedOperand, Tensor]:
    """b and scale_b of a product of 8-bit floats. Raises InvalidProblemError for a weight of integers, or one without a scale."""
    b, scale_b, zero_b, encoding = parts_of(name, b, scale_b)
    if scale_b is None:
        raise InvalidProblemError(f"{name}: scale_b: got None, expected a tensor, or b as a QuantizedWeight with scales")
    if encoding or zero_b is not None:
        raise InvalidProblemError(
            f"{name}: b: got {encoding or 'zero points'}, expected 8-bit floats; mixed_mm multiplies integers"
        )
    return b, scale_b


def _check_numbers(numbers: object, encoding: str) -> None:
    if encoding not in ENCODINGS:
        expected = ", ".join(map(repr, ENCODINGS))
        raise InvalidProblemError(f"QuantizedWeight: encoding: got {encoding!r}, expected one of {expected}")
    legal = (torch.uint8,) if encoding else (torch.int8, torch.uint8, *FLOAT8)
    if not isinstance(numbers, Tensor) or numbers.dim() != 2 or numbers.dtype not in legal:
        got = f"{numbers.dtype} of shape {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        names = ", ".join(map(dtype_name, legal))
        raise InvalidProblemError(f"QuantizedWeight: numbers: got {got}, expected a 2-D tensor of {names}, or prepack of one")


def _check_weight(weight: object, kind: str) -> None:
    if kind not in _KINDS:
        raise InvalidProblemError(f"quantize: kind: got {kind!r}, expected one of {', '.join(_KINDS)}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.numel() or not weight.dtype.is_floating_point:
        got = f"{weight.dtype} of shape {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidProblemError(f"quantize: weight: got {got}, expected a 2-D tensor [K, N] of a float dtype, not empty")
    if _BITS.get(kind) == 4 and weight.shape[0] % 2:
        raise InvalidProblemError(
            f"quantize: weight: got {weight.shape[0]} rows, expected an even number for {kind}; add one of zeros"
        )
    if not bool(weight.isfinite().all()):
        raise InvalidProblemError("quantize: weight: got infinity or NaN, expected finite numbers")


def _extremes(weight: Tensor, block: tuple[int | None, int | None]) -> tuple[Tensor, Tensor]:
    """The least number of each block or 0, and the largest or 0: as a scale of such blocks is shaped."""
    (k, n), (rows, cols) = weight.shape, (block[0] or weight.shape[0], block[1] or weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -n % cols, 0, -k % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def _positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in ``dtype``; 1 where a block is all zeros, or too small for it."""
    scale = scale.to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)
