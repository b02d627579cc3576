"""Constructors of ``Problem`` for calls with contiguous operands."""

from __future__ import annotations

from typing import Any, Self

import torch

from .contiguous import BiasShape
from .dtypes import DType
from .operations import Encoding
from .precision import Precision
from .scales import Scales, WeightScales
from .structured import StructuredConstructors


class Constructors(StructuredConstructors):
    """Base class with the constructors of ``Problem``. Dtypes are torch's or names; ``device_type`` is cuda if there is a GPU."""

    __slots__ = ()

    @classmethod
    def mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with contiguous operands.

        ``layout`` has BLAS letters: ``nt`` is a row-major a and a b stored as N×K, like the weight of a Linear. ``device_type``
        defaults to cuda if there is a GPU, otherwise to cpu. ``precision`` defaults to torch's current flags.
        """
        return cls._of("mm", (m, n, k), dtype, layout, device_type, precision, prepacked=prepacked)

    @classmethod
    def addmm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        bias: BiasShape = "n",
        alpha: float = 1,
        beta: float = 1,
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Self:
        """Return out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with inp of shape [N], [M, N], [M, 1], [1, N] or a scalar."""
        added = (bias, alpha, beta)
        return cls._of("addmm", (m, n, k), dtype, layout, device_type, precision, added=added, prepacked=prepacked)

    @classmethod
    def bmm(
        cls,
        batch: int,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return the problem out[B, M, N] = a[B, M, K] @ b[B, K, N]."""
        return cls._of("bmm", (batch, m, n, k), dtype, layout, device_type, precision)

    @classmethod
    def baddbmm(
        cls,
        batch: int,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        bias: BiasShape = "mn",
        alpha: float = 1,
        beta: float = 1,
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return out[B, M, N] = alpha · a[B, M, K] @ b[B, K, N] + beta · inp, with inp as in addmm (``mn`` means [B, M, N])."""
        return cls._of("baddbmm", (batch, m, n, k), dtype, layout, device_type, precision, added=(bias, alpha, beta))

    @classmethod
    def mm_plus_mm(
        cls,
        m: int,
        n: int,
        k: int,
        k2: int | None = None,
        *,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return out[M, N] = a[M, K] @ b[K, N] + c[M, K2] @ d[K2, N]. K2 defaults to K; ``layout`` applies to both products."""
        symbols = {"K2": k if k2 is None else k2}
        return cls._of("mm_plus_mm", (m, n, k), dtype, layout, device_type, precision, symbols=symbols)

    @classmethod
    def int_mm(cls, m: int, n: int, k: int, *, layout: str = "nt", device_type: str | None = None, prepacked: bool = False) -> Self:
        """Return the problem out[M, N] = a[M, K] @ b[K, N] with int8 operands and an int32 result."""
        return cls._of("int_mm", (m, n, k), torch.int8, layout, device_type, prepacked=prepacked)

    @classmethod
    def scaled_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.float8_e4m3fn,
        dtype_b: DType | None = None,
        out_dtype: DType = torch.bfloat16,
        scales: Scales = "tensor",
        fast_accum: bool = False,
        layout: str = "nt",
        device_type: str | None = None,
        prepacked: bool = False,
    ) -> Self:
        """Return out[M, N] = (scale_a · a[M, K]) @ (scale_b · b[K, N]); ``scales`` names the blocks of the contiguous scales."""
        dtypes = {"b": dtype_b or dtype, "out": out_dtype}
        more: dict[str, Any] = {"scales": scales, "fast_accum": fast_accum, "prepacked": prepacked}
        return cls._of("scaled_mm", (m, n, k), dtype, layout, device_type, dtypes=dtypes, **more)

    @classmethod
    def mixed_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.float16,
        dtype_b: DType = torch.int8,
        encoding: Encoding = "",
        scales: WeightScales = "none",
        zeros: bool = False,
        scale_dtype: DType | None = None,
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
        weight: dict[str, Any] = {"scales": scales, "scale_dtype": scale_dtype, "zeros": zeros, "encoding": encoding}
        dtypes = {"b": torch.uint8 if encoding else dtype_b}
        return cls._of("mixed_mm", (m, n, k), dtype, layout, device_type, precision, dtypes=dtypes, prepacked=prepacked, **weight)
