"""Operands of the quantized operations in many layouts, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gemmtune.problem import Layout, Problem
from gemmtune.problem.compositions import packed
from gemmtune.problem.epilogue import Epilogue

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUPS = {"group_32": 32, "group_64": 64, "group_128": 128}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(shape: tuple[int, ...], low: int, high: int, seed: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=generator(seed)).to(dtype)


def floats(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def positive(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.rand(shape, generator=generator(seed)) + 0.5).to(dtype)


def views(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of a matrix in different memory layouts."""
    rows, cols = x.shape
    yield "row-major", x.clone(memory_format=torch.contiguous_format)
    yield "column-major", x.t().clone(memory_format=torch.contiguous_format).t()
    for name, view in (
        ("padded", torch.zeros(rows, cols + 3, dtype=torch.int8).view(torch.int8)[:, :cols]),
        ("every second", torch.zeros(rows, 2 * cols, dtype=torch.int8)[:, ::2]),
        ("offset", torch.zeros(rows * cols + 1, dtype=torch.int8)[1:].view(rows, cols)),
    ):
        if x.dtype.itemsize == 1:
            view.copy_(x.view(torch.int8))
            yield name, view.view(x.dtype)
        else:
            yield name, torch.zeros(view.stride(0) * rows, dtype=x.dtype).as_strided(x.shape, view.stride()).copy_(x)


def repeated(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of one byte per element in which elements share memory."""
    rows, cols = x.shape
    yield "one row repeated", x[:1].expand(rows, cols)
    yield "one column repeated", x[:, :1].expand(rows, cols)
    yield "one element repeated", x[:1, :1].expand(rows, cols)
    flat = x.reshape(-1).repeat(4)[: 3 * rows + cols + 4].clone()
    yield "overlapping rows", flat.as_strided((rows, cols), (3, 1))
    if rows == 1 or cols == 1:
        yield "strides of 1", flat.as_strided((rows, cols), (1, 1))


def weight_scale_shape(k: int, n: int, scales: str) -> tuple[int, ...] | None:
    return {"none": None, "tensor": (), "one": (1,), "column": (1, n)}.get(scales, (-(-k // GROUPS.get(scales, 1)), n))


def over_blocks(scale: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """The scale of every element of an operand, one by one."""
    if scale.numel() == 1:
        return scale.double().reshape(1, 1).expand(size)
    rows = torch.arange(size[0]) // block[0] if scale.shape[0] > 1 else torch.zeros(size[0], dtype=torch.long)
    cols = torch.arange(size[1]) // block[1] if scale.shape[1] > 1 else torch.zeros(size[1], dtype=torch.long)
    return scale.double()[rows][:, cols]


def mixed_operands(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype,
    dtype_b: torch.dtype = torch.int8,
    encoding: str = "",
    scales: str = "none",
    zeros: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """a, b (packed if encoded), scale_b, zero_b, and the weights (b − zero_b) · scale_b in float64."""  # fmt: skip
    a = floats((m, k), dtype, 1)
    if encoding:
        numbers = integers((k, n), -8, 7, 2) if encoding == "int4" else integers((k, n), 0, 15, 2, torch.uint8)
        b = packed(numbers)
    elif dtype_b.is_floating_point:
        b = numbers = floats((k, n), dtype_b, 2)
    else:
        low = 0 if dtype_b == torch.uint8 else -128
        b = numbers = integers((k, n), low, low + 255, 2, dtype_b)
    shape = weight_scale_shape(k, n, scales)
    scale = None if shape is None else positive(shape, scale_dtype or dtype, 3)
    zero = None if shape is None or not zeros else integers(shape, -3, 3, 4).to(scale_dtype or dtype)
    weights = numbers.double()
    block = (GROUPS.get(scales, k), 1)
    if zero is not None:
        weights = weights - over_blocks(zero, (k, n), block)
    if scale is not None:
        weights = weights * over_blocks(scale, (k, n), block)
    return a, b, scale, zero, weights


SCALES_A = {"tensor": ((), None), "row": ("m1", (1, 1 << 30)), "1x128": ("mk", (1, 128)), "128x128": ("MK", (128, 128))}
SCALES_B = {"tensor": ((), None), "column": ("1n", (1 << 30, 1)), "128x1": ("kn", (128, 1)), "128x128": ("KN", (128, 128))}


def float8_scale(size: tuple[int, int], block: tuple[int, int] | None, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for the blocks of an operand of that size, and the scale of each element in float64."""
    if block is None:
        scale = positive((), torch.float32, seed)
        return scale, over_blocks(scale, size, (1, 1))
    scale = positive(tuple(-(-extent // side) for extent, side in zip(size, block, strict=True)), torch.float32, seed)
    return scale, over_blocks(scale, size, block)


def problem_of(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    zero_b: torch.Tensor | None = None,
    encoding: str = "",
    epilogue: Epilogue | None = None,
    device_type: str = "cpu",
) -> Problem:
    def layout(x: torch.Tensor | None) -> Layout | None:
        return None if x is None else Layout.of(x)

    return Problem(
        op=op,  # type: ignore[arg-type]
        a=Layout.of(a),
        b=Layout.of(b),
        out=Layout.of(out),
        scale_a=layout(scale_a),
        scale_b=layout(scale_b),
        zero_b=layout(zero_b),
        encoding=encoding,  # type: ignore[arg-type]
        epilogue=epilogue,
        device_type=device_type,
    )
