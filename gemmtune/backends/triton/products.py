"""Loop statements of the mm template for quantized operations: conversion of bytes to numbers, scales, and the product."""

from collections.abc import Callable, Iterator

import torch

from ...problem.dtypes import FLOAT8
from ...problem.operations import OPERATIONS
from .printer import TRITON_DTYPES, cast
from .quantized import Quantized, ScaleClass
from .spec import KernelSpec

ScaleStride = Callable[[ScaleClass, int], str]
"""Function that returns the kernel expression for a scale's stride along rows (0) or columns (1)."""


def scale_load(stride_of: ScaleStride, scale: ScaleClass, rows: str, cols: str, *, vector: tuple[int, ...] = (0, 1)) -> str:
    """Return a load of the float32 scales for an operand's elements (rows, cols).

    ``rows`` and ``cols`` are indices into the operand. The dimensions in ``vector`` are vectors, the others scalars. The result is
    a column or a row, or a scalar if no vector dimension changes the scale.
    """
    terms, vectors = [scale.base], []
    for dim, index in enumerate((rows, cols)):
        stride = stride_of(scale, dim)
        if stride == "0":
            continue
        block = scale.block[dim]
        place = index if block == 1 else f"(({index}) // {block})"
        terms.append(place if stride == "1" else f"{place} * {stride}")
        vectors += [dim] if dim in vector else []
    address = " + ".join(terms)
    if not vectors:
        return f"tl.load({address}).to(tl.float32)"
    # scale_a belongs to rows of a and out, the other scales to columns of b and out.
    mask, shape = ("rows < M", "[:, None]") if vectors == [0] else ("cols < N", "[None, :]")
    return f"tl.load({address}, mask={mask}, other=0.0).to(tl.float32){shape}"


def product(spec: KernelSpec, stride_of: ScaleStride, *, swap: bool = False) -> list[str]:
    """Return the statements that add the product of the loaded blocks at ``k0``, or with ``swap`` its transpose, to ``acc``."""
    quantized = spec.quantized
    assert quantized is not None
    acc = TRITON_DTYPES[spec.accumulator]
    lines = list(_numbers(quantized, spec))
    lines += _weights(quantized, spec, stride_of)
    if spec.interpret and quantized.product != torch.int8:
        # The interpreter computes in numpy, which has no bfloat16.
        lines += [f"{block} = {block}.to({acc})" for block in ("a_block", "b_block")]
    floats = spec.accumulator == torch.int32 and quantized.product != torch.int8
    left, right = ("tl.trans(b_block)", "tl.trans(a_block)") if swap else ("a_block", "b_block")
    dot = f'tl.dot({left}, {right}, {{}}input_precision="{spec.input_precision}", out_dtype={"tl.float32" if floats else acc}{{}})'
    if not quantized.fresh:
        precise = "" if quantized.imprecise is None else f", max_num_imprecise_acc={quantized.imprecise}"
        return [*lines, "acc = " + dot.format("acc, ", precise)]
    lines.append("part = " + dot.format("", ""))
    for scale in quantized.on_sums:
        rows, cols = ("rows", "k0") if scale.name == "scale_a" else ("k0", "cols")
        vector = (0,) if scale.name == "scale_a" else (1,)
        load = scale_load(stride_of, scale, rows, cols, vector=vector)
        if swap:
            load = (
                load.removesuffix("[:, None]") + "[None, :]" if scale.name == "scale_a" else load.replace("[None, :]", "[:, None]")
            )
        lines.append(f"part = part * {load}")
    return [*lines, f"acc = acc + {'part.to(tl.int32)' if floats else 'part'}"]


def _numbers(quantized: Quantized, spec: KernelSpec) -> Iterator[str]:
    """Yield statements that convert loaded data to numbers: bytes of 8-bit floats to float16, packed 4-bit values to bytes."""
    for block, dtype in (("a_block", quantized.a), ("b_block", quantized.b)):
        if quantized.by_bits and dtype in FLOAT8:
            yield f"{block} = {'e4m3' if dtype == torch.float8_e4m3fn else 'e5m2'}_value({block})"
    if quantized.encoding:
        yield "both = tl.permute(tl.join(b_block & 15, b_block >> 4), (0, 2, 1))"
        yield f"b_block = tl.reshape(both, ({spec.block_k}, {spec.block_n}))"
    if OPERATIONS[quantized.op].integers and quantized.product != torch.int8:
        yield from (f"{block} = {block}.to(tl.float16)" for block in ("a_block", "b_block"))
    if quantized.encoding == "int4":
        yield "b_block = (b_block ^ 8).to(tl.int8) - 8"


def _weights(quantized: Quantized, spec: KernelSpec, stride_of: ScaleStride) -> Iterator[str]:
    """Yield statements that turn weights into numbers of a's type, with zero points and the scales that change along K."""
    if not OPERATIONS[quantized.op].widens_b:
        return
    scales = sorted(quantized.on_weights, key=lambda scale: scale.name != "zero_b")
    if scales:
        yield "b_block = b_block.to(tl.float32)"
    for scale in scales:
        sign = "-" if scale.name == "zero_b" else "*"
        yield f"b_block = b_block {sign} {scale_load(stride_of, scale, 'k0', 'cols', vector=(1,))}"
    if scales and not spec.even_k:
        yield "b_block = tl.where((ks < k_end - k0)[:, None], b_block, 0.0)"
    elif not scales and quantized.b in FLOAT8 and not quantized.by_bits:
        yield "b_block = b_block.to(tl.float16)"
    if scales or quantized.product != torch.float16 or quantized.b not in FLOAT8:
        yield f"b_block = {cast('b_block', quantized.product, interpret=spec.interpret)}"
