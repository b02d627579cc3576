"""Problems with structure, as calls with contiguous operands state them: block-sparse weights, and groups of rows or terms."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..errors import InvalidProblemError
from .contiguous import BiasShape, blocked_layouts, check_size, grouped_layouts, inp_layout, operand_layouts
from .fields import scalar_class
from .layout import Layout
from .operations import Encoding
from .precision import Precision, precision_of
from .scales import Scales, WeightScales, scale_layouts, weight_scale_layout
from .sparsity import Imbalance, Sparsity, density_class, sides_of


class StructuredConstructors:
    """What ``Constructors`` has of problems with structure."""

    __slots__ = ()

    @classmethod
    def _of(cls, device_type: str | None, precision: Precision | None = None, **fields: Any) -> Self:
        """The problem with these fields; ``Problem`` is a dataclass, of which this class knows nothing."""
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        fields |= {"device_type": kind, "precision": precision or precision_of(fields["a"].dtype, kind)}
        return cls(**fields)

    @classmethod
    def bsr_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        block: int | tuple[int, int] = 64,
        density: float = 0.5,
        imbalance: Imbalance = "even",
        wide_index: bool = False,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Self:
        """out[M, N] = a[M, K] @ b[K, N] for a block-sparse weight [N, K], of which b is the transpose; M is the number of tokens.

        ``block`` is the side of its blocks, or (rows, columns); ``density`` the share that exists, taken as the nearest known
        class. ``layout`` is ``nt``, a and out row-major as nn.Linear has them, or ``tt``, both column-major: the transposes of x
        and the result of ``bsr_mm(bsr, x)``.
        """
        blocks = _sparsity(block, density, imbalance, wide_index)
        a, b, out = blocked_layouts(m, n, k, layout, dtype)
        return cls._of(device_type, precision, op="bsr_mm", a=a, b=b, out=out, sparsity=blocks, prepacked=prepacked)

    @classmethod
    def bsr_addmm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        block: int | tuple[int, int] = 64,
        density: float = 0.5,
        imbalance: Imbalance = "even",
        wide_index: bool = False,
        layout: str = "nt",
        bias: BiasShape = "n",
        alpha: float = 1,
        beta: float = 1,
        device_type: str | None = None,
        precision: Precision | None = None,
        prepacked: bool = False,
    ) -> Self:
        """out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with b as for ``bsr_mm`` and inp as for ``addmm``."""
        blocks = _sparsity(block, density, imbalance, wide_index)
        a, b, out = blocked_layouts(m, n, k, layout, dtype)
        more = {"inp": inp_layout((), m, n, bias, dtype), "alpha": scalar_class(alpha), "beta": scalar_class(beta)}
        return cls._of(device_type, precision, op="bsr_addmm", a=a, b=b, out=out, sparsity=blocks, prepacked=prepacked, **more)

    @classmethod
    def grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """out[M, N] = a[M, K] @ b[g] for each group of rows of a, with b [G, K, N] and M the rows of all groups together.

        ``layout`` is for a and for each matrix of b: ``nt`` has b stored [G, N, K], as the weights of experts are.
        """
        a, b, out, offs = grouped_layouts(groups, m, n, k, layout, dtype)
        return cls._of(device_type, precision, op="grouped_mm", a=a, b=b, out=out, offs=offs)

    @classmethod
    def mixed_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        encoding: Encoding = "",
        scales: WeightScales = "column",
        scale_dtype: torch.dtype | None = None,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """``grouped_mm`` with weights b of int8, or with an ``encoding`` of uint8 [G, K/2, N], and scales of a's dtype."""
        a, b, out, offs = grouped_layouts(groups, m, n, k, layout, dtype, torch.int8)
        if encoding:
            _, b, *_ = grouped_layouts(groups, m, n, -(-k // 2), layout, dtype, torch.uint8)
        scale = weight_scale_layout(n, k, scales, scale_dtype or dtype)
        if scale is None or len(scale.size) != 2:
            raise InvalidProblemError(f"scales: got {scales!r}, expected column, group_32, group_64 or group_128")
        scale = Layout.contiguous((groups, *scale.size), scale.dtype)
        more: dict[str, Any] = {"scale_b": scale, "encoding": encoding}
        return cls._of(device_type, precision, op="mixed_grouped_mm", a=a, b=b, out=out, offs=offs, **more)

    @classmethod
    def routed_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        tokens: int | None = None,
        gated: str = "",
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """``grouped_mm`` of M rows that an index picks out of an a with ``tokens`` rows (None: those of a), with N columns of out;
        b has twice as many where they are ``gated``."""
        a, b, out, offs = grouped_layouts(groups, m, n, k, layout, dtype)
        if gated:
            _, b, *_ = grouped_layouts(groups, m, 2 * n, k, layout, dtype)
        rows = None
        if tokens is not None:
            a, *_ = operand_layouts((), tokens, n, k, layout, dtype)
            rows = Layout.contiguous((m,), torch.int64)
        return cls._of(device_type, precision, op="routed_grouped_mm", a=a, b=b, out=out, offs=offs, rows=rows, gated=gated)

    @classmethod
    def combined_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        tokens: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """``grouped_mm`` of M rows, weighted and added up to ``tokens`` rows of out (M unless given), M / tokens rows for each."""
        a, b, _, offs = grouped_layouts(groups, m, n, k, layout, dtype)
        count = m if tokens is None else tokens
        if count < 1 or m % count:
            raise InvalidProblemError(f"tokens: got {count} for {m} rows, expected a number that divides them")
        slots, weights = Layout.contiguous((m,), torch.int64), Layout.contiguous((count, m // count), torch.float32)
        out, more = Layout.contiguous((count, n), dtype), {"slots": slots, "weights": weights}
        return cls._of(device_type, precision, op="combined_grouped_mm", a=a, b=b, out=out, offs=offs, **more)

    @classmethod
    def scaled_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: torch.dtype = torch.float8_e4m3fn,
        dtype_b: torch.dtype | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        scales: Scales = "row",
        fast_accum: bool = False,
        layout: str = "nt",
        device_type: str | None = None,
    ) -> Self:
        """``grouped_mm`` of 8-bit floats, with scales as ``scaled_mm`` names them, but for ``tensor``."""
        a, b, out, offs = grouped_layouts(groups, m, n, k, layout, dtype, dtype_b, out_dtype)
        if scales == "tensor":
            raise InvalidProblemError("scales: got 'tensor', expected row, block_1x128 or block_128x128")
        scale_a, scale_b = scale_layouts(m, n, k, scales)
        more: dict[str, Any] = {"scale_a": scale_a, "scale_b": Layout.contiguous((groups, *scale_b.size), scale_b.dtype)}
        return cls._of(device_type, op="scaled_grouped_mm", a=a, b=b, out=out, offs=offs, fast_accum=fast_accum, **more)

    @classmethod
    def grouped_k_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "tn",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """out[g] = a[:, g] @ b[g] for each group of the K terms: a [M, K], b [K, N], out [G, M, N], K the terms of all groups.

        ``layout`` is ``tn`` for gradients of weights, whose a is the transpose of rows.
        """
        a, b, _ = operand_layouts((), m, n, k, layout, dtype)
        check_size("groups", groups)
        out, offs = Layout.contiguous((groups, m, n), dtype), Layout.contiguous((groups,), torch.int32)
        return cls._of(device_type, precision, op="grouped_k_mm", a=a, b=b, out=out, offs=offs)


def _sparsity(block: int | tuple[int, int], density: float, imbalance: Imbalance, wide_index: bool) -> Sparsity:
    rows, cols = sides_of(block)
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"density: got {density!r}, expected the share of blocks that exist, from 0 to 1")
    share = density_class(density)
    return Sparsity(block_n=rows, block_k=cols, density=share, imbalance=imbalance, wide_index=wide_index)
