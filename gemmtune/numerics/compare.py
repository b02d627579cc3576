"""Comparing a result with what is right, on the result's device and without waiting for it.

A ``Finding`` gathers the first bad element of several comparisons in one small tensor, which is read once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..problem import Problem
from ..problem.dtypes import dtype_info
from .bounds import Arithmetic, Bound, epilogue_input, underflow
from .operands import storage_bits
from .pick import Pick
from .propagate import Approximate, propagate, rounded
from .reference import Reference, Region, as_batches

__all__ = ["BadElement", "Comparer", "Finding"]

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Elements compared at a time: about 20 float64 temporaries of that size exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadElement:
    """An element of out that is not what it must be. ``unwritten``: it still has the bits that were there before the call."""

    index: tuple[int, ...]
    got: float
    expected: float
    tolerance: float
    unwritten: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Where a comparison's [b, r, n] block lies in out."""

    batch: int
    row: int
    region: Region
    shape: tuple[int, int, int]

    def index(self, position: int) -> tuple[int, int, int]:
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
        self._chunks: list[_Chunk] = []

    def add(self, chunk: _Chunk, bad: torch.Tensor, bits: torch.Tensor, *values: torch.Tensor) -> None:
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


class Comparer:
    """Compares results of one problem, made with the arithmetic that a choice claims, with what is right."""

    def __init__(self, problem: Problem, arithmetic: Arithmetic, extra: Sequence[torch.Tensor]) -> None:
        self._problem = problem
        self._arithmetic = arithmetic
        self._extra = [as_batches(x.expand(problem.out.size)) for x in extra]

    def pick(self, out: torch.Tensor, pick: Pick, finding: Finding) -> None:
        """Compare all of ``out`` with an exact probe: equality, unless an epilogue has to be evaluated or ``out`` rounds it."""
        matrix, bits = as_batches(out), _bits(out)
        equal = self._problem.epilogue is None and self._holds_picked
        dtype = self._problem.accumulator if equal else torch.float64
        for batches, rows in _blocks(matrix.shape, out.device):
            got, held, expected = matrix[batches, rows], bits[batches, rows], pick.exact(batches, rows, dtype)
            chunk = _Chunk(batch=batches.start, row=rows.start, region=Region(), shape=_shape(got))
            if equal:
                got = got.to(dtype)
                bad = got != expected
                if pick.special:
                    bad &= ~(got.isnan() & expected.isnan())
                finding.add(chunk, bad, held, got, expected, torch.zeros_like(finding.ratio))
            else:
                acc = Approximate(value=expected, error=torch.zeros_like(expected))
                if self._problem.epilogue is not None:
                    acc = rounded(acc, epilogue_input(self._problem, self._arithmetic), flush=False)
                self._bounded(got, acc, [x[batches, rows] for x in self._extra], chunk, held, finding)

    def picked_within(self, out: torch.Tensor, pick: Pick, bound: Bound, finding: Finding) -> None:
        """Compare all of ``out`` with a probe that picks rows of b, allowing ``bound`` of S before the epilogue."""
        matrix, bits = as_batches(out), _bits(out)
        for batches, rows in _blocks(matrix.shape, out.device):
            chunk = _Chunk(batch=batches.start, row=rows.start, region=Region(), shape=_shape(matrix[batches, rows]))
            error = bound(pick.magnitude(batches, rows))
            acc = Approximate(value=pick.exact(batches, rows, torch.float64), error=error)
            self._bounded(matrix[batches, rows], acc, [x[batches, rows] for x in self._extra], chunk, bits[batches, rows], finding)

    def reference(self, out: torch.Tensor, reference: Reference, bound: Bound, finding: Finding) -> None:
        """Compare a region of ``out`` with R, allowing ``bound`` of S before the epilogue."""
        region = reference.region
        matrix, bits = region.of(as_batches(out)), region.of(_bits(out))
        extra = [region.of(x) for x in self._extra]
        for batches, rows in _blocks(matrix.shape, out.device):
            got, held = matrix[batches, rows], bits[batches, rows]
            chunk = _Chunk(batch=batches.start, row=rows.start, region=region, shape=_shape(got))
            acc = Approximate(value=reference.value[batches, rows], error=bound(reference.magnitude[batches, rows]))
            self._bounded(got, acc, [x[batches, rows] for x in extra], chunk, held, finding)

    def _bounded(
        self,
        got: torch.Tensor,
        acc: Approximate,
        extra: Sequence[torch.Tensor],
        chunk: _Chunk,
        bits: torch.Tensor,
        finding: Finding,
    ) -> None:
        expected = self._stored(acc, extra)
        got, value, error = got.double(), expected.value, expected.error
        difference = (got - value).abs()
        ratio = torch.where((error > 0) & error.isfinite() & difference.isfinite(), difference / error, 0.0)
        if ratio.numel():
            finding.ratio = torch.maximum(finding.ratio, ratio.max())
        if got.device.type == "cpu" and bool((difference <= error).all()):
            return  # the rest is for NaN, infinities and what is wrong
        right = (difference <= error) | (got == value) | (got.isnan() & value.isnan()) | (error == torch.inf)
        overflows = got.isinf() & (value.abs() + error > dtype_info(self._problem.out.dtype).largest)
        right |= overflows & (((got > 0) == (value > 0)) | (value.abs() <= error))
        finding.add(chunk, ~right, bits, got, value, error)

    @property
    def _holds_picked(self) -> bool:
        """Whether out holds every element of a and b. Of the quantized operations out may be narrower than a."""
        problem = self._problem
        return problem.op != "mixed_mm" or dtype_info(problem.out.dtype).exact_integer >= dtype_info(problem.dtype).exact_integer

    def _stored(self, acc: Approximate, extra: Sequence[torch.Tensor]) -> Approximate:
        """f(acc) as stored in out. Without an epilogue that is one rounding: acc + u·|R| + η, and a little of acc's own error."""
        problem, flush = self._problem, self._arithmetic.flush_subnormals
        info = dtype_info(problem.out.dtype)
        if problem.epilogue is None:
            own = info.unit_roundoff * (acc.value.abs() + acc.error) + underflow(info.dtype, flush=flush)
            return Approximate(value=acc.value, error=acc.error + own)
        result = propagate(
            problem.epilogue,
            acc,
            extra,
            precision=epilogue_input(problem, self._arithmetic),
            flush=flush,
            reference_is_float64=problem.accumulator == torch.float64,
        )
        if problem.epilogue.result_dtype == info.dtype:
            return result
        return rounded(result, info.dtype, flush=flush)


def _bits(out: torch.Tensor) -> torch.Tensor:
    return as_batches(out.view(storage_bits(out).dtype))


def _shape(tensor: torch.Tensor) -> tuple[int, int, int]:
    batch, rows, cols = tensor.shape
    return batch, rows, cols


def _blocks(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(batches, rows) of blocks of at most CHUNK_ELEMENTS: several whole matrices, or some rows of one."""
    batch, m, n = shape
    limit = CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
    if m * n <= limit:
        step = max(1, limit // max(m * n, 1))
        yield from ((slice(i, min(i + step, batch)), slice(0, m)) for i in range(0, batch, step))
        return
    step = max(1, limit // n)
    for i in range(batch):
        yield from ((slice(i, i + 1), slice(row, min(row + step, m))) for row in range(0, m, step))
