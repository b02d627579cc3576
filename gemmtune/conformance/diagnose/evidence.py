"""Evidence for a diagnosis: a wrong result, the right one, and the operands."""

import functools
import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, Unpack

import torch

from ...numerics.buffers import storage_bits
from ...numerics.operands import Operands, scale_factor
from ...numerics.quantized import blocks_of_k, numbers, scale_at
from ...numerics.reference import as_batches
from ...problem import Problem
from ...problem.dtypes import dtype_info

Matrix = Literal["a", "b", "inp"]
MOST_LINES = 48
"""Maximum rows and maximum columns of a view."""
LEAST_LINES = 8
MOST_BATCHES = 3
CANCELLED = 4
"""Ratio up to which sums count as exact: the sum of magnitudes over the largest exact integer. Terms of both signs alternate in the
probes, so that partial sums stay this much smaller."""
MOST_MACS = 2**22
"""Maximum multiplications of a view's product. It takes a few milliseconds for each of a hundred suspects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Wrong result of one call: float64 (B, M, N), masks of its ``bad`` and ``unwritten`` elements, and ``earlier`` results."""

    problem: Problem
    operands: Operands
    got: torch.Tensor
    expected: torch.Tensor
    tolerance: torch.Tensor
    bad: torch.Tensor
    unwritten: torch.Tensor
    earlier: tuple[torch.Tensor, ...] = ()


class Reading(TypedDict, total=False):
    """Wrong reading of an operand: other strides, another storage offset, other rows and columns than those of the view."""

    stride: tuple[int, int, int]
    offset: int
    rows: torch.Tensor
    cols: torch.Tensor


class Seen(Protocol):
    """Elements of the result for matching: float64 views of one shape."""

    problem: Problem
    got: torch.Tensor
    expected: torch.Tensor
    tolerance: torch.Tensor
    bad: torch.Tensor

    @property
    def allowance(self) -> torch.Tensor:
        """Typical rounding error of sums."""

    @functools.cached_property
    def integral(self) -> bool:
        """True if every finite number of the result and of the expectation is an integer."""
        return all(bool((x.nan_to_num(0, 0, 0) % 1 == 0).all()) for x in (self.got, self.expected))


