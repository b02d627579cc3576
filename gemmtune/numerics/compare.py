"""Which elements of a result are wrong, found on the result's device and without waiting for it; and how good a right one is.

A ``Finding`` gathers the first bad element of several comparisons in one small tensor, which is read once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..problem.dtypes import dtype_info
from .propagate import Approximate
from .reference import Region

MOST = 1.25
"""The grade that a kernel which accumulates in float32 stays below with 16-bit results of N(0, 1) data. Such kernels score 1.00,
16-bit split-K partial sums 1.5–1.9, a 16-bit accumulator above 10."""


def is_right(got: torch.Tensor, expected: Approximate, dtype: torch.dtype) -> torch.Tensor:
    """Which elements of ``got`` are what they must be, for a result of ``dtype``; all in float64.

    Within the error; the same number; NaN for NaN; anything where the error is infinite. An infinity of the right sign also where
    the right result may be beyond the largest number; of either sign where the error leaves the sign open.
    """
    value, error = expected.value, expected.error
    right = ((got - value).abs() <= error) | (got == value) | (got.isnan() & value.isnan()) | (error == torch.inf)
    overflows = got.isinf() & (value.abs() + error > dtype_info(dtype).largest)
    return right | (overflows & (((got > 0) == (value > 0)) | (value.abs() <= error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadElement:
    """An element of out that is not what it must be. ``unwritten``: it still has the bits that were there before the call."""

    index: tuple[int, ...]
    got: float
    expected: float
    tolerance: float
    unwritten: bool

    @property
    def facts(self) -> dict[str, Any]:
        """What a failure says of it."""
        return {"index": self.index, "got": self.got, "expected": self.expected, "tolerance": self.tolerance}

    def text(self, origin: str = "") -> str:
        """What is wrong with it; ``origin`` says where the right number comes from."""
        place = f"out[{', '.join(map(str, self.index))}]"
        if self.unwritten:
            return f"{place} was not written"
        allowed = f" within {self.tolerance:.3g}" if self.tolerance > 0 else " exactly"
        return f"{place} = {self.got:.9g}, expected {self.expected:.9g}{origin}{allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The place in out of a comparison's [b, r, n] block."""

    batch: int
    row: int
    region: Region
    shape: tuple[int, int, int]

    def index(self, position: int) -> tuple[int, int, int]:
        """[batch, row, column] in out of an element of the block, given by its place in the flattened block."""
        _, rows, cols = self.shape
        row, col = self.row + position // cols % rows, position % cols
        if self.region.rows is not None:
            row = int(self.region.rows[row])
        if self.region.cols is not None:
            col = int(self.region.cols[col])
        return self.batch + position // (rows * cols), row, col


class Finding:
    """The outcome of comparing one result: ``state`` is float64 [7], kept on the device.

    Its fields: whether anything is bad; chunk and position of a bad element; got, expected, tolerance; whether it was left
    unwritten, that is, with the bits ``payload``. ``ratio`` is the largest error over its bound so far.
    """

    def __init__(self, device: torch.device, payload: int) -> None:
        self._payload = payload
        self.state = torch.zeros(7, dtype=torch.float64, device=device)
        self.ratio = torch.zeros((), dtype=torch.float64, device=device)
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk, bad: torch.Tensor, bits: torch.Tensor, *values: torch.Tensor) -> None:
        """Take in one chunk: the result's ``bits``; ``values`` are got, expected and tolerance, each broadcastable to ``bad``."""
        self._chunks.append(chunk)
        if bad.numel() == 0 or (bad.device.type == "cpu" and not bad.any()):
            return
        position = bad.flatten().to(torch.uint8).argmax().reshape(1)
        _, m, n = chunk.shape
        # One element each, because indices without dimensions are read by the host; not unravel_index, which makes it wait as well.
        where = (position // (m * n), position // n % m, position % n)
        picked = [value.expand(bad.shape)[where] for value in values]
        here = torch.full_like(position, len(self._chunks) - 1)
        new = torch.cat([x.double() for x in (bad.any().reshape(1), here, position, *picked, bits[where] == self._payload)])
        self.state = torch.where(self.state[0] > 0, self.state, new)

    def bad_element(self, state: Sequence[float], *, batched: bool) -> BadElement | None:
        """The bad element that ``state`` (read from the device) tells of, None if all is well."""
        if not state[0]:
            return None
        index = self._chunks[int(state[1])].index(int(state[2]))
        got, expected, tolerance, unwritten = state[3:7]
        return BadElement(
            index=index if batched else index[1:], got=got, expected=expected, tolerance=tolerance, unwritten=bool(unwritten)
        )


def grade(out: torch.Tensor, value: torch.Tensor) -> float:
    """The error of ``out`` over that of merely rounding the true result: rms(out − R) / rms(round(R) − R).

    R is ``value``, float64 and of the shape of ``out``; it is rounded to ``out``'s dtype. 1 where both are zero, infinity where
    only the rounding error is. Tells nothing for results as wide as the accumulator, whose rounding error is small beside any
    accumulation.
    """
    actual = (out.double() - value).square().mean().sqrt().item()
    least = (value.to(out.dtype).double() - value).square().mean().sqrt().item()
    if least == 0:
        return 1.0 if actual == 0 else math.inf
    return actual / least
