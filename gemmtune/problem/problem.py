"""The Problem: what is asked of a GEMM, as a frozen, hashable value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .canonical import plain
from .constructors import Constructors
from .dtypes import accumulator_dtype, dtype_name
from .epilogue import Epilogue
from .layout import Layout
from .precision import Precision
from .rules import DENSE_OPS, FLOAT_OPS, OPS, QUANTIZED_OPS, Encoding, Op, check
from .scalar import ScalarClass, scalar_class
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, Scales, WeightScales, block_of
from .standard import BiasShape
from .text import describe

__all__ = [
    "DENSE_OPS",
    "FLOAT_OPS",
    "OPS",
    "QUANTIZED_OPS",
    "BiasShape",
    "Encoding",
    "Op",
    "Problem",
    "ScalarClass",
    "Scales",
    "WeightScales",
    "scalar_class",
]

_QUANTIZED_FIELDS = ("scale_a", "scale_b", "zero_b", "fast_accum", "encoding")
_SECOND_FIELDS = ("c", "d")
"""Of the second product of mm_plus_mm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Constructors):
    """out = epilogue(alpha · a @ b + beta · inp), a and b being (a · scale_a) and ((b − zero_b) · scale_b) where those are given

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N], ``out`` is [M, N] or [B, M, N]; all of one float dtype, except that
    ``out`` may differ where the epilogue ends in a cast. ``inp`` is the added operand with the shape that the caller gave it; it
    broadcasts to ``out`` and is None but for addmm and baddbmm. With ``beta`` zero, ``inp`` is never read.

    mm_plus_mm is epilogue(a @ b + c @ d) with ``c`` [M, K2] and ``d`` [K2, N] of the dtype of a.

    int_mm has a and b of int8 and out of int32, exact while sums fit that, as they do for K below 2^17; an epilogue gets the sum as
    float32, and out is then of float32, float16 or bfloat16.

    scaled_mm has a and b of float8_e4m3fn or float8_e5m2, each its own, and out of float32, float16 or bfloat16. ``scale_a`` and
    ``scale_b`` are float32, each for the blocks that its shape tells (``problem.scales``).

    mixed_mm has a and out of float32, float16 or bfloat16 and b of int8, uint8 or an 8-bit float, or with an ``encoding`` of
    uint8 [K/2, N], each holding rows 2i (low four bits) and 2i + 1 of a column as ``int4`` (two's complement) or ``uint4``.
    ``scale_b`` and ``zero_b`` (or neither, or the first alone) are float32 or of a's dtype, for everything, a column, or 32, 64 or
    128 elements along K of a column. A kernel may round (b − zero_b) · scale_b to the dtype of a.

    These four take no alpha, beta or inp.

    Raises:
        InvalidProblemError: the layouts do not fit together.
    """

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

    def __post_init__(self) -> None:
        check(self)

    @property
    def batch(self) -> int:
        """The number of independent products; 1 for mm and addmm."""
        return self.a.size[0] if len(self.a.size) == 3 else 1

    @property
    def m(self) -> int:
        """Rows of a and out."""
        return self.a.size[-2]

    @property
    def n(self) -> int:
        """Columns of b and out."""
        return self.b.size[-1]

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
    def b_size(self) -> tuple[int, int]:
        """(K, N), which is not the size of a packed b."""
        return self.k, self.n

    @property
    def scales(self) -> tuple[Layout, ...]:
        """The layouts of scale_a, scale_b and zero_b, as far as they are given."""
        return tuple(x for x in (self.scale_a, self.scale_b, self.zero_b) if x is not None)

    @property
    def leading(self) -> tuple[Layout, ...]:
        """c and d, or the scales, as far as they are given: ``Run`` has these tensors before the epilogue's."""
        return tuple(x for x in (self.c, self.d, *self.scales) if x is not None)

    def scale_block(self, name: Literal["scale_a", "scale_b", "zero_b"]) -> tuple[int, int]:
        """Rows and columns of a or b (of its numbers, where it is packed) for which one element of that scale is."""
        layout = getattr(self, name)
        size = (self.m, self.k) if name == "scale_a" else self.b_size
        legal = BLOCKS_OF_A if name == "scale_a" else BLOCKS_OF_WEIGHTS if self.op == "mixed_mm" else BLOCKS_OF_B
        block = block_of(layout.size, size, legal)
        assert block is not None  # checked when the problem was made
        return block

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
        """2·B·M·N·K, with K + K2 for K where there are two products."""
        return 2 * self.batch * self.m * self.n * self.terms

    @property
    def bytes(self) -> int:
        """The least memory traffic: every operand read once, out written once, broadcast operands at their own size."""
        added = (self.inp_read,) if self.inp_read is not None else ()
        layouts = [self.a, self.b, self.out, *added, *self.leading]
        layouts += self.epilogue.operands if self.epilogue else ()
        return sum(min(layout.numel, layout.span) * layout.dtype.itemsize for layout in layouts)

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

    @property
    def key(self) -> str:
        """A canonical JSON text, equal exactly for equal problems: the problem's part of a store key."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, with nothing left out that the choice may depend on; M, N, K and batch stand in clear."""
        second = self.op == "mm_plus_mm"
        left_out = {*(_QUANTIZED_FIELDS if self.op in (*FLOAT_OPS, "int_mm") else ()), *(() if second else _SECOND_FIELDS)}
        data: dict[str, Any] = {name: value for name, value in plain(self).items() if name not in left_out}
        sizes = {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}
        return data | sizes | ({"k2": self.k2} if second else {})

    def __str__(self) -> str:
        return describe(self)
