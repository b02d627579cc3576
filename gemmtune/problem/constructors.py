"""Constructors of ``Problem`` for calls with contiguous operands."""

from __future__ import annotations

from typing import Any, Self, get_args

import torch

from ..errors import InvalidProblemError
from .contiguous import BiasShape, check_size, inp_layout, operand_layouts
from .fields import scalar_class
from .operation import Op
from .operations import Encoding
from .precision import Precision
from .scales import Scales, WeightScales, scale_layouts, weight_scale_layout
from .structured import StructuredConstructors


class Constructors(StructuredConstructors):
    """Base class with the constructors of ``Problem``. ``device_type`` defaults to cuda if there is a GPU, otherwise to cpu."""

    __slots__ = ()

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
    ) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with contiguous operands.

        ``layout`` has BLAS letters: ``nt`` is a row-major a and a b stored as N×K, like the weight of a Linear. ``device_type``
        defaults to cuda if there is a GPU, otherwise to cpu. ``precision`` defaults to torch's current flags.
        """
        return cls._dense("mm", (m, n, k), dtype, layout, device_type, precision, prepacked=prepacked)

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
    ) -> Self:
        """Return out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with inp of shape [N], [M, N], [M, 1], [1, N] or a scalar."""
        return cls._dense("addmm", (m, n, k), dtype, layout, device_type, precision, bias, alpha, beta, prepacked=prepacked)

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
    ) -> Self:
        """Return the problem out[B, M, N] = a[B, M, K] @ b[B, K, N]."""
        return cls._dense("bmm", (batch, m, n, k), dtype, layout, device_type, precision)

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
    ) -> Self:
        """Return out[B, M, N] = alpha · a[B, M, K] @ b[B, K, N] + beta · inp, with inp as in addmm (``mn`` means [B, M, N])."""
        return cls._dense("baddbmm", (batch, m, n, k), dtype, layout, device_type, precision, bias, alpha, beta)

    @classmethod
    def mm_plus_mm(
        cls,
        m: int,
        n: int,
        k: int,
        k2: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return out[M, N] = a[M, K] @ b[K, N] + c[M, K2] @ d[K2, N]. K2 defaults to K; ``layout`` applies to both products."""
        a, b, out = operand_layouts((), m, n, k, layout, dtype)
        check_size("k2", k if k2 is None else k2)
        c, d, _ = operand_layouts((), m, n, k if k2 is None else k2, layout, dtype)
        return cls._of(device_type, precision, op="mm_plus_mm", a=a, b=b, c=c, d=d, out=out)

    @classmethod
    def int_mm(cls, m: int, n: int, k: int, *, layout: str = "nt", device_type: str | None = None, prepacked: bool = False) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with int8 operands and an int32 result."""
        a, b, out = operand_layouts((), m, n, k, layout, torch.int8, out=torch.int32)
        return cls._of(device_type, op="int_mm", a=a, b=b, out=out, prepacked=prepacked)

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
        prepacked: bool = False,
    ) -> Self:
        """Return out[M, N] = (scale_a · a[M, K]) @ (scale_b · b[K, N]); ``scales`` names the blocks of the contiguous scales."""
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype_b, out_dtype)
        scale_a, scale_b = scale_layouts(m, n, k, scales)
        scaled: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b}
        return cls._of(device_type, op="scaled_mm", a=a, b=b, out=out, fast_accum=fast_accum, prepacked=prepacked, **scaled)

    @classmethod
    def mixed_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.float16,
        dtype_b: torch.dtype = torch.int8,
        encoding: Encoding = "",
        scales: WeightScales = "none",
        zeros: bool = False,
        scale_dtype: torch.dtype | None = None,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Self:
        """Return the problem out[M, N] = a[M, K] @ ((b[K, N] − zero_b) · scale_b), with a result of a's dtype.

        ``zeros`` adds a zero_b with the shape and dtype of scale_b; that dtype defaults to a's. With an ``encoding``, b is
        uint8 [K/2, N].

        Raises:
            InvalidProblemError: ``zeros`` is set without scales.
        """
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype_b)
        if encoding:
            _, b, _ = operand_layouts((), m, n, -(-k // 2), layout, dtype, torch.uint8)
        scale = weight_scale_layout(n, k, scales, scale_dtype or dtype)
        if zeros and scale is None:
            raise InvalidProblemError(f"zeros: got no scales, expected one of {', '.join(get_args(WeightScales)[1:])}")
        weight = {"scale_b": scale, "zero_b": scale if zeros else None, "encoding": encoding, "prepacked": prepacked}
        return cls._of(device_type, precision, op="mixed_mm", a=a, b=b, out=out, **weight)

    @classmethod
    def _dense(
        cls,
        op: Op,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        layout: str,
        device_type: str | None,
        precision: Precision | None,
        bias: BiasShape | None = None,
        alpha: float = 1,
        beta: float = 0,
        prepacked: bool = False,
    ) -> Self:
        *lead, m, n, k = sizes
        inp = inp_layout(tuple(lead), m, n, bias, dtype) if bias is not None else None
        a, b, out = operand_layouts(tuple(lead), m, n, k, layout, dtype)
        return cls._of(
            device_type,
            precision,
            op=op,
            a=a,
            b=b,
            out=out,
            inp=inp,
            alpha=scalar_class(alpha),
            beta=scalar_class(beta) if inp else "zero",
            prepacked=prepacked,
        )
