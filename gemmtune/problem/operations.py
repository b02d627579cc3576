"""The table of operations: one row holds everything that an operation's name stands for.

All code reads an operation's operands, shapes, dtypes, scalars and results here. A new operation needs a new row, a reference with
an error bound, a public function, and backends that support it: see "Adding an operation" in CONTRIBUTING.md.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from ..operand_kinds import Encoding as Encoding
from .compositions import added, block_added, block_product, int_composed, mixed_composed, scaled_composed, two_products
from .dtypes import DTYPES, FLOAT8, FLOAT8_FNUZ
from .gradients import of_block_sum, of_blocks, of_grouped, of_grouped_terms, of_product, of_sum, of_two_products, of_widened
from .grouped_compositions import combined, grouped_by_terms, grouped_product, mixed_grouped, routed, scaled_grouped
from .operation import Op, Operand, Operation, Result
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

ROLES = ("a", "b", "inp", "c", "d", "scale_a", "scale_b", "zero_b", "offs", "rows", "slots", "weights")
"""The roles of operands. Each is a field of Problem; the order is the order of tensors in a kernel call."""
OPTIONS: dict[str, object] = {"encoding": "", "fast_accum": False, "sparsity": None, "gated": ""}
"""Fields of Problem that only some operations use, with their value in all others."""

_FLOATS = tuple(DTYPES)
_NARROW_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (*FLOAT8, *FLOAT8_FNUZ)


def _product(dtypes: tuple[torch.dtype, ...], b: tuple[torch.dtype, ...] = (), *, grouped: bool = False) -> tuple[Operand, Operand]:
    """Return a [M, K] and b [K, N], or b [G, K, N] for groups of rows of a. b has the dtype of a unless ``b`` lists its own."""
    return (
        Operand(role="a", shape=("M", "K"), dtypes=dtypes),
        Operand(role="b", shape=("G", "K", "N") if grouped else ("K", "N"), dtypes=b, like_a=not b),
    )


def _blocks(dtypes: tuple[torch.dtype, ...]) -> tuple[Operand, Operand]:
    """Return the operands of a block-sparse product as the caller names them: it is stated as the transpose of bsr @ x."""
    a, b = _product(dtypes)
    return dataclasses.replace(a, argument="x"), dataclasses.replace(b, argument="bsr")


def _row(
    name: Op, formula: str, operands: tuple[Operand, ...], compose: Callable[..., torch.Tensor],
    gradient: Mapping[str, Any] | None = None, *, result: Result | None = None, **more: Any,
) -> Operation:  # fmt: skip
    """Return a row, whose result has a dtype of a unless there is a ``result``. A call that adds an operand passes scalars."""
    scalars = ("alpha", "beta") if _INP in operands else ()
    made = result or Result(dtypes=operands[0].dtypes)
    return Operation(
        name=name, formula=formula, operands=operands, compose=compose, gradient=gradient, result=made, scalars=scalars, **more
    )


_SECOND = (Operand(role="c", shape=("M", "K2"), like_a=True), Operand(role="d", shape=("K2", "N"), like_a=True))
_INP = Operand(role="inp", like_a=True)
_OFFS = Operand(role="offs", shape=("G",), dtypes=(torch.int32,))
_OF_FLOAT8 = Result(dtypes=_NARROW_FLOATS, default=torch.bfloat16)
_SCALE = (torch.float32,)
_INDEX = (torch.int32, torch.int64)
_WEIGHT_SCALE = Operand(role="scale_b", of="b", blocks=BLOCKS_OF_WEIGHTS, dtypes=_SCALE, like_a=True, required=False)
_GROUPED = (*_product(_NARROW_FLOATS, grouped=True), _OFFS)

_ROWS = (
    _row("mm", "a @ b", _product(_FLOATS), torch.mm, of_product, prepacks=True),
    _row(
        "addmm", "beta · inp + alpha · a @ b", (*_product(_FLOATS), _INP), functools.partial(added, torch.addmm), of_sum,
        prepacks=True,
    ),
    _row("bmm", "a @ b for a batch", _product(_FLOATS), torch.bmm, of_product, batched=True),
    _row(
        "baddbmm", "beta · inp + alpha · a @ b for a batch", (*_product(_FLOATS), _INP), functools.partial(added, torch.baddbmm),
        of_sum, batched=True,
    ),
    _row("mm_plus_mm", "a @ b + c @ d", (*_product(_FLOATS), *_SECOND), two_products, of_two_products),
    _row(
        "int_mm", "a @ b of int8, summed in int32", _product((torch.int8,), (torch.int8,)), int_composed, prepacks=True,
        result=Result(dtypes=(torch.int32,), default=torch.int32), fused=Result(dtypes=_NARROW_FLOATS, default=torch.float32),
    ),
    _row(
        "mixed_mm", "a @ ((b - zero_b) · scale_b) for a quantized b",
        (
            *_product(_NARROW_FLOATS, (torch.int8, torch.uint8, *FLOAT8)),
            _WEIGHT_SCALE, dataclasses.replace(_WEIGHT_SCALE, role="zero_b"),
        ),
        mixed_composed, of_widened, options=("encoding",), prepacks=True,
    ),
    _row(
        "scaled_mm", "(a · scale_a) @ (b · scale_b) of 8-bit floats",
        (
            *_product(_FLOAT8, _FLOAT8),
            Operand(role="scale_a", of="a", blocks=BLOCKS_OF_A, dtypes=_SCALE),
            Operand(role="scale_b", of="b", blocks=BLOCKS_OF_B, dtypes=_SCALE),
        ),
        scaled_composed, options=("fast_accum",), result=_OF_FLOAT8, prepacks=True,
    ),
    _row(
        "bsr_mm", "a @ b for a block-sparse b", _blocks((*_FLOATS, torch.int8, *FLOAT8)), block_product, of_blocks,
        options=("sparsity",), prepacks=True,
        result=Result(dtypes=(*_FLOATS, torch.int32), of_integers=torch.int32, of_float8=torch.bfloat16),
        fused=Result(dtypes=_FLOATS, of_integers=torch.float32, of_float8=torch.bfloat16),
    ),
    _row(
        "bsr_addmm", "beta · inp + alpha · a @ b for a block-sparse b", (*_blocks(_FLOATS), _INP), block_added, of_block_sum,
        options=("sparsity",), prepacks=True,
    ),
    _row("grouped_mm", "a @ b[g] for each group of rows of a", _GROUPED, grouped_product, of_grouped),
    _row(
        "mixed_grouped_mm", "a @ (b[g] · scale_b[g]) for each group of rows of a and a quantized b",
        (
            *_product(_NARROW_FLOATS, (torch.int8, torch.uint8), grouped=True),
            Operand(role="scale_b", shape=("G", "S", "N"), dtypes=_SCALE, like_a=True), _OFFS,
        ),
        mixed_grouped, options=("encoding",),
    ),
    _row(
        "scaled_grouped_mm", "(a · scale_a) @ (b[g] · scale_b[g]) of 8-bit floats for each group of rows of a",
        (
            *_product(_FLOAT8, _FLOAT8, grouped=True),
            Operand(role="scale_a", shape=("M", "S"), dtypes=_SCALE),
            Operand(role="scale_b", shape=("G", "S", "T"), dtypes=_SCALE), _OFFS,
        ),
        scaled_grouped, options=("fast_accum",), result=_OF_FLOAT8,
    ),
    _row(
        "routed_grouped_mm", "grouped_mm of rows of a that an index picks, or of gated columns: act(gates) · the other half",
        (*_GROUPED, Operand(role="rows", shape=("M",), dtypes=_INDEX, required=False)), routed,
        options=("gated",), function="grouped_mm",
    ),
    _row(
        "combined_grouped_mm", "grouped_mm, its rows times weights added up to one row for each token",
        (
            *_GROUPED,
            Operand(role="slots", shape=("M",), dtypes=_INDEX, keyword="scatter"),
            Operand(role="weights", shape=("T", "C"), dtypes=_SCALE, like_a=True, keyword="scatter"),
        ),
        combined, out=("T", "N"), function="grouped_mm",
    ),
    _row(
        "grouped_k_mm", "a @ b over each group along K", (*_product(_NARROW_FLOATS), _OFFS), grouped_by_terms, of_grouped_terms,
        out=("G", "M", "N"), function="grouped_mm",
    ),
)  # fmt: skip
OPERATIONS: dict[Op, Operation] = {row.name: row for row in _ROWS}
"""Every operation of a Problem, by name."""

QUANTIZED_OPS = tuple(row.name for row in _ROWS if row.quantized and not row.grouped)
"""Operations of one product in which an operand has 8 bits or fewer."""
SPARSE_OPS = tuple(row.name for row in _ROWS if row.sparse)
"""Operations with a block-sparse b."""
GROUPED_OPS = tuple(row.name for row in _ROWS if row.grouped)
"""Operations of several products, one for each group of rows or terms."""
FLOAT_OPS = tuple(row.name for row in _ROWS if row.floats)
"""Operations whose operands share one float dtype."""
DENSE_OPS = tuple(name for name in FLOAT_OPS if len(OPERATIONS[name].matrices) == 2)
"""Operations of one product whose operands share one float dtype."""
BATCHED_OPS = tuple(row.name for row in _ROWS if row.batched)
