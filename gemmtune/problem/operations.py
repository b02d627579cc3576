"""The table of operations: a row for each says everything that its name stands for.

Whoever asks something of an operation (which operands, of what shapes and dtypes, which scalars, what comes out) reads it here. A
new operation is a new row, its reference and error bound, its public function, and the backends that serve it: see "Adding an
operation" in docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .compositions import (
    added,
    block_added,
    block_product,
    int_composed,
    mixed_composed,
    scaled_composed,
    two_products,
)
from .dtypes import DTYPES, FLOAT8, FLOAT8_FNUZ, is_float8
from .gradients import Gradient, of_grouped, of_grouped_terms, of_product, of_sum, of_two_products, of_widened
from .grouped_compositions import combined, grouped_by_terms, grouped_product, mixed_grouped, routed, scaled_grouped
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, Blocks

Op = str
"""The name of a row."""
Encoding = Literal["", "int4", "uint4"]
"""How b's elements are read: as its dtype says, or two numbers out of each uint8, that of the even k in the low four bits."""
ENCODINGS: tuple[Encoding, ...] = ("", "int4", "uint4")

ROLES = ("a", "b", "inp", "c", "d", "scale_a", "scale_b", "zero_b", "offs", "rows", "slots", "weights")
"""What an operand may be: a field of Problem, in the order in which kernels get the tensors."""
OPTIONS: dict[str, object] = {"encoding": "", "fast_accum": False, "sparsity": None, "gated": ""}
"""Further fields of Problem that only some operations have, and what they are elsewhere."""

