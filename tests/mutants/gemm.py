"""A complete GEMM in plain torch, made of steps that a mutant can replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gemmtune.declaration.labels import BIASES, FLOAT8, NARROW_FLOATS, ONE_PRODUCT, SCALES, WEIGHTS
from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.quantized import numbers
from gemmtune.problem.operations import Encoding

from .products import Product

__all__ = [
    "ALL_OPS",
    "BATCHED",
    "DENSE",
    "FACTOR",
    "INT8",
    "MIXED",
    "SCALED",
    "Epilogue",
    "Gemm",
    "Join",
    "Read",
    "Scale",
    "Store",
    "Terms",
    "Unpack",
    "Weights",
    "accumulator",
    "apply_epilogue",
    "scaled",
    "spread",
    "unpacked",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of out = alpha · a @ b + beta · inp, or scale · (a @ b). ``a`` and ``b`` are as read, in the accumulator's dtype.

    Scales that change along K, and the scales of mixed_mm, are part of ``a`` and ``b``.
    """

    a: torch.Tensor
    b: torch.Tensor
    inp: torch.Tensor | None = None
    alpha: float = 1
    beta: float = 1
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    """Factor of int_mm_mul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Argument b of mixed_mm with its scales, zero points and encoding."""

    b: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    encoding: Encoding
    dtype: torch.dtype
    """Dtype of a."""

    @property
    def size(self) -> tuple[int, int]:
        """Size (K, N) of the unpacked matrix."""
        return self.b.shape[-2] * (2 if self.encoding else 1), self.b.shape[-1]


Read = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function of the given operands (a, b) that returns the operands that the kernel reads."""
Join = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function of (a, b, c, d) of mm_plus_mm that returns the two matrices to multiply."""
Unpack = Callable[[Weights], torch.Tensor]
"""Function of weights that returns the numbers (K, N) to multiply."""
Scale = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function of (a, b, scale_a, scale_b), with scales that change along K, that returns the matrices to multiply."""
Epilogue = Callable[[torch.Tensor, Terms], torch.Tensor]
"""Function of (product, terms) that returns the numbers to store, before rounding."""
Store = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of (sums, out) that writes out and returns the result."""

DENSE = Traits(
    ops=("mm", "addmm", "bmm", "baddbmm"),
    dtypes=("float32", "float16", "bfloat16", "float64"),
    layouts=tuple(KINDS),
    out=True,
    alpha=True,
    beta=True,
    bias=BIASES,
    empty=True,
    streams=True,
    threads=True,
)
"""Declarations of the GEMMs in this package."""
BATCHED = dataclasses.replace(DENSE, ops=("bmm", "baddbmm"))
INT8 = dataclasses.replace(DENSE, ops=("int_mm",), dtypes=("int8",))
FACTOR = dataclasses.replace(INT8, ops=("int_mm_mul",), scales=SCALES, scale_dtypes=NARROW_FLOATS)
SCALED = dataclasses.replace(DENSE, ops=("scaled_mm",), dtypes=FLOAT8, scales=SCALES, float8_pairs=True, results=NARROW_FLOATS)
MIXED = dataclasses.replace(
    DENSE,
    ops=("mixed_mm",),
    dtypes=NARROW_FLOATS,
    scales=SCALES,
    scale_dtypes=NARROW_FLOATS,
    weights=tuple(WEIGHTS),
    zeros=True,
)
ALL_OPS = dataclasses.replace(
    MIXED, ops=ONE_PRODUCT, dtypes=(*(DENSE.dtypes or ()), "int8", *FLOAT8), float8_pairs=True, results=NARROW_FLOATS
)


