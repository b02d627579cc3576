"""What a row of the table of operations says: its operands, its result, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from .dtypes import FLOAT8, is_float8
from .gradients import Gradient
from .scales import Blocks

Op = str
"""The name of a row."""


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
    argument: str = ""
    """The keyword of the public function that takes it, in a tuple with others of that keyword; empty: its role."""

    @property
    def scales(self) -> bool:
        """It is a scale, a zero point, or a weight of a row of the result: autocast leaves it wide."""
        return self.role in ("scale_a", "scale_b", "zero_b", "weights")

    @property
    def indexes(self) -> bool:
        """It holds numbers of rows, which it picks or places."""
        return set(self.dtypes) == {torch.int32, torch.int64}

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
    function: str = ""
    """The public function that does it, where that has the name of another operation."""

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
