"""Arguments of operations that take a QuantizedWeight for b and its scale."""

import torch

from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.operations import Encoding
from .weight import QuantizedWeight

Tensor = torch.Tensor


def parts_of(
    name: str,
    b: Tensor | PackedOperand | QuantizedWeight,
    scale_b: Tensor | None,
    zero_b: Tensor | None = None,
    encoding: Encoding = "",
) -> tuple[Tensor | PackedOperand, Tensor | None, Tensor | None, Encoding]:
    """Return b, scale_b, zero_b and encoding of a call. Raises InvalidProblemError unless a QuantizedWeight is given alone."""
    if not isinstance(b, QuantizedWeight):
        return b, scale_b, zero_b, encoding
    parts = {"scale_b": scale_b, "zero_b": zero_b, "encoding": encoding or None}
    given = [part for part, value in parts.items() if value is not None]
    if given:
        raise InvalidProblemError(f"{name}: got {' and '.join(given)} beside a QuantizedWeight, expected it alone: it has its own")
    if b.dim() != 2:
        raise InvalidProblemError(
            f"{name}: b: got experts {list(b.shape)}, expected one weight [K, N]; grouped_mm multiplies by several"
        )
    if b.transposed:
        k, n = reversed(b.shape)
        raise InvalidProblemError(f"{name}: b: got a QuantizedWeight [{n}, {k}], expected one [K, N]; give its t()")
    return b.numbers, b.scales, b.zero_points, b.encoding


def float8_parts(
    name: str, b: Tensor | PackedOperand | QuantizedWeight, scale_b: Tensor | None
) -> tuple[Tensor | PackedOperand, Tensor]:
    """Return b and scale_b of a product of 8-bit floats. Raises InvalidProblemError for integers, and without a scale."""
    b, scale_b, zero_b, encoding = parts_of(name, b, scale_b)
    if scale_b is None:
        raise InvalidProblemError(f"{name}: scale_b: got None, expected a tensor, or b as a QuantizedWeight with scales")
    if encoding or zero_b is not None:
        raise InvalidProblemError(
            f"{name}: b: got {encoding or 'zero points'}, expected 8-bit floats; mixed_mm multiplies integers"
        )
    return b, scale_b
