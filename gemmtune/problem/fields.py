"""The fields of a Problem and the properties derived from them."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from .dtypes import accumulator_dtype, dtype_name
from .epilogue import Epilogue
from .layout import Layout
from .operation import Op, Operation
from .operations import OPERATIONS, ROLES, Encoding
from .precision import Precision
from .scales import SCALE_BLOCK, block_of
from .sparsity import Sparsity

ScalarClass = Literal["zero", "one", "general"]
"""The class of alpha or beta that is known before a call. The value itself is an argument of the launch."""


def scalar_class(value: float) -> ScalarClass:
    """Return the class of a value of alpha or beta."""
    return "zero" if value == 0 else "one" if value == 1 else "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFields:
    """The fields of a Problem. ``Problem`` documents their meaning and checks that they fit together."""

    op: Op
    a: Layout
    b: Layout
    out: Layout
    inp: Layout | None = None
    alpha: ScalarClass = "one"
    beta: ScalarClass = "zero"
    epilogue: Epilogue | None = None
    device_type: str = "cpu"
    precision: Precision = field(default_factory=Precision)
    prepacked: bool = False
    """True if b was passed through ``prepack``. A choice may store b in its own layout; packing is not part of the call."""
    scale_a: Layout | None = None
    scale_b: Layout | None = None
    zero_b: Layout | None = None
    encoding: Encoding = ""
    fast_accum: bool = False
    """True if 8-bit tensor cores may keep their narrow sum without adding it to a float32 sum (torch's ``use_fast_accum``)."""
    c: Layout | None = None
    d: Layout | None = None
    sparsity: Sparsity | None = None
    """The class of a block-sparse b. The layout of b is then that of its dense equivalent."""
    offs: Layout | None = None
    """The ends of the groups of rows of a, or of terms: int32 [G] on the device. Their values are data, like the elements of a."""
    rows: Layout | None = None
    """The row of a for each row of the product. None means that they are the rows of a in order."""
    slots: Layout | None = None
    """The slot of each row of the product. Slot t · C + c adds the row, times weights[t, c], to row t of out."""
    weights: Layout | None = None
    gated: str = ""
    """The activation of a gated product: it is applied to the first half of the columns, which then multiplies the second half.
    Empty if the product is not gated."""
    batch: int = field(init=False, repr=False, compare=False)
    """The number of matrices in out; 1 for operations without a batch."""
    groups: int = field(init=False, repr=False, compare=False)
    """The number of groups of rows of a, or of terms of the sums; 0 for operations without groups."""
    divides_terms: bool = field(init=False, repr=False, compare=False)
    """True if the groups divide the terms of the sums, so that each group has its own result."""
    m: int = field(init=False, repr=False, compare=False)
    """Rows of the product: the rows of a, or the number that ``rows`` picks. out has as many unless rows are added up."""
    n: int = field(init=False, repr=False, compare=False)
    """Columns of out. b has twice as many if the product is gated."""
    k: int = field(init=False, repr=False, compare=False)
    """Columns of a and rows of b: the summed dimension."""
    k2: int = field(init=False, repr=False, compare=False)
    """Columns of c and rows of d; 0 without a second product."""
    terms: int = field(init=False, repr=False, compare=False)
    """Number of products in the sum of one element of out: K, or K + K2."""
    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """The dtype of a. b has the same dtype except in quantized operations."""
    widens_b: bool = field(init=False, repr=False, compare=False)
    """True if b is narrower than a, so that a kernel widens it."""
    float8: bool = field(init=False, repr=False, compare=False)
    """True if a and b are 8-bit floats."""
    integers: bool = field(init=False, repr=False, compare=False)
    """True if a and b are integers."""
    scales: tuple[Layout, ...] = field(init=False, repr=False, compare=False)
    """The layouts of the given scales and zero points: scale_a, scale_b and zero_b."""
    accumulator: torch.dtype = field(init=False, repr=False, compare=False)
    """The dtype in which products are summed."""
    batched: bool = field(init=False, repr=False, compare=False)
    """True if operands are 3-D."""
    empty: bool = field(init=False, repr=False, compare=False)
    """True if out has no elements."""
    density: float = field(init=False, repr=False, compare=False)
    """The share of b that exists: 1 unless b is block-sparse."""
    dtype_label: str = field(init=False, repr=False, compare=False)
    """The dtype's name, or ``tf32`` for float32 in that precision."""

    def _derive(self) -> None:
        """Set the facts that follow from the fields. They fit together by now."""
        row, k, k2 = OPERATIONS[self.op], self.a.size[-1], self.c.size[-1] if self.c is not None else 0
        facts = {
            "batch": self.out.size[0] if len(self.out.size) == 3 else 1,
            "groups": self.offs.size[0] if self.offs is not None else 0,
            "divides_terms": self.offs is not None and len(self.out.size) == 3,
            "m": self.a.size[-2] if self.rows is None else self.rows.size[0],
            "n": self.b.size[-1] // (2 if self.gated else 1),
            "k": k,
            "k2": k2,
            "terms": k + k2,
            "dtype": self.a.dtype,
            "widens_b": row.widens_b,
            "float8": row.float8,
            "integers": not self.a.dtype.is_floating_point,
            "scales": tuple(x for x in (self.scale_a, self.scale_b, self.zero_b) if x is not None),
            "accumulator": accumulator_dtype(self.a.dtype),
            "batched": len(self.a.size) == 3,
            "empty": self.out.numel == 0,
            "density": 1.0 if self.sparsity is None else self.sparsity.density,
            "dtype_label": "tf32" if self.precision.input_mode == "tf32" else dtype_name(self.a.dtype),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def operation(self) -> Operation:
        """The row of the operation in the table of operations."""
        return OPERATIONS[self.op]

    @property
    def operands(self) -> tuple[tuple[str, Layout], ...]:
        """The operands that are given, by role, in the order in which kernels receive their tensors."""
        return tuple((role, layout) for role in ROLES if (layout := getattr(self, role)) is not None)

    @property
    def blocks(self) -> Sparsity:
        """The class of b, which must be block-sparse."""
        assert self.sparsity is not None
        return self.sparsity

    @property
    def summed(self) -> tuple[int, ...]:
        """The summed dimension of each product: (K,), or (K, K2) for mm_plus_mm."""
        return (self.k,) if self.c is None else (self.k, self.k2)

    @property
    def b_size(self) -> tuple[int, int]:
        """The unpacked size (K, N) of b. A packed b has fewer rows in memory."""
        return self.k, self.n

    def scale_block(self, role: str) -> tuple[int, int]:
        """Return the rows and columns of a or b that one element of the scale covers, counted in numbers if b is packed."""
        operand, layout = self.operation.operand(role), getattr(self, role)
        assert operand is not None
        if self.groups:
            return self._grouped_block(role, layout)
        block = block_of(layout.size, (self.m, self.k) if operand.of == "a" else self.b_size, operand.blocks)
        assert block is not None  # the constructor has checked it
        return block

    def _grouped_block(self, role: str, scale: Layout) -> tuple[int, int]:
        """Return a grouped product's ``scale_block``, from scale_a [M, S] and scale_b [G, S, T], whose last two are one group's."""
        along_k = scale.size[-1 if role == "scale_a" else -2]
        if self.scale_a is None:
            return max(1, self.k // along_k), 1
        step = SCALE_BLOCK if along_k > 1 else max(1, self.k)
        return (1, step) if role == "scale_a" else (step, 1 if scale.size[-1] == self.n else SCALE_BLOCK)

    @property
    def epilogue_dtype(self) -> torch.dtype:
        """The dtype that the epilogue receives: the accumulator's, with float32 instead of int32."""
        return torch.float32 if self.accumulator == torch.int32 else self.accumulator

    @property
    def inp_read(self) -> Layout | None:
        """The layout of inp if a kernel reads it. None if beta is zero."""
        return self.inp if self.beta != "zero" else None

    @property
    def flops(self) -> int:
        """Floating-point operations: 2·B·M·N·K, with K + K2 for two products and the existing share of a block-sparse b. Groups
        divide M or K, so their sizes do not matter."""
        products = 1 if self.divides_terms else self.batch
        return round(2 * products * self.m * self.b.size[-1] * self.terms * self.density)

    @property
    def bytes(self) -> int:
        """The least memory traffic: every operand read once, out written once, broadcast operands at their own size."""
        layouts = [self.out, *(layout for _, layout in self.operands if layout is not self.inp or self.inp_read is not None)]
        layouts += self.epilogue.operands if self.epilogue else ()
        whole = sum(min(layout.numel, layout.span) * layout.dtype.itemsize for layout in layouts)
        return whole - round((1 - self.density) * self.b.numel * self.b.dtype.itemsize)

    @property
    def layout_letters(self) -> str:
        """The BLAS letters of a and b, then of c and d if they differ: ``n`` row-major, ``t`` column-major, ``s`` neither."""
        letters = "".join("n" if x.row_major else "t" if x.column_major else "s" for x in (self.a, self.b, self.c, self.d) if x)
        first, second = letters[:2], letters[2:]
        return first if second in ("", first) else f"{first}+{second}"
