"""The Problem: what is asked of a GEMM, as a frozen, hashable value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import InvalidProblemError
from .canonical import plain
from .dtypes import accumulator_dtype, dtype_info, dtype_name
from .epilogue import Epilogue
from .layout import Layout
from .precision import Precision, precision_of

__all__ = ["OPS", "BiasShape", "Op", "Problem", "ScalarClass", "scalar_class"]

Op = Literal["mm", "addmm", "bmm", "baddbmm"]
OPS: tuple[Op, ...] = ("mm", "addmm", "bmm", "baddbmm")
ScalarClass = Literal["zero", "one", "general"]
"""What is known of alpha or beta before the call; the value itself is an argument of the launch."""
BiasShape = Literal["n", "mn", "m1", "1n", "scalar"]


def scalar_class(value: float) -> ScalarClass:
    """The class of a value of alpha or beta."""
    return "zero" if value == 0 else "one" if value == 1 else "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """out = epilogue(alpha · a @ b + beta · inp)

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N], ``out`` is [M, N] or [B, M, N]; all of one float dtype, except that
    ``out`` may differ where the epilogue ends in a cast. ``inp`` is the added operand with the shape that the caller gave it; it
    broadcasts to ``out`` and is None for mm and bmm. With ``beta`` zero, ``inp`` is never read.

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

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InvalidProblemError(f"op: got {self.op!r}, expected one of {', '.join(OPS)}")
        rank = 3 if self.op in ("bmm", "baddbmm") else 2
        for name, layout in (("a", self.a), ("b", self.b), ("out", self.out)):
            dtype_info(layout.dtype)
            if len(layout.size) != rank:
                raise InvalidProblemError(f"{self.op}: {name} must be a {rank}-D tensor, got shape {list(layout.size)}")
        if self.a.dtype != self.b.dtype:
            raise InvalidProblemError(
                f"{self.op}: a and b must have the same dtype, got {self.a.dtype} and {self.b.dtype}; cast one of them"
            )
        if self.a.size[-1] != self.b.size[-2] or self.a.size[:-2] != self.b.size[:-2]:
            raise InvalidProblemError(
                f"{self.op}: shapes do not fit, got a {list(self.a.size)} and b {list(self.b.size)}; "
                f"expected a [{'B, ' * (rank - 2)}M, K] and b [{'B, ' * (rank - 2)}K, N]"
            )
        expected = (*self.a.size[:-1], self.b.size[-1])
        if self.out.size != expected:
            raise InvalidProblemError(f"{self.op}: out must have shape {list(expected)}, got {list(self.out.size)}")
        self._check_inp(expected)

    def _check_inp(self, expected: tuple[int, ...]) -> None:
        if (self.inp is not None) != (self.op in ("addmm", "baddbmm")):
            raise InvalidProblemError(f"{self.op}: takes {'no' if self.inp is not None else 'an'} added operand")
        if self.inp is not None and self.inp.dtype != self.a.dtype:
            raise InvalidProblemError(f"{self.op}: inp must have the dtype of a, got {self.inp.dtype} and {self.a.dtype}")
        named = [("inp", self.inp)] if self.inp is not None else []
        named += [(f"epilogue_args[{i}]", x) for i, x in enumerate(self.epilogue.operands if self.epilogue else ())]
        for name, layout in named:
            try:
                layout.expanded(expected)
            except InvalidProblemError as error:
                raise InvalidProblemError(f"{self.op}: {name}: {error}") from None

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
        layouts = [self.a, self.b, self.out, *([self.inp] if self.inp and self.beta != "zero" else [])]
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
        return data | {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}

    def __str__(self) -> str:
        shape = f"{self.batch}x" * self.batched + f"{self.m}x{self.n}x{self.k}"
        text = f"{self.op} {shape} {self.dtype_label} {self.layout_letters}"
        if self.inp is not None:
            text += f" inp[{'x'.join(map(str, self.inp.size))}] alpha={self.alpha} beta={self.beta}"
        if self.epilogue is not None:
            text += f" epilogue={self.epilogue}"
        return text + " prepacked" * self.prepacked + f" on {self.device_type}"

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
        if len(layout) != 2 or set(layout) - {"n", "t"}:
            raise InvalidProblemError(f"layout: got {layout!r}, expected one of nn, nt, tn, tt")
        lead = () if batch is None else (batch,)
        inp = None
        if bias is not None:
            shapes = {"n": (n,), "mn": (*lead, m, n), "m1": (m, 1), "1n": (1, n), "scalar": ()}
            if bias not in shapes:
                raise InvalidProblemError(f"bias: got {bias!r}, expected one of {', '.join(shapes)}")
            inp = Layout.contiguous(shapes[bias], dtype)
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(
            op=op,
            a=_operand((*lead, m, k), dtype, transposed=layout[0] == "t"),
            b=_operand((*lead, k, n), dtype, transposed=layout[1] == "t"),
            out=Layout.contiguous((*lead, m, n), dtype),
            inp=inp,
            alpha=scalar_class(alpha),
            beta=scalar_class(beta) if inp else "zero",
            device_type=kind,
            precision=precision or precision_of(dtype, kind),
            prepacked=prepacked,
        )


def _operand(size: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Layout:
    if any(n < 0 for n in size):
        raise InvalidProblemError(f"sizes must be 0 or more, got {size}")
    if not transposed:
        return Layout.contiguous(size, dtype)
    return Layout.contiguous((*size[:-2], size[-1], size[-2]), dtype).transposed
