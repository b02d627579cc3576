"""Problems as calls with contiguous operands state them: the constructors of ``Problem``."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args

import torch

from ..errors import InvalidProblemError
from .fields import scalar_class
from .layout import Layout
from .operations import Encoding, Op
from .precision import Precision, precision_of
from .scales import Scales, WeightScales, scale_layouts, weight_scale_layout
from .sparsity import Imbalance, Sparsity, density_class

MOST = 2**31 - 1
"""The largest size of a dimension: the libraries count in 32 bits."""
MOST_ELEMENTS = 2**46
"""More than an address space has room for."""

BiasShape = Literal["n", "mn", "m1", "1n", "scalar"]


class Constructors:
    """What ``Problem`` inherits. ``device_type`` is cuda if there is a GPU, else cpu."""

    __slots__ = ()

    @classmethod
    def _of(cls, device_type: str | None, precision: Precision | None = None, **fields: Any) -> Self:
        """The problem with these fields; ``Problem`` is a dataclass, of which this class knows nothing."""
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        fields |= {"device_type": kind, "precision": precision or precision_of(fields["a"].dtype, kind)}
        return cls(**fields)

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
        """out[M, N] = a[M, K] @ b[K, N], as a call with contiguous operands states it.

        ``layout`` has BLAS letters: ``nt`` is a row-major, b stored N×K as a Linear weight. ``device_type`` is cuda if there is
        a GPU, else cpu; ``precision`` is what torch's flags say now.
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
        """out[M, N] = alpha · a[M, K] @ b[K, N] + beta · inp, with inp of shape [N], [M, N], [M, 1], [1, N] or a scalar."""
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
        """out[B, M, N] = a[B, M, K] @ b[B, K, N]."""
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
        """out[B, M, N] = alpha · a[B, M, K] @ b[B, K, N] + beta · inp, with inp as for addmm (``mn`` meaning [B, M, N])."""
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
        """out[M, N] = a[M, K] @ b[K, N] + c[M, K2] @ d[K2, N]; K2 is K unless given, and ``layout`` is for both products."""
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype, dtype)
        check_size("k2", k if k2 is None else k2)
        c, d, _ = operand_layouts((), m, n, k if k2 is None else k2, layout, dtype, dtype, dtype)
        return cls._of(device_type, precision, op="mm_plus_mm", a=a, b=b, c=c, d=d, out=out)

    @classmethod
    def int_mm(cls, m: int, n: int, k: int, *, layout: str = "nt", device_type: str | None = None, prepacked: bool = False) -> Self:
        """out[M, N] = a[M, K] @ b[K, N], int8 into int32."""
        a, b, out = operand_layouts((), m, n, k, layout, torch.int8, torch.int8, torch.int32)
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
        """out[M, N] = (scale_a · a[M, K]) @ (scale_b · b[K, N]), with contiguous scales as ``scales`` names them."""
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype_b or dtype, out_dtype)
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
        """out[M, N] = a[M, K] @ ((b[K, N] − zero_b) · scale_b), of a's dtype.

        ``zeros`` says whether there is a zero_b, of the same shape and dtype (a's unless given) as scale_b. With an ``encoding``, b
        is uint8 [K/2, N].

        Raises:
            InvalidProblemError: zero points without scales.
        """
        a, b, out = operand_layouts((), m, n, k, layout, dtype, dtype_b, dtype)
        if encoding:
            _, b, _ = operand_layouts((), m, n, -(-k // 2), layout, dtype, torch.uint8, dtype)
        scale = weight_scale_layout(n, k, scales, scale_dtype or dtype)
        if zeros and scale is None:
            raise InvalidProblemError(f"zeros: got no scales, expected one of {', '.join(get_args(WeightScales)[1:])}")
        weight = {"scale_b": scale, "zero_b": scale if zeros else None, "encoding": encoding, "prepacked": prepacked}
        return cls._of(device_type, precision, op="mixed_mm", a=a, b=b, out=out, **weight)

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
        a, b, out = _blocked_layouts(m, n, k, layout, dtype)
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
        a, b, out = _blocked_layouts(m, n, k, layout, dtype)
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
        a, _, out = operand_layouts((), m, n, k, layout, dtype, dtype, dtype)
        _, b, _ = operand_layouts((groups,), m, n, k, layout, dtype, dtype, dtype)
        offs = Layout.contiguous((groups,), torch.int32)
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
        a, _, out = operand_layouts((), m, n, k, layout, dtype, dtype, dtype)
        stored = (-(-k // 2), torch.uint8) if encoding else (k, torch.int8)
        _, b, _ = operand_layouts((groups,), m, n, stored[0], layout, dtype, stored[1], dtype)
        scale, offs = weight_scale_layout(n, k, scales, scale_dtype or dtype), Layout.contiguous((groups,), torch.int32)
        if scale is None or len(scale.size) != 2:
            raise InvalidProblemError(f"scales: got {scales!r}, expected column, group_32, group_64 or group_128")
        scale = Layout.contiguous((groups, *scale.size), scale.dtype)
        more: dict[str, Any] = {"scale_b": scale, "encoding": encoding, "offs": offs}
        return cls._of(device_type, precision, op="mixed_grouped_mm", a=a, b=b, out=out, **more)

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
        a, _, out = operand_layouts((), m, n, k, layout, dtype, dtype, out_dtype)
        _, b, _ = operand_layouts((groups,), m, n, k, layout, dtype, dtype_b or dtype, out_dtype)
        if scales == "tensor":
            raise InvalidProblemError("scales: got 'tensor', expected row, block_1x128 or block_128x128")
        scale_a, scale_b = scale_layouts(m, n, k, scales)
        more: dict[str, Any] = {"scale_a": scale_a, "scale_b": Layout.contiguous((groups, *scale_b.size), scale_b.dtype)}
        offs = Layout.contiguous((groups,), torch.int32)
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
        a, b, _ = operand_layouts((), m, n, k, layout, dtype, dtype, dtype)
        check_size("groups", groups)
        out, offs = Layout.contiguous((groups, m, n), dtype), Layout.contiguous((groups,), torch.int32)
        return cls._of(device_type, precision, op="grouped_k_mm", a=a, b=b, out=out, offs=offs)

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
        a, b, out = operand_layouts(tuple(lead), m, n, k, layout, dtype, dtype, dtype)
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


def operand_layouts(
    lead: tuple[int, ...], m: int, n: int, k: int, letters: str, a: torch.dtype, b: torch.dtype, out: torch.dtype
) -> tuple[Layout, Layout, Layout]:
    """a, b and out of these sizes and dtypes. ``letters`` says for a and for b: ``n`` row-major, ``t`` stored transposed.

    Raises:
        InvalidProblemError: other letters, or a size that no operand has.
    """
    for name, size in (*((("batch", lead[0]),) if lead else ()), ("m", m), ("n", n), ("k", k)):
        check_size(name, size)
    if len(letters) != 2 or set(letters) - {"n", "t"}:
        raise InvalidProblemError(f"layout: got {letters!r}, expected one of nn, nt, tn, tt")
    first, second = (letter == "t" for letter in letters)
    return (
        _layout((*lead, m, k), a, transposed=first),
        _layout((*lead, k, n), b, transposed=second),
        Layout.contiguous((*lead, m, n), out),
    )


def _sparsity(block: int | tuple[int, int], density: float, imbalance: Imbalance, wide_index: bool) -> Sparsity:
    rows, cols = (block, block) if isinstance(block, int) else block
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"density: got {density!r}, expected the share of blocks that exist, from 0 to 1")
    share = density_class(density)
    return Sparsity(block_n=rows, block_k=cols, density=share, imbalance=imbalance, wide_index=wide_index)


def _blocked_layouts(m: int, n: int, k: int, letters: str, dtype: torch.dtype) -> tuple[Layout, Layout, Layout]:
    """a, b and out around a block-sparse b."""
    if letters not in ("nt", "tt"):
        raise InvalidProblemError(f"layout: got {letters!r}, expected nt or tt: b is the transpose of a weight [N, K]")
    result = dtype if dtype.is_floating_point else torch.int32
    a, b, out = operand_layouts((), m, n, k, letters, dtype, dtype, result)
    return a, b, out if letters == "nt" else _layout((m, n), result, transposed=True)


def inp_layout(lead: tuple[int, ...], m: int, n: int, bias: BiasShape, dtype: torch.dtype) -> Layout:
    """The added operand of shape [N], [M, N] (with the batch before it), [M, 1], [1, N] or a scalar."""
    shapes = {"n": (n,), "mn": (*lead, m, n), "m1": (m, 1), "1n": (1, n), "scalar": ()}
    if bias not in shapes:
        raise InvalidProblemError(f"bias: got {bias!r}, expected one of {', '.join(shapes)}")
    return Layout.contiguous(shapes[bias], dtype)


def check_size(name: str, size: object) -> None:
    """Raises InvalidProblemError unless ``size`` is an integer that a dimension of an operand can have."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST:
        raise InvalidProblemError(f"{name}: got {size!r}, expected an integer from 0 to {MOST}")


def _layout(size: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Layout:
    if math.prod(size) > MOST_ELEMENTS:
        raise InvalidProblemError(f"sizes: got an operand of {size}, expected at most 2^46 elements; take smaller sizes")
    if not transposed:
        return Layout.contiguous(size, dtype)
    return Layout.contiguous((*size[:-2], size[-1], size[-2]), dtype).transposed
