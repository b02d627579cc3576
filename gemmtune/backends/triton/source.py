"""Triton source out of the templates of this folder."""

from __future__ import annotations

import functools
from typing import Any

from ...toolchain import render
from .arguments import SIGNATURE_DTYPES, Argument, Source
from .printer import TRITON_DTYPES
from .spec import KernelSpec
from .writer import PACKAGE, Writer

__all__ = ["PACKAGE", "SIGNATURE_DTYPES", "Argument", "Source", "render_source"]

TEMPLATE = "mm.py.jinja"
UNROLLED_REGISTERS = 128
"""Partial sums that a thread reads ahead while it adds up splits."""


@functools.lru_cache(maxsize=4096)
def render_source(
    spec: KernelSpec,
    template: str = TEMPLATE,
    *,
    values: tuple[tuple[str, Any], ...] = (),
    preamble: str = "",
    described: tuple[tuple[str, tuple[int, int]], ...] = (),
) -> Source:
    """The kernel of ``spec`` as Triton source, from one of the templates of this folder. Pure: no Triton is imported.

    ``values`` are more names for the template, ``preamble`` is source text that comes before the kernel. ``described`` are the
    operands that the kernel has as tensor descriptors instead of pointers, each with the block that is moved at a time.
    """
    writer = Writer(spec, preamble, dict(described))
    names: dict[str, Any] = {
        "block_m": spec.block_m,
        "block_n": spec.block_n,
        "block_k": spec.block_k,
        "even_k": spec.even_k,
        "edge_m": spec.edge.m,
        "edge_n": spec.edge.n,
        "batched": spec.batched,
        "split": spec.split,
        "dependent": spec.dependent,
        "alpha": spec.alpha,
        "stages": spec.stages,
        "unroll": max(1, min(4, UNROLLED_REGISTERS * 32 * spec.warps // (spec.block_m * spec.block_n))),
        "acc": TRITON_DTYPES[spec.accumulator],
        "input_precision": spec.input_precision,
        # numpy, on which the interpreter computes, has no bfloat16; products of 16-bit floats are exact in float32.
        "upcast": spec.interpret and spec.a.dtype.itemsize == 2,
        "quantized": spec.quantized is not None,
        "per_byte": 2 if spec.quantized is not None and spec.quantized.encoding else 1,
        **dict(values),
    }
    writer.values = names
    text = writer.finished(render.template(PACKAGE, template).render(**writer.hooks, **names))
    return Source(text=text, function=writer.function, arguments=writer.arguments)
