"""Kernel that reads quantized numbers once and writes them as floats: unpacked, without their zero points, scaled.

Torch's calls for it read and write the weight eight times, for 22 times the time of the product that follows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

NUMBERS = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Dtypes of scales, zero points and results."""
ROWS, BYTES, WARPS = 8, 256, 4
"""Tile of one program: rows of contiguous bytes."""
Block = tuple[int, int]
_jit: Any = triton.jit


@_jit  # type: ignore[untyped-decorator]
def _rounded(x, scale, zero, has_zero: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x.to(tl.float32)
    if has_zero:
        x = (x - zero.to(tl.float32)).to(wide).to(tl.float32)
    return (x * scale.to(tl.float32)).to(wide)


@_jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    x, out, scale, zero, k, n, inside, s_k, s_n, z_k, z_n, s_block: tl.constexpr, z_block: tl.constexpr, has_zero: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    s = tl.load(scale + (k // s_block[0]) * s_k + (n // s_block[1]) * s_n, mask=inside, other=0.0)
    z = s
    if has_zero:
        z = tl.load(zero + (k // z_block[0]) * z_k + (n // z_block[1]) * z_n, mask=inside, other=0.0)
    tl.store(out, _rounded(x, s, z, has_zero, wide).to(out.dtype.element_ty), mask=inside)


@_jit  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def]
    b, scale, zero, out, outer, inner, b_group, b_outer, out_group, out_outer, s_group, s_k, s_n, z_group, z_k, z_n,
    s_block: tl.constexpr, z_block: tl.constexpr, has_zero: tl.constexpr, encoding: tl.constexpr, along_k: tl.constexpr,
    wide: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    # Each program has a tile of one expert: rows of contiguous bytes.
    group, row, column = (
        tl.program_id(2).to(tl.int64),
        tl.program_id(0).to(tl.int64) * rows,
        tl.program_id(1).to(tl.int64) * columns,
    )
    scale, zero, out = scale + group * s_group, zero + group * z_group, out + group * out_group
    o, i = (row + tl.arange(0, rows))[:, None], (column + tl.arange(0, columns))[None, :]
    inside = (o < outer) & (i < inner)
    x = tl.load(b + group * b_group + o * b_outer + i, mask=inside)
    # A byte has one number, or two with consecutive k.
    if encoding == "":
        k, n = o, i
        if along_k:
            k, n = i, o
        _write(x, out + o * out_outer + i, scale, zero, k, n, inside, s_k, s_n, z_k, z_n, s_block, z_block, has_zero, wide)
    else:
        low, high = (x & 15).to(tl.int32), (x >> 4).to(tl.int32)
        if encoding == "int4":
            low, high = (low ^ 8) - 8, (high ^ 8) - 8
        if along_k:
            k = (2 * column + tl.arange(0, 2 * columns))[None, :]
            inside = (o < outer) & (k < 2 * inner)
            both, at = tl.interleave(low, high), out + o * out_outer + k
            _write(both, at, scale, zero, k, o, inside, s_k, s_n, z_k, z_n, s_block, z_block, has_zero, wide)
        else:
            at = out + 2 * o * out_outer + i
            _write(low, at, scale, zero, 2 * o, i, inside, s_k, s_n, z_k, z_n, s_block, z_block, has_zero, wide)
            at += out_outer
            _write(high, at, scale, zero, 2 * o + 1, i, inside, s_k, s_n, z_k, z_n, s_block, z_block, has_zero, wide)


def serves(b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Return True if ``dequantize`` accepts these dtypes and strides."""
    floats = all(x is None or x.dtype in FLOATS for x in (scale, zero))
    dense = b.numel() > 0 and 1 in b.stride()[-2:]
    return b.dtype in NUMBERS and floats and dtype in FLOATS and dense


def dequantize(
    b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, encoding: str, dtype: torch.dtype, blocks: tuple[Block, Block]
) -> torch.Tensor:
    """Return (b − zero) · scale as [K, N] of ``dtype`` in the order of b's memory, each step rounded as eager torch does.

    Args:
        b: [K, N] or [G, K, N]; with an ``encoding`` (``int4``, ``uint4``) uint8 [K/2, N] or [G, K/2, N].
        scale: one element, or [⌈K/g⌉, ⌈N/h⌉] for blocks of g · h numbers; with a dimension G in front if b has one.
        zero: as ``scale``, or None.
        encoding: ``int4``, ``uint4`` or "".
        dtype: of the result.
        blocks: (g, h) of the scale, and of the zero points.
    """
    wide = torch.promote_types(dtype, scale.dtype)
    wide = wide if zero is None else torch.promote_types(wide, zero.dtype)
    groups, along_k, pair = (b.shape[0] if b.dim() == 3 else 1), b.stride(-1) != 1, 2 if encoding else 1
    k, n = b.shape[-2] * pair, b.shape[-1]
    size, b_outer = ((n, b.shape[-2]), b.stride(-1)) if along_k else ((b.shape[-2], n), b.stride(-2))
    out = torch.empty((groups, n, k) if along_k else (groups, k, n), dtype=dtype, device=b.device)
    grid = (triton.cdiv(size[0], ROWS), triton.cdiv(size[1], BYTES), groups)
    of_zero = (0, 0, 0) if zero is None else _strides(zero)
    with torch.cuda.device(b.device):
        _dequantize[grid](
            b, scale, scale if zero is None else zero, out, *size, b.stride(0) if groups > 1 else 0, b_outer, k * n, out.stride(1),
            *_strides(scale), *of_zero, *blocks, zero is not None, encoding, along_k, FLOATS[wide], ROWS, BYTES,
            num_warps=WARPS,
        )  # fmt: skip
    out = out.transpose(1, 2) if along_k else out
    return out if b.dim() == 3 else out[0]


def _strides(scale: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a scale over experts, blocks along K and blocks along N; 0 where it has one element."""
    sizes, strides = (1, 1, 1, *scale.shape)[-3:], (0, 0, 0, *scale.stride())[-3:]
    group, k, n = (stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True))
    return group, k, n
