"""Constructors of problems with structure: block-sparse weights, and groups of rows or terms. Operands are contiguous."""

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
    """The part of ``Constructors`` for problems with structure."""

    __slots__ = ()

    @classmethod
    def _of(cls, device_type: str | None, precision: Precision | None = None, **fields: Any) -> Self:
        """Return the problem with these fields, which the dataclass ``Problem`` defines. This base class does not know it."""
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
        """Return out[M, N] = a[M, K] @ b[K, N] for a block-sparse weight [N, K], of which b is the transpose. M counts tokens.

        ``block`` is the side of its blocks, or (rows, columns). ``density`` is the share of blocks that exist, rounded to the
        nearest class. ``layout`` ``nt`` has a and out row-major, as nn.Linear has them. ``tt`` has both column-major: the
        transposes of x and the result of ``bsr_mm(bsr, x)``.
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
        """Return out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with b as in ``bsr_mm`` and inp as in ``addmm``."""
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
        """Return out[M, N] = a[M, K] @ b[g] for each group of rows of a, with b [G, K, N]. M counts the rows of all groups.

        ``layout`` applies to a and to each matrix of b: ``nt`` stores b as [G, N, K], like the weights of experts.
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
        """Return ``grouped_mm`` with int8 weights b, or uint8 [G, K/2, N] with an ``encoding``, and scales of a's dtype."""
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
        """Return ``grouped_mm`` of M rows that an index picks from an a with ``tokens`` rows (None: no index).

        out has N columns. If the product is ``gated``, b has 2 · N columns.
        """
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
        """Return ``grouped_mm`` of M rows, weighted and added up to ``tokens`` rows of out (default M), M / tokens for each."""
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
        """Return ``grouped_mm`` of 8-bit floats, with the scales of ``scaled_mm`` except ``tensor``."""
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
        """Return out[g] = a[:, g] @ b[g] for each group of the K terms: a [M, K], b [K, N], out [G, M, N]. K counts all groups.

        ``layout`` is ``tn`` for gradients of weights, where a is the transpose of rows.
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
