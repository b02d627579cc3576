"""Constructors of problems with structure: block-sparse weights, and groups of rows or terms. Operands are contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from ..errors import InvalidProblemError
from .contiguous import BiasShape, check_size, inp_layout, operand_layouts, scale_fields
from .dtypes import DType, as_dtype
from .fields import scalar_class
from .operation import Op
from .operations import OPERATIONS, Encoding
from .precision import Precision, precision_of
from .scales import Scales, WeightScales
from .sparsity import Imbalance, Sparsity, density_class, sides_of


class StructuredConstructors:
    """The part of ``Constructors`` for problems with structure."""

    __slots__ = ()

    @classmethod
    def _of(
        cls,
        op: Op,
        sizes: tuple[int, ...],
        dtype: DType,
        layout: str,
        device_type: str | None,
        precision: Precision | None = None,
        *,
        dtypes: Mapping[str, DType | None] | None = None,
        symbols: Mapping[str, int] | None = None,
        added: tuple[BiasShape, float, float] | None = None,
        scales: str | None = None,
        scale_dtype: DType | None = None,
        zeros: bool = False,
        **fields: Any,
    ) -> Self:
        """Return the problem of an operation's row for ``sizes`` ([batch,] m, n, k), with contiguous operands.

        ``dtypes`` by role and sizes by symbol are for ``operand_layouts``. ``added`` is the shape of inp, alpha and beta.
        ``fields`` are further fields of ``Problem``, which this base class does not know.
        """
        row, gated = OPERATIONS[op], fields.get("gated", "")
        dtype = as_dtype(dtype)
        for name, size in zip(("batch", "m", "n", "k")[-len(sizes) :], sizes, strict=True):
            check_size(name, size)
        known = dict(zip("BMNK"[-len(sizes) :], sizes, strict=True)) | dict(symbols or {})
        known["N"] *= 2 if gated else 1
        given = {"a": dtype} | {role: as_dtype(x) for role, x in (dtypes or {}).items() if x is not None}
        if scales is not None:
            scaled = scale_fields(row, known, scales, as_dtype(scale_dtype or dtype), zeros=zeros)
            if row.grouped and (scale := scaled["scale_b"]) is not None:
                known, given = known | {"S": scale.size[0], "T": scale.size[1]}, given | {"scale_b": scale.dtype}
            else:
                fields |= scaled
        if added is not None:
            (bias, alpha, beta), (*lead, m, n, _) = added, sizes
            inp = inp_layout(tuple(lead), m, n, bias, dtype)
            fields |= {"inp": inp, "alpha": scalar_class(alpha), "beta": scalar_class(beta)}
        encoded = bool(fields.get("encoding"))
        fields |= operand_layouts(row.given(given, gated=gated), known, layout, given, encoded=encoded)
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        fields |= {"op": op, "device_type": kind, "precision": precision or precision_of(dtype, kind)}
        return cls(**fields)

    @classmethod
    def bsr_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
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
        return cls._of("bsr_mm", (m, n, k), dtype, layout, device_type, precision, sparsity=blocks, prepacked=prepacked)

    @classmethod
    def bsr_addmm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DType = torch.bfloat16,
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
        sparse: dict[str, Any] = {"sparsity": _sparsity(block, density, imbalance, wide_index), "prepacked": prepacked}
        return cls._of("bsr_addmm", (m, n, k), dtype, layout, device_type, precision, added=(bias, alpha, beta), **sparse)

    @classmethod
    def grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return out[M, N] = a[M, K] @ b[g] for each group of rows of a, with b [G, K, N]. M counts the rows of all groups.

        ``layout`` applies to a and to each matrix of b: ``nt`` stores b as [G, N, K], like the weights of experts.
        """
        return cls._of("grouped_mm", (m, n, k), dtype, layout, device_type, precision, symbols={"G": groups})

    @classmethod
    def mixed_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: DType = torch.bfloat16,
        encoding: Encoding = "",
        scales: WeightScales = "column",
        scale_dtype: DType | None = None,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return ``grouped_mm`` with int8 weights b, or uint8 [G, K/2, N] with an ``encoding``, and scales of a's dtype."""
        weight: dict[str, Any] = {"scales": scales, "scale_dtype": scale_dtype, "encoding": encoding}
        weight["dtypes"] = {"b": torch.uint8 if encoding else torch.int8}
        return cls._of("mixed_grouped_mm", (m, n, k), dtype, layout, device_type, precision, symbols={"G": groups}, **weight)

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
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return ``grouped_mm`` of M rows that an index picks from an a with ``tokens`` rows (None: no index).

        out has N columns. If the product is ``gated``, b has 2 · N columns.
        """
        routed: dict[str, Any] = {"symbols": {"G": groups}, "gated": gated}
        if tokens is not None:
            routed |= {"symbols": {"G": groups, "T": tokens}, "dtypes": {"rows": torch.int64}}
        return cls._of("routed_grouped_mm", (m, n, k), dtype, layout, device_type, precision, **routed)

    @classmethod
    def combined_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        tokens: int | None = None,
        dtype: DType = torch.bfloat16,
        layout: str = "nt",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return ``grouped_mm`` of M rows, weighted and added up to ``tokens`` rows of out (default M), M / tokens for each."""
        check_size("m", m)
        count = m if tokens is None else tokens
        if count < 1 or m % count:
            raise InvalidProblemError(f"tokens: got {count} for {m} rows, expected a number that divides them")
        symbols = {"G": groups, "T": count, "C": m // count}
        slots = {"slots": torch.int64}
        return cls._of("combined_grouped_mm", (m, n, k), dtype, layout, device_type, precision, symbols=symbols, dtypes=slots)

    @classmethod
    def scaled_grouped_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: DType = torch.float8_e4m3fn,
        dtype_b: DType | None = None,
        out_dtype: DType = torch.bfloat16,
        scales: Scales = "row",
        fast_accum: bool = False,
        layout: str = "nt",
        device_type: str | None = None,
    ) -> Self:
        """Return ``grouped_mm`` of 8-bit floats, with the scales of ``scaled_mm`` except ``tensor``."""
        dtypes = {"b": dtype_b or dtype, "out": out_dtype}
        more: dict[str, Any] = {"scales": scales, "fast_accum": fast_accum}
        return cls._of("scaled_grouped_mm", (m, n, k), dtype, layout, device_type, symbols={"G": groups}, dtypes=dtypes, **more)

    @classmethod
    def grouped_k_mm(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        groups: int = 8,
        dtype: DType = torch.bfloat16,
        layout: str = "tn",
        device_type: str | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return out[g] = a[:, g] @ b[g] for each group of the K terms: a [M, K], b [K, N], out [G, M, N]. K counts all groups.

        ``layout`` is ``tn`` for gradients of weights, where a is the transpose of rows.
        """
        return cls._of("grouped_k_mm", (m, n, k), dtype, layout, device_type, precision, symbols={"G": groups})


def _sparsity(block: int | tuple[int, int], density: float, imbalance: Imbalance, wide_index: bool) -> Sparsity:
    rows, cols = sides_of(block)
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"density: got {density!r}, expected the share of blocks that exist, from 0 to 1")
    share = density_class(density)
    return Sparsity(block_n=rows, block_k=cols, density=share, imbalance=imbalance, wide_index=wide_index)
