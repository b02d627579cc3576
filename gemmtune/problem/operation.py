"""A row of the table of operations: its operands, its result, and the properties derived from them."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from .dtypes import FLOAT8, is_float8
from .gradients import Gradient
from .scales import Blocks

Op = str
"""The name of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One operand of an operation.

    ``shape`` has the dimensions as symbols, without the batch. Equal symbols in a row of the table are equal sizes, and ``1``
    is a size of 1. An operand without a shape broadcasts to out. With ``blocks`` it instead scales blocks of the matrix ``of``,
    which determine its legal shapes. ``dtypes`` are legal, and ``like_a`` adds the dtype of a. ``argument`` is the parameter's name
    in the public function if it is not the role.
    """

    role: str
    argument: str = ""
    shape: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    like_a: bool = False
    required: bool = True
    of: str = ""
    blocks: Blocks = ()
    keyword: str = ""
    """Keyword of the public function that takes the operand in a tuple, together with others of that keyword."""

    @property
    def scales(self) -> bool:
        """True for a scale, a zero point or a weight of a result row. Autocast does not narrow these."""
        return self.role in ("scale_a", "scale_b", "zero_b", "weights")

    @property
    def indexes(self) -> bool:
        """True for row indices, which pick or place rows."""
        return set(self.dtypes) == {torch.int32, torch.int64}

    def legal(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the legal dtypes of this operand if a has ``dtype``."""
        return tuple(dict.fromkeys((*self.dtypes, dtype))) if self.like_a else self.dtypes

    def described(self, *, batched: bool = False) -> str:
        """Return the role and its shape for messages, such as ``c [M, K2]``."""
        if self.shape is None:
            return f"{self.role} that broadcasts to out"
        return f"{self.role} [{', '.join(('B', *self.shape) if batched else self.shape)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The legal dtypes of out and its default. A default of None means the dtype of a."""

    dtypes: tuple[torch.dtype, ...]
    default: torch.dtype | None = None
    of_integers: torch.dtype | None = None
    """The default if a has integers and this differs."""
    of_float8: torch.dtype | None = None
    """The default if a has 8-bit floats and this differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A row of the table of operations. ``operands`` are in the order of ROLES: a and b, then the others.

    ``scalars`` are the ones that a call passes; without them alpha is one and beta zero. ``options`` are further fields of Problem.
    ``result`` applies without an epilogue, ``fused`` with one (None: the same).

    ``compose(*operands, *scalars, **options)`` computes the operation by torch's own calls, without the epilogue. Missing operands
    are None. ``gradient`` has a rule for each operand that may have one. None means that the operation has no gradient.
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
    """The dimensions of out as symbols, without the batch."""
    prepacks: bool = False
    """True if b may be passed through ``prepack``."""
    function: str = ""
    """Name of the public function, if another operation has that name too."""

    @property
    def sparse(self) -> bool:
        """True if b is block-sparse. The caller passes torch's sparse_bsr tensor [N, K], of which b is the transpose."""
        return "sparsity" in self.options

    @property
    def grouped(self) -> bool:
        """True for a product for each group of rows of a, or of terms of the sums. ``offs`` [G] holds the end of each group."""
        return self.operand("offs") is not None

    def given(self, roles: Collection[str], *, gated: str = "") -> "Operation":
        """Return the row for a call with operands of these ``roles``, without the optional matrices that the call omits.

        With an index ``rows``, the number of rows of a is free. With ``gated`` columns, half of the columns of b are gates.
        """
        if not gated and all(operand.required for operand in self.matrices):
            return self
        operands = [x for x in self.operands if x.required or x.shape is None or x.role in roles]
        if "rows" in roles:
            operands = [dataclasses.replace(x, shape=("T", "K")) if x.role == "a" else x for x in operands]
        return dataclasses.replace(self, operands=tuple(operands), out=(*self.out[:-1], "N/2") if gated else self.out)

    @property
    def matrices(self) -> tuple[Operand, ...]:
        """The operands with symbolic shapes: the multiplied matrices and the indices that control the product."""
        return tuple(operand for operand in self.operands if operand.shape is not None)

    def symbols(self, operand: Operand) -> tuple[str, ...]:
        """Return the dimensions of one of ``matrices`` as symbols, a batch included."""
        assert operand.shape is not None
        return ("B", *operand.shape) if self.batched else operand.shape

    @property
    def out_symbols(self) -> tuple[str, ...]:
        """The dimensions of out as symbols, a batch included."""
        return ("B", *self.out) if self.batched else self.out

    def out_size(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Return the size of out for ``matrices`` with these shapes, by role. The shapes must fit together."""
        sizes: dict[str, int] = {}
        for operand in self.matrices:
            sizes.update(zip(self.symbols(operand), shapes[operand.role], strict=True))
        return tuple(self.extent(symbol, sizes) for symbol in self.out_symbols)

    @staticmethod
    def extent(symbol: str, sizes: Mapping[str, int]) -> int:
        """Return the size of a symbol of ``out_symbols``, such as ``N`` or ``N/2``."""
        name, _, parts = symbol.partition("/")
        return sizes[name] // int(parts or 1)

    @property
    def second(self) -> str:
        """The symbol of the summed dimension of a second product c @ d; empty if there is one product."""
        c = self.operand("c")
        return c.shape[1] if c is not None and c.shape is not None else ""

    @property
    def names_result(self) -> bool:
        """True if a call may name the dtype of the result. Its default is then not the dtype of a."""
        return self.result.default is not None and len(self.result.dtypes) > 1

    @property
    def quantized(self) -> bool:
        """True if an operand has 8 bits or fewer."""
        return not self.sparse and any(dtype.itemsize == 1 for operand in self.matrices for dtype in operand.dtypes)

    @property
    def floats(self) -> bool:
        """True if a and b share one float dtype. Other dtypes of such an operation are supported by torch alone."""
        return not self.quantized and not self.sparse

    @property
    def arguments(self) -> tuple[str, ...]:
        """The roles in the argument order of the public function: an added operand first, as in torch."""
        roles = [operand.role for operand in self.operands]
        return tuple(sorted(roles, key=lambda role: role != "inp"))

    @property
    def widens_b(self) -> bool:
        """True if b is narrower than a, so that a kernel widens it."""
        a, b, *_ = self.operands
        return bool(b.dtypes) and min(x.itemsize for x in a.dtypes) > max(x.itemsize for x in b.dtypes)

    @property
    def float8(self) -> bool:
        """True if a and b are 8-bit floats. Block-sparse operations, which accept them among others, are False."""
        return not self.sparse and set(FLOAT8) <= set(self.operands[0].dtypes)

    @property
    def integers(self) -> bool:
        """True if a and b are integers."""
        return not any(dtype.is_floating_point for dtype in self.operands[0].dtypes)

    @property
    def dtypes_of_b(self) -> tuple[torch.dtype, ...]:
        """The legal dtypes of b: its own list, or the dtypes of a if b has the same dtype."""
        a, b, *_ = self.operands
        return b.dtypes or a.dtypes

    def operand(self, role: str) -> Operand | None:
        """Return the operand with that role, or None if the operation has none."""
        return next((operand for operand in self.operands if operand.role == role), None)

    def argument(self, role: str) -> str:
        """Return the name of the public function's parameter for the operand with that role."""
        return next((operand.argument for operand in self.operands if operand.role == role and operand.argument), role)

    def result_of(self, *, epilogue: bool) -> Result:
        """Return the legal results with or without an epilogue."""
        return self.fused if epilogue and self.fused is not None else self.result

    def result_dtype(self, dtype: torch.dtype, *, epilogue: bool) -> torch.dtype:
        """Return the dtype of out for an a of ``dtype`` if neither the caller nor a cast at the end of the epilogue names one."""
        result = self.result_of(epilogue=epilogue)
        of_kind = result.of_float8 if is_float8(dtype) else None if dtype.is_floating_point else result.of_integers
        return result.default or of_kind or dtype
