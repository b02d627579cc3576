"""Exact result of a probe whose product picks elements of its operands."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..problem.dtypes import is_float8
from .operands import Operands
from .quantized import gathered_numbers, scale_at
from .reference import as_batches


@dataclass(frozen=True, kw_only=True)
class OneHotProbe:
    """Probe with operands and the exact alpha · a @ b + beta · inp, including the operands' scales and zero points.

    Element [.., i, j] is alpha · v_i · b[k_i, j] or alpha · w_j · a[i, l_j], plus beta · inp[i, j]. A zero point is
    subtracted from b[k_i, j], and either product is multiplied by the scales of its two factors. ``row_factor`` v and
    ``row_index`` k are [B, M], ``col_factor`` w and ``col_index`` l are [B, N]. A dimension has size 1 where the operand is
    broadcast along it. If both pairs are given, ``by_rows`` [M] marks the rows of the first kind.
    """

    name: str
    operands: Operands
    by_rows: torch.Tensor | None = None
    row_factor: torch.Tensor | None = None
    row_index: torch.Tensor | None = None
    col_factor: torch.Tensor | None = None
    col_index: torch.Tensor | None = None
    planted_rows: tuple[tuple[int, int], ...] = ()
    """(row of a, place along K) of non-finite numbers. They meet zeros of b, so their rows are NaN except where picked."""
    planted_cols: tuple[tuple[int, int], ...] = ()
    """(column of b, place along K) of numbers that are not finite and meet zeros of a."""

    @functools.cached_property
    def _row_major_a(self) -> torch.Tensor:
        """Copy of a [B, M, K], contiguous along K. One copy is several times faster than picking from other layouts."""
        return as_batches(_pickable(self.operands.left)).contiguous()

    @functools.cached_property
    def _row_major_b(self) -> torch.Tensor:
        return as_batches(_pickable(self.operands.right)).contiguous()

    def exact(self, batches: slice, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the result [b, r, N] for these batches and rows in ``dtype``, the accumulator's or a wider one: exact."""
        operands = self.operands
        results = [*self._from_rows(batches, rows, dtype), *self._from_cols(batches, rows, dtype)]
        result = results[0] if self.by_rows is None else torch.where(self.by_rows[rows].unsqueeze(-1), results[0], results[1])
        self._spread_planted(result, batches, rows)
        if operands.inp is None or operands.beta == 0:
            return result
        size = (*operands.a.shape[:-1], operands.b.shape[-1])
        return result + as_batches(operands.inp.expand(size))[batches, rows].to(dtype) * operands.beta

    def _spread_planted(self, result: torch.Tensor, batches: slice, rows: slice) -> None:
        for row, place in self.planted_rows:
            if self.col_index is not None and rows.start <= row < rows.stop:
                result[:, row - rows.start].masked_fill_(_sliced(self.col_index, batches) != place, math.nan)
        for col, place in self.planted_cols:
            if self.row_index is not None:
                index = self.row_index.expand(-1, self._m)[:, rows]
                result[..., col].masked_fill_(_sliced(index, batches) != place, math.nan)

    def magnitude(self, batches: slice, rows: slice) -> torch.Tensor:
        """Return S of a probe that picks rows of b for these batches and rows, float64, with |b| + |zero_b| and without inp."""
        (result,) = self._from_rows(batches, rows, torch.float64, magnitude=True)
        return result

    def _from_rows(self, batches: slice, rows: slice, dtype: torch.dtype, *, magnitude: bool = False) -> Iterator[torch.Tensor]:
        """Yield the result as multiples of rows of b, if the probe picks any."""
        if self.row_index is None or self.row_factor is None:
            return
        index, factor = (x.expand(-1, self._m)[:, rows] for x in (self.row_index, self.row_factor))
        factor = _times(_sliced(factor, batches).to(dtype), self.operands.alpha).unsqueeze(-1)
        matrix, chosen = self._row_major_b[batches], _sliced(index, batches)
        if len(chosen) == 1:
            picked = gathered_numbers(matrix, self.operands.encoding, chosen[0]).to(dtype)
        else:
            picked = matrix[torch.arange(len(matrix), device=matrix.device).unsqueeze(-1), chosen].to(dtype)
        where, cols = index[0].unsqueeze(-1), self._lines(slice(None), self.operands.b.shape[-1])
        if self.operands.zero_b is not None:
            zero = scale_at(self.operands.zero_b, self._size_b, where, cols).to(dtype)
            picked = picked.abs() + zero.abs() if magnitude else picked - zero
        result = picked.abs() * factor.abs() if magnitude else picked * factor
        yield self._scaled(result, (self._lines(rows, self._m).unsqueeze(-1), where), (where, cols))

    def _from_cols(self, batches: slice, rows: slice, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the result as multiples of columns of a, if the probe picks any. Zero points are 0 where b is 0."""
        if self.col_index is None or self.col_factor is None:
            return
        index, factor = (x.expand(-1, self.operands.b.shape[-1]) for x in (self.col_index, self.col_factor))
        factor = _times(_sliced(factor, batches).to(dtype), self.operands.alpha).unsqueeze(-2)
        matrix, chosen = self._row_major_a[batches, rows], _sliced(index, batches)
        if len(chosen) == 1:
            picked = matrix.index_select(2, chosen[0]).to(dtype)
        else:
            picked = matrix.gather(2, chosen.unsqueeze(1).expand(-1, matrix.shape[1], -1)).to(dtype)
        where, cols = index[0], self._lines(slice(None), self.operands.b.shape[-1])
        yield self._scaled(picked * factor, (self._lines(rows, self._m).unsqueeze(-1), where), (where, cols))

    @property
    def _m(self) -> int:
        return self.operands.a.shape[-2]

    @property
    def _size_b(self) -> tuple[int, int]:
        return self.operands.a.shape[-1], self.operands.b.shape[-1]

    def _lines(self, which: slice, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.operands.a.device)[which]

    def _scaled(
        self, result: torch.Tensor, in_a: tuple[torch.Tensor, torch.Tensor], in_b: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return ``result`` times the scales of the picked elements, given by their rows and columns."""
        operands = self.operands
        if operands.scale_a is not None:
            size_a = (self._m, operands.a.shape[-1])
            result = result * scale_at(operands.scale_a, size_a, *in_a).to(result.dtype)
        if operands.scale_b is not None:
            result = result * scale_at(operands.scale_b, self._size_b, *in_b).to(result.dtype)
        return result

    def origin(self, index: tuple[int, ...], *, batched: bool) -> str:
        """Describe the element of an operand that ``out[index]`` equals, for messages."""
        batch, row, col = index if batched else (0, *index)
        lead = f"{batch}, " if batched else ""
        if self.row_index is not None and (self.by_rows is None or bool(self.by_rows[row])):
            picked = self.row_index[min(batch, self.row_index.shape[0] - 1), min(row, self.row_index.shape[1] - 1)]
            name, place = self._operand("b", "d", int(picked))
            return f" (from {name}[{lead}{place}, {col}])"
        if self.col_index is not None:
            picked = self.col_index[min(batch, self.col_index.shape[0] - 1), min(col, self.col_index.shape[1] - 1)]
            name, place = self._operand("a", "c", int(picked))
            return f" (from {name}[{lead}{row}, {place}])"
        return ""

    def _operand(self, first: str, second: str, place: int) -> tuple[str, int]:
        """Return which of two operands, concatenated along K, has this place, and the place within it."""
        k = self.operands.a.shape[-1]
        return (first, place) if self.operands.c is None or place < k else (second, place - k)


def _pickable(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as float32, because torch cannot gather 8-bit floats."""
    return tensor.float() if is_float8(tensor.dtype) else tensor


def _times(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return alpha · x in the dtype of x, where 1 leaves integers integers."""
    return x if alpha == 1 else x * alpha


def _sliced(x: torch.Tensor, batches: slice) -> torch.Tensor:
    return x if x.shape[0] == 1 else x[batches]