def apply_epilogue(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return alpha · acc + beta · inp, or scale_a · scale_b · acc, or factor · acc. inp is not read if beta is 0."""
    if terms.scale_a is not None and terms.scale_b is not None:
        acc = acc * (terms.scale_a * terms.scale_b)
    if terms.factor is not None:
        acc = acc.float() * terms.factor
    if terms.alpha != 1:
        acc = acc * terms.alpha
    if terms.inp is not None and terms.beta != 0:
        acc = acc + terms.inp.to(acc.dtype) * terms.beta
    return acc


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulator's dtype: float64 for float64 and for int8, whose sums it holds exactly, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.int8) else torch.float32


def spread(scale: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return ``scale`` (r, c) repeated over the blocks of a matrix of ``size``. A block has 1, 32, 64, 128 or all lines."""
    for dim, extent in enumerate(size) if scale.dim() == 2 else ():
        count = scale.shape[dim]
        block = next((x for x in (1, 32, 64, 128) if -(-extent // x) == count), max(extent, 1))
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, extent)
    return scale


def unpacked(weights: Weights) -> torch.Tensor:
    """Return (b − zero) · scale in float32."""
    values = numbers(weights.b, weights.encoding).float()
    if weights.zero is not None:
        values = values - spread(weights.zero.float(), weights.size)
    return values if weights.scale is None else values * spread(weights.scale.float(), weights.size)


def scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a · scale_a and b · scale_b in float32."""
    (m, k), n = a.shape, b.shape[-1]
    return a.float() * spread(scale_a, (m, k)), b.float() * spread(scale_b, (k, n))


def _side_by_side(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([a, c], 1), torch.cat([b, d])


def _as_given(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a, b


def _stored(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(acc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """All operations with torch's signatures: read, multiply in the accumulator's dtype, apply the epilogue, round once, store."""

    gemm_traits: Traits = field(default=DENSE)
    read: Read = _as_given
    join: Join = _side_by_side
    unpack: Unpack = unpacked
    product: Product = torch.matmul
    epilogue: Epilogue = apply_epilogue
    store: Store = _stored
    scale: Scale = scaled

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a (M, K) @ b (K, N)."""
        return self._run(a, b, out=out)

    def bmm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a (B, M, K) @ b (B, K, N)."""
        return self._run(a, b, out=out)

    def addmm(
        self,
        inp: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return alpha · a (M, K) @ b (K, N) + beta · inp."""
        return self._run(a, b, inp=inp, alpha=alpha, beta=beta, out=out)

    def baddbmm(
        self,
        inp: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return alpha · a (B, M, K) @ b (B, K, N) + beta · inp."""
        return self._run(a, b, inp=inp, alpha=alpha, beta=beta, out=out)

    def mm_plus_mm(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a (M, K) @ b (K, N) + c (M, K2) @ d (K2, N)."""
        return self._run(*self.join(a, b, c, d), out=out)

    def int_mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a (M, K) @ b (K, N), int8 to int32."""
        return self._run(a, b, out=out, dtype=torch.int32)

    def int_mm_mul(self, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return (a (M, K) @ b (K, N)) · scale, int8 to the dtype of ``scale``."""
        return self._run(a, b, out=out, dtype=scale.dtype, factor=scale)

    def mixed_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_b: torch.Tensor | None = None,
        zero_b: torch.Tensor | None = None,
        encoding: Encoding = "",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a (M, K) @ ((b − zero_b) · scale_b) for narrow weights."""
        return self._run(a, self.unpack(Weights(b=b, scale=scale_b, zero=zero_b, encoding=encoding, dtype=a.dtype)), out=out)

    def scaled_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (scale_a · a (M, K)) @ (scale_b · b (K, N)), 8-bit floats to ``out_dtype``."""
        by_line = (
            scale_a.shape[1:].numel() == 1 and scale_b.shape[:-1].numel() == 1 and scale_b.shape[-1:] in ((), (1,), b.shape[-1:])
        )
        if not by_line:
            return self._run(*self.scale(a, b, scale_a, scale_b), out=out, dtype=out_dtype)
        return self._run(a, b, scale_a=scale_a, scale_b=scale_b, out=out, dtype=out_dtype)

    def _run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        inp: torch.Tensor | None = None,
        alpha: float = 1,
        beta: float = 1,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        work = accumulator(a.dtype)
        read_a, read_b = self.read(a, b)
        terms = Terms(
            a=read_a.to(work), b=read_b.to(work), inp=inp, alpha=alpha, beta=beta, scale_a=scale_a, scale_b=scale_b, factor=factor
        )  # fmt: skip
        acc = self.epilogue(self.product(terms.a, terms.b), terms)
        if out is None:
            out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype or a.dtype, device=a.device)
        return self.store(acc, out)
