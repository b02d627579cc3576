"""Comparison of a result with expected values on the result's device without waiting for it, and a grade of accuracy.

A ``Finding`` gathers the first bad element of several comparisons in one small tensor. The host reads it once at the
end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..problem.dtypes import dtype_info
from .propagate import Approximate
from .reference import Region

MOST = 1.25
"""Upper limit of the grade of float32 accumulation: 1.00 is usual, 16-bit split-K has 1.5–1.9, 16-bit sums above 10."""


def same_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two results are equal. Any NaN equals any NaN."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def is_right(got: torch.Tensor, expected: Approximate, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of the correct elements of ``got`` for a result of ``dtype``. All arguments are float64.

    An element is correct if it is within the error or equal, or if both are NaN. An infinite error allows anything. An
    infinity of the right sign is also correct where the right result may exceed the largest number. Either sign passes
    where the error leaves the sign open.
    """
    value, error = expected.value, expected.error
    right = ((got - value).abs() <= error) | (got == value) | (got.isnan() & value.isnan()) | (error == torch.inf)
    overflows = got.isinf() & (value.abs() + error > dtype_info(dtype).largest)
    return right | (overflows & (((got > 0) == (value > 0)) | (value.abs() <= error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadElement:
    """Wrong element of out. ``unwritten`` says that it still has the bits from before the call."""

    index: tuple[int, ...]
    got: float
    expected: float
    tolerance: float
    unwritten: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Fields that describe the element in a failure report."""
        return {"index": self.index, "got": self.got, "expected": self.expected, "tolerance": self.tolerance}

    def text(self, origin: str = "") -> str:
        """Describe the error. ``origin`` names the source of the expected number."""
        place = f"out[{', '.join(map(str, self.index))}]"
        if self.unwritten:
            return f"{place} was not written"
        allowed = f" within {self.tolerance:.3g}" if self.tolerance > 0 else " exactly"
        return f"{place} = {self.got:.9g}, expected {self.expected:.9g}{origin}{allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Position in out of one compared block [b, r, n]."""

    batch: int
    row: int
    region: Region
    shape: tuple[int, int, int]

    def index(self, position: int) -> tuple[int, int, int]:
        """Return [batch, row, column] in out of the element at ``position`` in the flattened block."""
        _, rows, cols = self.shape
        row, col = self.row + position // cols % rows, position % cols
        if self.region.rows is not None:
            row = int(self.region.rows[row])
        if self.region.cols is not None:
            col = int(self.region.cols[col])
        return self.batch + position // (rows * cols), row, col


class Finding:
    """Outcome of comparing one result, kept on the device.

    ``state`` is float64 [7]: a flag for a bad element, its chunk and position, got, expected, tolerance, a flag for unwritten.
    An unwritten element has the bits ``payload``. ``ratio`` is the largest error so far, divided by its bound.
    """

    def __init__(self, device: torch.device, payload: int) -> None:
        self._payload = payload
        self.state = torch.zeros(7, dtype=torch.float64, device=device)
        self.ratio = torch.zeros((), dtype=torch.float64, device=device)
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk, bad: torch.Tensor, bits: torch.Tensor, *values: torch.Tensor) -> None:
        """Add one chunk: the result's ``bits``, and ``values`` got, expected and tolerance, broadcastable to ``bad``."""
        self._chunks.append(chunk)
        if bad.numel() == 0 or (bad.device.type == "cpu" and not bad.any()):
            return
        position = bad.flatten().to(torch.uint8).argmax().reshape(1)
        _, m, n = chunk.shape
        # Tensors of one element index here: the host would read an index without dimensions. unravel_index makes the
        # host wait too.
        where = (position // (m * n), position // n % m, position % n)
        picked = [value.expand(bad.shape)[where] for value in values]
        here = torch.full_like(position, len(self._chunks) - 1)
        new = torch.cat([x.double() for x in (bad.any().reshape(1), here, position, *picked, bits[where] == self._payload)])
        self.state = torch.where(self.state[0] > 0, self.state, new)

    def bad_element(self, state: Sequence[float], *, batched: bool) -> BadElement | None:
        """Return the bad element that ``state`` (read from the device) describes, or None if all are correct."""
        if not state[0]:
            return None
        index = self._chunks[int(state[1])].index(int(state[2]))
        got, expected, tolerance, unwritten = state[3:7]
        return BadElement(
            index=index if batched else index[1:], got=got, expected=expected, tolerance=tolerance, unwritten=bool(unwritten)
        )


def grade(out: torch.Tensor, value: torch.Tensor) -> float:
    """Return the error of ``out`` divided by the error of rounding the true result: rms(out − R) / rms(round(R) − R).

    R is ``value``, float64 with the shape of ``out``, and is rounded to ``out``'s dtype. The grade is 1 if both errors
    are zero, and infinite if only the rounding error is. It means nothing for results as wide as the accumulator, whose
    rounding error is small compared with any accumulation.
    """
    actual = (out.double() - value).square().mean().sqrt().item()
    least = (value.to(out.dtype).double() - value).square().mean().sqrt().item()
    if least == 0:
        return 1.0 if actual == 0 else math.inf
    return actual / least
