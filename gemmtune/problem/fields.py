"""What a Problem consists of, and what follows from it alone."""

from __future__ import annotations

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
"""What is known of alpha and beta before a call; the value itself is an argument of the launch."""


def scalar_class(value: float) -> ScalarClass:
    """The class of a value of alpha or beta."""
    return "zero" if value == 0 else "one" if value == 1 else "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFields:
    """The fields of a Problem, which says what they mean and checks that they fit together."""

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
    """b was given through ``prepack``: a choice may have it in its own layout, and the packing is not part of the call."""
    scale_a: Layout | None = None
    scale_b: Layout | None = None
    zero_b: Layout | None = None
    encoding: Encoding = ""
    fast_accum: bool = False
    """8-bit tensor cores may keep their narrow sum to the end, without adding it to a float32 one (torch's ``use_fast_accum``)."""
    c: Layout | None = None
    d: Layout | None = None
    sparsity: Sparsity | None = None
    """b is block-sparse, and this is its class; the layout of b is that of the matrix that it stands for."""
    offs: Layout | None = None
    """The ends of the groups of rows of a, or of terms: int32 [G] on the device, data like the numbers of a."""
    rows: Layout | None = None
    """Which row of a each row of the product is made of; None where they are those of a."""
    slots: Layout | None = None
    """The place of the weight of each row of the product: a row with the slot t · C + c, times weights[t, c], goes to row t of
    out."""
    weights: Layout | None = None
    gated: str = ""
    """The function of the first half of the columns of the product, by which the second half is multiplied; empty for none."""

    @property
    def operation(self) -> Operation:
        """The operation's row of the table."""
        return OPERATIONS[self.op]

    @property
    def operands(self) -> tuple[tuple[str, Layout], ...]:
        """The operands that are given, by role, in the order in which kernels get their tensors."""
        return tuple((role, layout) for role in ROLES if (layout := getattr(self, role)) is not None)

    @property
    def batch(self) -> int:
        """The number of matrices in out; 1 for operations without a batch."""
        return self.out.size[0] if len(self.out.size) == 3 else 1

    @property
    def groups(self) -> int:
        """The number of groups of rows of a, or of terms of the sums; 0 for operations that have none."""
        return self.offs.size[0] if self.offs is not None else 0

    @property
    def divides_terms(self) -> bool:
        """The terms of the sums are divided into groups, each with a result of its own."""
        return self.offs is not None and len(self.out.size) == 3

    @property
    def m(self) -> int:
        """Rows of the product: of a, or as many as are picked of it; and of out, unless rows are added up."""
        return self.a.size[-2] if self.rows is None else self.rows.size[0]

    @property
    def n(self) -> int:
        """Columns of out, and of b, which has twice as many where half of them are gates."""
        return self.b.size[-1] // (2 if self.gated else 1)

    @property
    def k(self) -> int:
        """Columns of a, rows of b: the summed dimension."""
        return self.a.size[-1]

    @property
    def k2(self) -> int:
        """Columns of c, rows of d; 0 without a second product."""
        return self.c.size[-1] if self.c is not None else 0

    @property
    def summed(self) -> tuple[int, ...]:
        """The summed dimension of each product: (K,), or (K, K2) of mm_plus_mm."""
        return (self.k,) if self.c is None else (self.k, self.k2)

    @property
    def terms(self) -> int:
        """Products in the sum of one element of out: K, or K + K2."""
        return self.k + self.k2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a, and of b but for the quantized operations."""
        return self.a.dtype

    @property
    def widens_b(self) -> bool:
        """b holds narrower numbers than a, which a kernel widens."""
        return self.operation.widens_b

    @property
    def float8(self) -> bool:
        """a and b are 8-bit floats."""
        return self.operation.float8

    @property
    def integers(self) -> bool:
        """a and b are integers."""
        return not self.a.dtype.is_floating_point

    @property
    def b_size(self) -> tuple[int, int]:
        """(K, N), which is not the size of a packed b."""
        return self.k, self.n

    @property
    def scales(self) -> tuple[Layout, ...]:
        """The layouts of scale_a, scale_b and zero_b, as far as they are given."""
        return tuple(x for x in (self.scale_a, self.scale_b, self.zero_b) if x is not None)

    def scale_block(self, role: str) -> tuple[int, int]:
        """Rows and columns of a or b (of its numbers, where it is packed) for which one element of that scale is."""
        operand, layout = self.operation.operand(role), getattr(self, role)
        assert operand is not None
        if self.groups:
            return self._grouped_block(role, layout)
        block = block_of(layout.size, (self.m, self.k) if operand.of == "a" else self.b_size, operand.blocks)
        assert block is not None  # checked when the problem was made
        return block

    def _grouped_block(self, role: str, scale: Layout) -> tuple[int, int]:
        """``scale_block`` of a grouped product, whose scale_b [G, S, T] has the scales of a group's matrix in its last two
        dimensions, and whose scale_a is [M, S]."""
        along_k = scale.size[-1 if role == "scale_a" else -2]
        if self.scale_a is None:
            return max(1, self.k // along_k), 1
        step = SCALE_BLOCK if along_k > 1 else max(1, self.k)
        return (1, step) if role == "scale_a" else (step, 1 if scale.size[-1] == self.n else SCALE_BLOCK)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which products are summed."""
        return accumulator_dtype(self.a.dtype)

    @property
    def epilogue_dtype(self) -> torch.dtype:
        """The dtype of what the epilogue gets: the accumulator's, but float32 instead of int32."""
        return torch.float32 if self.accumulator == torch.int32 else self.accumulator

    @property
    def batched(self) -> bool:
        """Operands are 3-D."""
        return len(self.a.size) == 3

    @property
    def empty(self) -> bool:
        """out has no elements."""
        return self.out.numel == 0

    @property
    def inp_read(self) -> Layout | None:
        """inp, where beta lets it be read; else None."""
        return self.inp if self.beta != "zero" else None

    @property
    def flops(self) -> int:
        """2·B·M·N·K, with K + K2 for K where there are two products; of a block-sparse b the share that exists. Groups divide M or
        K, whatever their sizes."""
        products = 1 if self.divides_terms else self.batch
        return round(2 * products * self.m * self.b.size[-1] * self.terms * self.density)

    @property
    def density(self) -> float:
        """The share of b that exists: 1 but for block-sparse ones."""
        return 1.0 if self.sparsity is None else self.sparsity.density

    @property
    def bytes(self) -> int:
        """The least memory traffic: every operand read once, out written once, broadcast operands at their own size."""
        layouts = [self.out, *(layout for _, layout in self.operands if layout is not self.inp or self.inp_read is not None)]
        layouts += self.epilogue.operands if self.epilogue else ()
        whole = sum(min(layout.numel, layout.span) * layout.dtype.itemsize for layout in layouts)
        return whole - round((1 - self.density) * self.b.numel * self.b.dtype.itemsize)

    @property
    def layout_letters(self) -> str:
        """The BLAS letters of a and b: ``n`` for row-major, ``t`` for column-major, ``s`` for neither.

        Those of c and d follow (``nt+nn``) where they are others.
        """
        letters = "".join("n" if x.row_major else "t" if x.column_major else "s" for x in (self.a, self.b, self.c, self.d) if x)
        first, second = letters[:2], letters[2:]
        return first if second in ("", first) else f"{first}+{second}"

    @property
    def dtype_label(self) -> str:
        """The dtype's name, or ``tf32`` for float32 in that precision."""
        return "tf32" if self.precision.input_mode == "tf32" else dtype_name(self.dtype)