_FLOATS = tuple(DTYPES)
_NARROW_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One operand of an operation.

    ``shape`` has the dimensions in symbols, without the batch: equal symbols of a row are equal sizes, and ``1`` is just that.
    Where it is None the operand broadcasts to out, or, if it has ``blocks``, scales blocks of the matrix ``of`` and has one of the
    shapes that these allow. ``dtypes`` are legal, and with ``like_a`` that of a is too.
    """

    role: str
    shape: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    like_a: bool = False
    required: bool = True
    of: str = ""
    blocks: Blocks = ()

    @property
    def scales(self) -> bool:
        """It is a scale, a zero point, or a weight of a row of the result: autocast leaves it wide."""
        return self.role in ("scale_a", "scale_b", "zero_b", "weights")

    def legal(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The dtypes that it may have beside an a of ``dtype``."""
        return tuple(dict.fromkeys((*self.dtypes, dtype))) if self.like_a else self.dtypes

    def described(self, *, batched: bool = False) -> str:
        """The role and its shape for messages, such as ``c [M, K2]``."""
        if self.shape is None:
            return f"{self.role} that broadcasts to out"
        return f"{self.role} [{', '.join(('B', *self.shape) if batched else self.shape)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What out may be: its dtypes, and the one that it has where nobody names one (None: that of a)."""

    dtypes: tuple[torch.dtype, ...]
    default: torch.dtype | None = None
    of_integers: torch.dtype | None = None
    """The default where a is of integers, if that is another one."""
    of_float8: torch.dtype | None = None
    """The default where a is of 8-bit floats, if that is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A row of the table. ``operands`` are in the order of ROLES: a and b, then what the operation has beside them.

    ``scalars`` are those that a call gives (elsewhere alpha is one and beta zero), ``options`` its further fields of Problem.
    ``result`` is of a problem without an epilogue, ``fused`` of one with an epilogue (None: the same).

    ``compose(*operands, *scalars, **options)`` does it by torch's own operations, without the epilogue: operands that are not given
    are None. ``gradient`` has a rule for each operand that may have one; None: the operation has no gradient.
    """

    name: Op
    formula: str
    operands: tuple[Operand, ...]
    result: Result
    compose: Callable[..., torch.Tensor]
    gradient: Gradient | None = None
    fused: Result | None = None
    scalars: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    batched: bool = False
    out: tuple[str, ...] = ("M", "N")
    """The dimensions of out in symbols, without the batch."""
    prepacks: bool = False
    """b may be given through ``prepack``."""

    @property
    def sparse(self) -> bool:
        """b is block-sparse: torch's sparse_bsr tensor [N, K] in its place, of which b is the transpose."""
        return "sparsity" in self.options

    @property
    def grouped(self) -> bool:
        """A product for each group of rows of a, or of terms of the sums: ``offs`` [G] holds where each group ends."""
        return self.operand("offs") is not None

    def given(self, roles: Collection[str], *, gated: str = "") -> Operation:
        """The row as a call with operands of these ``roles`` has it: without optional matrices that are left out. Where an index
        ``rows`` picks rows of a, a has as many as it likes; where columns are ``gated``, half of them are gates."""
        if not gated and all(operand.required for operand in self.matrices):
            return self
        operands = [x for x in self.operands if x.required or x.shape is None or x.role in roles]
        if "rows" in roles:
            operands = [dataclasses.replace(x, shape=("T", "K")) if x.role == "a" else x for x in operands]
        return dataclasses.replace(self, operands=tuple(operands), out=(*self.out[:-1], "N/2") if gated else self.out)

    @property
    def matrices(self) -> tuple[Operand, ...]:
        """The operands whose shapes are in symbols: those that are multiplied, and what says how."""
        return tuple(operand for operand in self.operands if operand.shape is not None)

    def symbols(self, operand: Operand) -> tuple[str, ...]:
        """The dimensions of one of ``matrices`` in symbols, a batch included."""
        assert operand.shape is not None
        return ("B", *operand.shape) if self.batched else operand.shape

    @property
    def out_symbols(self) -> tuple[str, ...]:
        """The dimensions of out in symbols, a batch included."""
        return ("B", *self.out) if self.batched else self.out

    def out_size(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The size of out for ``matrices`` of these shapes, by role, which fit together."""
        sizes: dict[str, int] = {}
        for operand in self.matrices:
            sizes.update(zip(self.symbols(operand), shapes[operand.role], strict=True))
        return tuple(self.extent(symbol, sizes) for symbol in self.out_symbols)

    @staticmethod
    def extent(symbol: str, sizes: Mapping[str, int]) -> int:
        """The size that a symbol of ``out_symbols`` stands for, such as ``N`` or ``N/2``."""
        name, _, parts = symbol.partition("/")
        return sizes[name] // int(parts or 1)

    @property
    def second(self) -> str:
        """The symbol of the summed dimension of a second product c @ d; empty where there is one product."""
        c = self.operand("c")
        return c.shape[1] if c is not None and c.shape is not None else ""

    @property
    def names_result(self) -> bool:
        """A call may name the dtype of the result, which is not that of a."""
        return self.result.default is not None and len(self.result.dtypes) > 1

    @property
    def quantized(self) -> bool:
        """Some operand is of 8 bits or fewer."""
        return not self.sparse and any(dtype.itemsize == 1 for operand in self.matrices for dtype in operand.dtypes)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The roles in the order in which the public function takes them: as torch does, an added operand first."""
        roles = [operand.role for operand in self.operands]
        return tuple(sorted(roles, key=lambda role: role != "inp"))

    @property
    def widens_b(self) -> bool:
        """b holds narrower numbers than a, which a kernel widens."""
        a, b, *_ = self.operands
        return bool(b.dtypes) and min(x.itemsize for x in a.dtypes) > max(x.itemsize for x in b.dtypes)

    @property
    def float8(self) -> bool:
        """a and b are 8-bit floats; of block-sparse ones they may be."""
        return not self.sparse and set(FLOAT8) <= set(self.operands[0].dtypes)

    @property
    def integers(self) -> bool:
        """a and b are integers."""
        return not any(dtype.is_floating_point for dtype in self.operands[0].dtypes)

    @property
    def dtypes_of_b(self) -> tuple[torch.dtype, ...]:
        """What b may be: where it has the dtype of a, what that may be."""
        a, b, *_ = self.operands
        return b.dtypes or a.dtypes

    def operand(self, role: str) -> Operand | None:
        """The operand of that role; None if it has no such."""
        return next((operand for operand in self.operands if operand.role == role), None)

    def result_of(self, *, epilogue: bool) -> Result:
        """What out may be, with an epilogue or without one."""
        return self.fused if epilogue and self.fused is not None else self.result

    def result_dtype(self, dtype: torch.dtype, *, epilogue: bool) -> torch.dtype:
        """The dtype of out for an a of ``dtype`` where neither the caller nor the end of an epilogue names one."""
        result = self.result_of(epilogue=epilogue)
        of_kind = result.of_float8 if is_float8(dtype) else None if dtype.is_floating_point else result.of_integers
        return result.default or of_kind or dtype


def _product(dtypes: tuple[torch.dtype, ...], b: tuple[torch.dtype, ...] = ()) -> tuple[Operand, Operand]:
    """a [M, K] and b [K, N]; b has the dtype of a unless its own are given."""
    return (
        Operand(role="a", shape=("M", "K"), dtypes=dtypes),
        Operand(role="b", shape=("K", "N"), dtypes=b, like_a=not b),
    )


_SECOND = (Operand(role="c", shape=("M", "K2"), like_a=True), Operand(role="d", shape=("K2", "N"), like_a=True))
_INP = Operand(role="inp", like_a=True)
_OFFS = Operand(role="offs", shape=("G",), dtypes=(torch.int32,))
_DENSE = Result(dtypes=_FLOATS)
_SCALE = (torch.float32,)
_INDEX = (torch.int32, torch.int64)

_ROWS = (
    Operation(
        name="mm", formula="a @ b", operands=_product(_FLOATS), result=_DENSE, prepacks=True, compose=torch.mm, gradient=of_product
    ),
    Operation(
        name="addmm",
        formula="beta · inp + alpha · a @ b",
        operands=(*_product(_FLOATS), _INP),
        scalars=("alpha", "beta"),
        result=_DENSE,
        compose=functools.partial(added, torch.addmm),
        gradient=of_sum,
        prepacks=True,
    ),
    Operation(
        name="bmm",
        formula="a @ b for a batch",
        operands=_product(_FLOATS),
        result=_DENSE,
        batched=True,
        compose=torch.bmm,
        gradient=of_product,
    ),
    Operation(
        name="baddbmm",
        formula="beta · inp + alpha · a @ b for a batch",
        operands=(*_product(_FLOATS), _INP),
        scalars=("alpha", "beta"),
        result=_DENSE,
        compose=functools.partial(added, torch.baddbmm),
        gradient=of_sum,
        batched=True,
    ),
    Operation(
        name="mm_plus_mm",
        formula="a @ b + c @ d",
        operands=(*_product(_FLOATS), *_SECOND),
        result=_DENSE,
        compose=two_products,
        gradient=of_two_products,
    ),
    Operation(
        name="int_mm",
        formula="a @ b of int8, summed in int32",
        operands=_product((torch.int8,), (torch.int8,)),
        result=Result(dtypes=(torch.int32,), default=torch.int32),
        fused=Result(dtypes=_NARROW_FLOATS, default=torch.float32),
        compose=int_composed,
        prepacks=True,
    ),
    Operation(
        name="mixed_mm",
        formula="a @ ((b - zero_b) · scale_b) for a narrow b",
        operands=(
            *_product(_NARROW_FLOATS, (torch.int8, torch.uint8, *FLOAT8)),
            Operand(role="scale_b", of="b", blocks=BLOCKS_OF_WEIGHTS, dtypes=_SCALE, like_a=True, required=False),
            Operand(role="zero_b", of="b", blocks=BLOCKS_OF_WEIGHTS, dtypes=_SCALE, like_a=True, required=False),
        ),
        options=("encoding",),
        compose=mixed_composed,
        gradient=of_widened,
        result=Result(dtypes=_NARROW_FLOATS),
        prepacks=True,
    ),
    Operation(
        name="scaled_mm",
        formula="(a · scale_a) @ (b · scale_b) of 8-bit floats",
        operands=(
            *_product((*FLOAT8, *FLOAT8_FNUZ), (*FLOAT8, *FLOAT8_FNUZ)),
            Operand(role="scale_a", of="a", blocks=BLOCKS_OF_A, dtypes=_SCALE),
            Operand(role="scale_b", of="b", blocks=BLOCKS_OF_B, dtypes=_SCALE),
        ),
        options=("fast_accum",),
        compose=scaled_composed,
        result=Result(dtypes=_NARROW_FLOATS, default=torch.bfloat16),
        prepacks=True,
    ),
    Operation(
        name="bsr_mm",
        formula="a @ b for a block-sparse b",
        operands=_product((*_FLOATS, torch.int8, *FLOAT8)),
        options=("sparsity",),
        compose=block_product,
        result=Result(dtypes=(*_FLOATS, torch.int32), of_integers=torch.int32, of_float8=torch.bfloat16),
        fused=Result(dtypes=_FLOATS, of_integers=torch.float32, of_float8=torch.bfloat16),
        prepacks=True,
    ),
    Operation(
        name="bsr_addmm",
        formula="beta · inp + alpha · a @ b for a block-sparse b",
        operands=(*_product(_FLOATS), _INP),
        scalars=("alpha", "beta"),
        options=("sparsity",),
        compose=block_added,
        result=_DENSE,
        prepacks=True,
    ),
    Operation(
        name="grouped_mm",
        formula="a @ b[g] for each group of rows of a",
        operands=(
            Operand(role="a", shape=("M", "K"), dtypes=_NARROW_FLOATS),
            Operand(role="b", shape=("G", "K", "N"), like_a=True),
            _OFFS,
        ),
        result=Result(dtypes=_NARROW_FLOATS),
        compose=grouped_product,
        gradient=of_grouped,
    ),
    Operation(
        name="mixed_grouped_mm",
        formula="a @ (b[g] · scale_b[g]) for each group of rows of a and a narrow b",
        operands=(
            Operand(role="a", shape=("M", "K"), dtypes=_NARROW_FLOATS),
            Operand(role="b", shape=("G", "K", "N"), dtypes=(torch.int8, torch.uint8)),
            Operand(role="scale_b", shape=("G", "S", "N"), dtypes=_SCALE, like_a=True),
            _OFFS,
        ),
        options=("encoding",),
        result=Result(dtypes=_NARROW_FLOATS),
        compose=mixed_grouped,
    ),
    Operation(
        name="scaled_grouped_mm",
        formula="(a · scale_a) @ (b[g] · scale_b[g]) of 8-bit floats for each group of rows of a",
        operands=(
            Operand(role="a", shape=("M", "K"), dtypes=(*FLOAT8, *FLOAT8_FNUZ)),
            Operand(role="b", shape=("G", "K", "N"), dtypes=(*FLOAT8, *FLOAT8_FNUZ)),
            Operand(role="scale_a", shape=("M", "S"), dtypes=_SCALE),
            Operand(role="scale_b", shape=("G", "S", "T"), dtypes=_SCALE),
            _OFFS,
        ),
        options=("fast_accum",),
        compose=scaled_grouped,
        result=Result(dtypes=_NARROW_FLOATS, default=torch.bfloat16),
    ),
    Operation(
        name="routed_grouped_mm",
        formula="grouped_mm of rows of a that an index picks, or of gated columns: act(gates) · the other half",
        operands=(
            Operand(role="a", shape=("M", "K"), dtypes=_NARROW_FLOATS),
            Operand(role="b", shape=("G", "K", "N"), like_a=True),
            _OFFS,
            Operand(role="rows", shape=("M",), dtypes=_INDEX, required=False),
        ),
        options=("gated",),
        result=Result(dtypes=_NARROW_FLOATS),
        compose=routed,
    ),
    Operation(
        name="combined_grouped_mm",
        formula="grouped_mm, its rows times weights added up to one row for each token",
        operands=(
            Operand(role="a", shape=("M", "K"), dtypes=_NARROW_FLOATS),
            Operand(role="b", shape=("G", "K", "N"), like_a=True),
            _OFFS,
            Operand(role="slots", shape=("M",), dtypes=_INDEX),
            Operand(role="weights", shape=("T", "C"), dtypes=_SCALE, like_a=True),
        ),
        out=("T", "N"),
        result=Result(dtypes=_NARROW_FLOATS),
        compose=combined,
    ),
    Operation(
        name="grouped_k_mm",
        formula="a @ b over each group of terms",
        operands=(*_product(_NARROW_FLOATS), _OFFS),
        out=("G", "M", "N"),
        result=Result(dtypes=_NARROW_FLOATS),
        compose=grouped_by_terms,
        gradient=of_grouped_terms,
    ),
)
OPERATIONS: dict[Op, Operation] = {row.name: row for row in _ROWS}
"""Every operation that a Problem may state, by name."""

OPS = tuple(OPERATIONS)
QUANTIZED_OPS = tuple(row.name for row in _ROWS if row.quantized and not row.grouped)
"""One product of operands of 8 bits or fewer, or one of them."""
SPARSE_OPS = tuple(row.name for row in _ROWS if row.sparse)
"""b is block-sparse."""
GROUPED_OPS = tuple(row.name for row in _ROWS if row.grouped)
"""Several products in one, one for each group of rows or terms."""
FLOAT_OPS = tuple(row.name for row in _ROWS if not row.quantized and not row.sparse)
"""Operands of one float dtype."""
DENSE_OPS = tuple(name for name in FLOAT_OPS if len(OPERATIONS[name].matrices) == 2)
"""One product of operands of one float dtype."""
BATCHED_OPS = tuple(row.name for row in _ROWS if row.batched)
