"""The Problem: what is asked of a GEMM, as a frozen, hashable value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .canonical import plain
from .dtypes import accumulator_dtype, dtype_name
from .epilogue import Epilogue
from .layout import Layout
from .precision import Precision, precision_of
from .rules import DENSE_OPS, OPS, Op, check
from .standard import BiasShape, Scales, inp_layout, operand_layouts, scale_layouts

__all__ = ["DENSE_OPS", "OPS", "BiasShape", "Op", "Problem", "ScalarClass", "Scales", "scalar_class"]

ScalarClass = Literal["zero", "one", "general"]
"""What is known of alpha or beta before the call; the value itself is an argument of the launch."""
_SCALED_FIELDS = ("scale_a", "scale_b", "fast_accum")


def scalar_class(value: float) -> ScalarClass:
    """The class of a value of alpha or beta."""
    return "zero" if value == 0 else "one" if value == 1 else "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """out = epilogue(alpha · a @ b + beta · inp), or for scaled_mm (scale_a · scale_b) · (a @ b)

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N], ``out`` is [M, N] or [B, M, N]; all of one float dtype, except that
    ``out`` may differ where the epilogue ends in a cast. ``inp`` is the added operand with the shape that the caller gave it; it
    broadcasts to ``out`` and is None but for addmm and baddbmm. With ``beta`` zero, ``inp`` is never read.

    int_mm has a and b of int8 and out of int32, exact while sums fit that, as they do for K below 2^17. scaled_mm has a and b of
    float8_e4m3fn or float8_e5m2, each its own, out of float32, float16 or bfloat16, and two float32 scales: ``scale_a`` with one
    element or shape [M, 1], ``scale_b`` with one element or shape [1, N]. Neither takes alpha, beta, inp or an epilogue.

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
    fast_accum: bool = False
    """8-bit tensor cores may keep their narrow sum to the end, without adding it to a float32 one (torch's ``use_fast_accum``)."""

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
    def dtype(self) -> torch.dtype:
        """The dtype of a and b."""
        return self.a.dtype

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which products are summed and the epilogue is computed."""
        return accumulator_dtype(self.a.dtype)

    @property
    def batched(self) -> bool:
        """Operands are 3-D."""
        return len(self.a.size) == 3

    @property
    def empty(self) -> bool:
        """out has no elements."""
        return self.out.numel == 0

    @property
    def flops(self) -> int:
        """2·B·M·N·K."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The least memory traffic: every operand read once, out written once, broadcast operands at their own size."""
        read = [self.inp if self.beta != "zero" else None, self.scale_a, self.scale_b]
        layouts = [self.a, self.b, self.out, *(layout for layout in read if layout)]
        layouts += self.epilogue.operands if self.epilogue else ()
        return sum(min(layout.numel, layout.span) * layout.dtype.itemsize for layout in layouts)

    @property
    def layout_letters(self) -> str:
        """The BLAS letters of a and b: ``n`` for row-major, ``t`` for column-major, ``s`` for neither."""
        return "".join("n" if x.row_major else "t" if x.column_major else "s" for x in (self.a, self.b))

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
        data: dict[str, Any] = plain(self)
        if self.op != "scaled_mm":
            data = {name: value for name, value in data.items() if name not in _SCALED_FIELDS}
        return data | {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}

    def __str__(self) -> str:
        shape = f"{self.batch}x" * self.batched + f"{self.m}x{self.n}x{self.k}"
        text = f"{self.op} {shape} {self.dtype_label} {self.layout_letters}"
        if self.inp is not None:
            text += f" inp[{'x'.join(map(str, self.inp.size))}] alpha={self.alpha} beta={self.beta}"
        if self.op == "scaled_mm":
            mixed = f" b {dtype_name(self.b.dtype)}" if self.b.dtype != self.a.dtype else ""
            text += f"{mixed} out {dtype_name(self.out.dtype)} scales={self._scales}" + " fast_accum" * self.fast_accum
        if self.epilogue is not None:
            text += f" epilogue={self.epilogue}"
        return text + " prepacked" * self.prepacked + f" on {self.device_type}"

    @property
    def _scales(self) -> str:
        """``tensor``, ``row``, or the two shapes where those differ in kind."""
        shapes = [layout.size if layout else () for layout in (self.scale_a, self.scale_b)]
        for name in ("tensor", "row"):
            if shapes == [layout.size for layout in scale_layouts(self.m, self.n, name)]:
                return name
        return ",".join("x".join(map(str, shape)) or "scalar" for shape in shapes)

    @classmethod
    def mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Problem:
        """out[M, N] = a[M, K] @ b[K, N], as a call with contiguous operands states it.

        ``layout`` has BLAS letters: ``nt`` is a row-major, b stored N×K as a Linear weight. ``device_type`` is cuda if there is
        a CUDA device, else cpu; ``precision`` is what torch's flags say now.
        """
        return cls._dense("mm", None, m, n, k, dtype, layout, device_type, precision, prepacked=prepacked)

    @classmethod
    def addmm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        bias: BiasShape = "n",
        alpha: float = 1,
        beta: float = 1,
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Problem:
        """out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with inp of shape [N], [M, N], [M, 1], [1, N] or a scalar."""
        return cls._dense("addmm", None, m, n, k, dtype, layout, device_type, precision, bias, alpha, beta, prepacked=prepacked)

    @classmethod
    def bmm(
        cls,
        batch: int,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Problem:
        """out[B, M, N] = a[B, M, K] @ b[B, K, N]."""
        return cls._dense("bmm", batch, m, n, k, dtype, layout, device_type, precision)

    @classmethod
    def baddbmm(
        cls,
        batch: int,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        bias: BiasShape = "mn",
        alpha: float = 1,
        beta: float = 1,
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Problem:
        """out[B, M, N] = alpha · a[B, M, K] @ b[B, K, N] + beta · inp, with inp as for addmm (``mn`` meaning [B, M, N])."""
        return cls._dense("baddbmm", batch, m, n, k, dtype, layout, device_type, precision, bias, alpha, beta)

    @classmethod
    def int_mm(cls, m: int, n: int, k: int, *, layout: str = "nt", device_type: str | None = None) -> Problem:
        """out[M, N] = a[M, K] @ b[K, N], int8 into int32."""
        a, b, out = operand_layouts((), m, n, k, layout, torch.int8, torch.int8, torch.int32)
        return cls(op="int_mm", a=a, b=b, out=out, device_type=device_type or _device_type())

    @classmethod
    def scaled_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        dtype_b: torch.dtype | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        scales: Scales = "tensor",
        fast_accum: bool = False,
        layout: str = "nt",
        device_type: str | None = None,
    ) -> Problem:
        """out[M, N] = (scale_a · scale_b) · (a[M, K] @ b[K, N]), with scalars as scales, or for ``row`` [M, 1] and [1, N]."""
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype_b or dtype, out_dtype)
        scale_a, scale_b = scale_layouts(m, n, scales)
        kind = device_type or _device_type()
        return cls(op="scaled_mm", a=a, b=b, out=out, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum, device_type=kind)

    @classmethod
    def _dense(
        cls,
        op: Op,
        batch: int | None,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        layout: str,
        device_type: str | None,
        precision: Precision | None,
        bias: BiasShape | None = None,
        alpha: float = 1,
        beta: float = 0,
        prepacked: bool = False,
    ) -> Problem:
        lead = () if batch is None else (batch,)
        inp = inp_layout(lead, m, n, bias, dtype) if bias is not None else None
        a, b, out = operand_layouts(lead, m, n, k, layout, dtype, dtype, dtype)
        kind = device_type or _device_type()
        return cls(
            op=op,
            a=a,
            b=b,
            out=out,
            inp=inp,
            alpha=scalar_class(alpha),
            beta=scalar_class(beta) if inp else "zero",
            device_type=kind,
            precision=precision or precision_of(dtype, kind),
            prepacked=prepacked,
        )


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
