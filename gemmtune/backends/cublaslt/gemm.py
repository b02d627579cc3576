"""Problem in cuBLASLt's terms: column-major matrices, D = alpha · op(A) · op(B) + beta · C, or + bias along D's rows.

A row-major matrix read column by column is its transpose. A row-major out is therefore computed as out^T = b^T a^T: the
operands swap places, and none is copied.
"""

import dataclasses
from dataclasses import dataclass

import torch

from ...errors import InvalidProblemError
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ...problem.operation import Op
from ...problem.operations import DENSE_OPS
from ...problem.rules import why_not, why_not_fnuz
from ..scaling import MODES, has_plain_bias, mode_of

OPS: tuple[Op, ...] = (*DENSE_OPS, "int_mm", "scaled_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Operand as a column-major matrix or its transpose. ``ld`` and strides count elements, ``alignment_bytes`` is up to 16."""

    rows: int
    cols: int
    ld: int
    batch_stride: int
    transposed: bool
    alignment_bytes: int
    dtype: torch.dtype

    @property
    def column_alignment_bytes(self) -> int:
        """Alignment of all columns: the largest power of two, at most 16, that divides their addresses."""
        strides = (self.ld if self.cols > 1 else 0, self.batch_stride)
        return min(self.alignment_bytes, *(_power_of_two(stride * self.dtype.itemsize) for stride in strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Product for cuBLASLt. ``swapped``: ``left`` is b and ``right`` is a. ``c`` is the added operand if it is a whole matrix.

    ``bias``: it is a vector along D's rows, with ``bias_alignment_bytes`` and, in elements, ``bias_batch_stride``. ``scaling``
    names the kinds of scales (a key of ``scaling.MODES``), and is empty without scales.
    """

    left: Matrix
    right: Matrix
    d: Matrix
    c: Matrix | None = None
    bias: bool
    bias_alignment_bytes: int = ALIGNED_BYTES
    bias_batch_stride: int = 0
    swapped: bool
    batch: int = 1
    scaling: str = ""


def gemm_of(problem: Problem) -> Gemm:
    """Return the problem in cuBLASLt's terms. Raises InvalidProblemError, which says why, if cuBLASLt cannot solve it."""
    reason = why_not(problem, OPS) or why_not_fnuz(problem)
    if reason is not None:
        raise InvalidProblemError(reason)
    scaled = problem.float8
    if problem.epilogue is not None and not (scaled and has_plain_bias(problem)):
        other = " other than a bias [N] of out's dtype, float16 or bfloat16" if scaled else " function"
        raise InvalidProblemError(f"an epilogue{other}: cuBLASLt stores the bare result")
    if problem.empty or problem.k == 0:
        raise InvalidProblemError("a size is 0: nothing to multiply")
    d, swapped = _output(problem.out)
    if scaled:
        return _scaled_gemm(problem, d, swapped)
    left, right = (problem.b.transposed, problem.a.transposed) if swapped else (problem.a, problem.b)
    inp = problem.inp_read.expanded(problem.out.size) if problem.inp_read is not None else None
    inp = inp.transposed if inp is not None and swapped else inp
    # Add inp as a bias if possible, else as the matrix C.
    bias, added = False, None
    if inp is not None:
        # The BIAS epilogue adds one contiguous vector to every column of D, unscaled. It has no float64 kernels.
        same_in_every_column = inp.size[-1] == 1 or inp.stride[-1] == 0
        packed = inp.size[-2] == 1 or inp.stride[-2] == 1
        bias = problem.beta == "one" and same_in_every_column and packed and problem.dtype != torch.float64
        added = None if bias else _view(inp, transposed=False)
        if not bias and added is None:
            raise InvalidProblemError(
                f"the added operand {problem.inp} with beta {problem.beta}: expected a matrix laid out like out, or a bias along "
                "its contiguous dimension with beta 1 (not float64)"
            )
    return Gemm(
        left=_operand(left, swapped, "b" if swapped else "a"),
        right=_operand(right, swapped, "a" if swapped else "b"),
        d=d,
        c=added,
        bias=bias,
        bias_alignment_bytes=_alignment_bytes(inp) if inp is not None else ALIGNED_BYTES,
        bias_batch_stride=_batch_stride(inp) if inp is not None else 0,
        swapped=swapped,
        batch=problem.batch,
    )


def _scaled_gemm(problem: Problem, d: Matrix, swapped: bool) -> Gemm:
    """Return the product of 8-bit floats, whose a must have contiguous rows and b contiguous columns ("TN format")."""
    row, column = _view(problem.a.transposed, transposed=False), _view(problem.b, transposed=False)
    if row is None or column is None:
        raise InvalidProblemError(f"8-bit floats: expected a row-major a and a column-major b, got {problem.a} and {problem.b}")
    mode = mode_of(problem)
    if MODES[mode].blocks and torch.float8_e5m2 in (problem.a.dtype, problem.b.dtype):
        raise InvalidProblemError(f"scales for {mode}: expected float8_e4m3fn, got {problem.a} and {problem.b}")
    bias = problem.epilogue.operands[0] if problem.epilogue is not None else None
    if bias is not None and not swapped:
        raise InvalidProblemError("a bias along the rows of out, which is column-major: cuBLASLt adds it along its columns")
    # cuBLASLt reads the first operand of its product transposed: a itself, or b if the operands are swapped.
    first, second = (column, row) if swapped else (row, column)
    return Gemm(
        left=dataclasses.replace(first, transposed=True),
        right=second,
        d=d,
        bias=bias is not None,
        swapped=swapped,
        scaling=mode,
    )


def _output(out: Layout) -> tuple[Matrix, bool]:
    """Return D and True if the operands are swapped. A vector allows both orders, and the one with longer columns is used."""
    views = [(view, swapped) for swapped in (True, False) if (view := _view(out, transposed=swapped)) is not None]
    if not views:
        raise InvalidProblemError(f"out is neither row- nor column-major, got {out}")
    return max(views, key=lambda view: view[0].rows)


def _operand(layout: Layout, swapped: bool, name: str) -> Matrix:
    views = [view for transposed in (False, True) if (view := _view(layout, transposed=transposed)) is not None]
    if not views:
        given = layout.transposed if swapped else layout
        raise InvalidProblemError(f"{name} is neither row- nor column-major without overlap, got {given}")
    return max(views, key=lambda view: view.rows)


def _view(layout: Layout, *, transposed: bool) -> Matrix | None:
    """Return the layout, or its transpose, as a column-major matrix, or None if it is not one."""
    x = layout.transposed if transposed else layout
    rows, cols = x.size[-2:]
    step = ALIGNED_BYTES // x.dtype.itemsize
    # The distance between columns is meaningless for a single one. An aligned value allows kernels that load whole vectors.
    ld = x.stride[-1] if cols > 1 else -(-rows // step) * step
    if (rows > 1 and x.stride[-2] != 1) or ld < rows:
        return None
    return Matrix(
        rows=rows,
        cols=cols,
        ld=ld,
        batch_stride=_batch_stride(x),
        transposed=transposed,
        alignment_bytes=_alignment_bytes(x),
        dtype=x.dtype,
    )


def _batch_stride(layout: Layout) -> int:
    return layout.stride[0] if len(layout.size) == 3 else 0


def _alignment_bytes(layout: Layout) -> int:
    return _power_of_two(layout.offset * layout.dtype.itemsize)


def _power_of_two(size_bytes: int) -> int:
    """Return the largest power of two, at most ALIGNED_BYTES, that divides a number of bytes."""
    return min(size_bytes & -size_bytes, ALIGNED_BYTES) if size_bytes else ALIGNED_BYTES