class View(Seen):
    """Rows and columns of the evidence in float64 on the CPU: wrong, right, first and last ones. A hundred bugs are tried."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.problem = evidence.problem
        bad = evidence.bad.cpu()
        batch, m, n = bad.shape
        self.batches = _lines(bad.any(-1).any(-1), min(batch, MOST_BATCHES))
        room = math.isqrt(MOST_MACS // (len(self.batches) * max(self.problem.k, 1)))
        most = min(MOST_LINES, max(LEAST_LINES, room))
        self.rows = _lines(bad[self.batches].any(-1).any(0), min(m, most))
        self.cols = _lines(bad[self.batches].any(-2).any(0), min(n, most))
        self.got, self.expected, self.tolerance = (self.part(x) for x in (evidence.got, evidence.expected, evidence.tolerance))
        self.bad = self.part(evidence.bad)
        self.alpha, self.beta = evidence.operands.alpha, evidence.operands.beta

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return the view's part (b, r, c) of a tensor (B, M, N)."""
        index = (self.batches[:, None, None], self.rows[:, None], self.cols)
        return full[tuple(x.to(full.device) for x in index)].cpu()

    @property
    def inner(self) -> torch.Tensor:
        """Indices 0 … K − 1."""
        return torch.arange(self.problem.k)

    def matrix(self, which: Matrix) -> torch.Tensor:
        """Return an operand with a batch dimension. ``inp`` is broadcast to (B, M, N)."""
        operands = self.evidence.operands
        if which == "inp":
            assert operands.inp is not None
            return as_batches(operands.inp.expand(self.problem.out.size))
        return as_batches(getattr(operands, which))

    def strides(self, which: Matrix) -> tuple[int, int, int]:
        """Return the strides of an operand along batch, rows and columns."""
        batch, row, col = self.matrix(which).stride()
        return batch, row, col

    def lines(self, which: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and columns of an operand that the view needs."""
        return {"a": (self.rows, self.inner), "b": (self.inner, self.cols), "inp": (self.rows, self.cols)}[which]

    @property
    def scaled_inside(self) -> bool:
        """True if scales and zero points are part of a and b: mixed_mm and scales of blocks. Otherwise ``scales`` has them."""
        problem, scale_b = self.problem, self.evidence.operands.scale_b
        of_blocks = scale_b is not None and scale_b.numel() not in (1, problem.n)
        return problem.widens_b or blocks_of_k(problem) > 1 or of_blocks

    def read(self, which: Matrix, **how: Unpack[Reading]) -> torch.Tensor:
        """Return an operand's part of the view, as a kernel with other strides, another offset or other indices reads it.

        Scales and zero points are applied if they are ``scaled_inside``. Elements outside of the operand's buffer are NaN.
        """
        values = self.stored(which, **how)
        if not self.scaled_inside or which == "inp":
            return values
        rows, cols = how.get("rows"), how.get("cols")
        values = values - self.zero_of(rows, cols) if which == "b" else values
        return values * self.scale_of(which, rows, cols)

    def scale_of(self, which: Matrix, rows: torch.Tensor | None = None, cols: torch.Tensor | None = None) -> torch.Tensor:
        """Return scale_a or scale_b for these elements, by default those of the view. Without scales it is 1."""
        return self._factor(which, "scale_a" if which == "a" else "scale_b", rows, cols)

    def zero_of(self, rows: torch.Tensor | None = None, cols: torch.Tensor | None = None) -> torch.Tensor:
        """Return zero_b for these elements. Without zero points it is 0."""
        return self._factor("b", "zero_b", rows, cols)

    def _factor(self, which: Matrix, name: str, rows: torch.Tensor | None, cols: torch.Tensor | None) -> torch.Tensor:
        scale: torch.Tensor | None = getattr(self.evidence.operands, name)
        if scale is None:
            return torch.full((1, 1), float(name != "zero_b"), dtype=torch.float64)
        problem = self.problem
        size = (problem.m, problem.k) if which == "a" else problem.b_size
        lines = (x if x is not None else y for x, y in zip((rows, cols), self.lines(which), strict=True))
        first, second = (x.clamp(0, max(extent - 1, 0)) for x, extent in zip(lines, size, strict=True))
        return scale_at(scale.cpu(), size, first.unsqueeze(-1), second.unsqueeze(0))

    def stored(self, which: Matrix, **how: Unpack[Reading]) -> torch.Tensor:
        """Return the stored numbers, without scales and zero points."""
        matrix = self.matrix(which)
        steps = how.get("stride") or self.strides(which)
        rows, cols = self.lines(which)
        first, second = how.get("rows", rows), how.get("cols", cols)
        start = how.get("offset", int(matrix.storage_offset()))
        encoding = self.problem.encoding if which == "b" else ""
        lines = first // 2 if encoding else first
        index = start + self.batches[:, None, None] * steps[0] + lines[:, None] * steps[1] + second * steps[2]
        bits = storage_bits(matrix)
        inside = (index >= 0) & (index < len(bits))
        values = bits[index.clamp(0, len(bits) - 1).to(bits.device)].view(matrix.dtype).cpu()
        if encoding:
            upper = (first % 2 == 1)[:, None]
            values = numbers(torch.where(upper, values >> 4, values & 15), encoding)[..., ::2, :]
        return torch.where(inside, values.double(), math.nan)

    @functools.cached_property
    def a(self) -> torch.Tensor:
        """Rows of a in the view (b, r, K), with scales if they are ``scaled_inside``."""
        return self.read("a")

    @functools.cached_property
    def b(self) -> torch.Tensor:
        """Columns of b in the view (b, K, c), with scales if they are ``scaled_inside``."""
        return self.read("b")

    @functools.cached_property
    def inp(self) -> torch.Tensor | None:
        """Added operand in the view (b, r, c), or None if it is not read."""
        return None if self.evidence.operands.inp is None or self.beta == 0 else self.read("inp")

    @functools.cached_property
    def scales(self) -> torch.Tensor:
        """scale_a · scale_b, or the factor of int_mm_mul, (r or 1, c or 1). It is 1 without scales, or if a and b include them."""
        operands = self.evidence.operands
        if operands.extra:
            factor = operands.extra[0].expand(self.problem.out.size).cpu()
            return factor[self.rows[:, None], self.cols].double()
        device = operands.a.device
        scales = None if self.scaled_inside else scale_factor(operands, self.rows.to(device), self.cols.to(device))
        return torch.ones(1, 1, dtype=torch.float64) if scales is None else scales.cpu()

    @functools.cached_property
    def product(self) -> torch.Tensor:
        """(scale_a · scale_b) · a @ b, (b, r, c)."""
        return self.a @ self.b * self.scales

    def result(
        self, product: torch.Tensor | None = None, *, inp: torch.Tensor | None = None, alpha: float | None = None
    ) -> torch.Tensor:
        """Return alpha · product + beta · inp. Anything not given is the view's own. The product includes scales."""
        value = (self.product if product is None else product) * (self.alpha if alpha is None else alpha)
        added = self.inp if inp is None else inp
        return value if added is None else value + added * self.beta

    def of(self, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result with other values for a or b."""
        product = (self.a if a is None else a) @ (self.b if b is None else b)
        return self.result(product * self.scales)

    @functools.cached_property
    def allowance(self) -> torch.Tensor:
        """Typical rounding error of sums in the accumulator's dtype (b, r, c), or 0 if the sums are exact."""
        a, b = (x.nan_to_num(0, 0, 0).abs() for x in (self.a, self.b))
        magnitude = abs(self.alpha) * (a @ b * self.scales.abs())
        unit = _unit(a) * _unit(b) * abs(self.alpha) * _unit(self.scales)
        if self.inp is not None:
            added = (self.beta * self.inp.nan_to_num(0, 0, 0)).abs()
            magnitude, unit = magnitude + added, min(unit, _unit(added))
        info = dtype_info(self.problem.accumulator)
        if magnitude.numel() and float(magnitude.max()) <= CANCELLED * info.exact_integer * unit:
            return torch.zeros_like(magnitude)
        return 8 * math.sqrt(self.problem.k + 1) * info.unit_roundoff * magnitude


def _unit(values: torch.Tensor) -> float:
    """Return the largest power of two that divides all these float64 numbers, or infinity if all are 0."""
    fraction, exponent = torch.frexp(values[values != 0])
    if not len(fraction):
        return math.inf
    digits = (fraction * 2.0**53).to(torch.int64)
    lowest = (digits & -digits).double()
    return math.ldexp(1.0, int((torch.log2(lowest) + exponent - 53).min()))


def _lines(bad: torch.Tensor, most: int) -> torch.Tensor:
    """Return ``most`` sorted indices of a dimension: first and last ones, and as many wrong as right lines, evenly spread."""
    size = len(bad)
    if size <= most:
        return torch.arange(size)
    chosen = {0, size - 1, size - 2} if most >= LEAST_LINES else {0, size - 1}
    for wrong, count in ((True, (most + len(chosen)) // 2), (False, most)):
        pool = [line for line in (bad == wrong).nonzero().flatten().tolist() if line not in chosen]
        step = max(1, -(-len(pool) // max(count - len(chosen), 1)))
        chosen |= set(pool[::step][: max(count - len(chosen), 0)])
    return torch.tensor(sorted(chosen))
