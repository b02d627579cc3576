"""A whole GEMM in plain torch, put together from steps of which a mutant has another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..labels import BIASES, OPS, SCALES
from ..layouts import KINDS
from ..traits import Traits
from .products import Product

__all__ = ["ALL_OPS", "BATCHED", "DENSE", "INT8", "SCALED", "Finish", "Gemm", "Read", "Store", "Terms", "accumulator", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """out = alpha · a @ b + beta · inp, or scale · (a @ b). ``a`` and ``b`` are what was read, in the accumulator's dtype."""

    a: torch.Tensor
    b: torch.Tensor
    inp: torch.Tensor | None = None
    alpha: float = 1
    beta: float = 1
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None


Read = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The operands as they were given to what the kernel reads in their place."""
Finish = Callable[[torch.Tensor, Terms], torch.Tensor]
"""The product to what is stored, before it is rounded."""
Store = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(sums, out) to what is returned; writes out."""

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
"""What the GEMMs made here say of themselves."""
BATCHED = dataclasses.replace(DENSE, ops=("bmm", "baddbmm"))
INT8 = dataclasses.replace(DENSE, ops=("int_mm",), dtypes=("int8",))
SCALED = dataclasses.replace(DENSE, ops=("scaled_mm",), dtypes=("float8_e4m3fn",), scales=SCALES)
ALL_OPS = dataclasses.replace(SCALED, ops=OPS, dtypes=(*(DENSE.dtypes or ()), "int8", "float8_e4m3fn"))


def finished(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    """alpha · acc + beta · inp, or scale_a · scale_b · acc; inp is not read where beta is 0."""
    if terms.scale_a is not None and terms.scale_b is not None:
        acc = acc * (terms.scale_a * terms.scale_b)
    if terms.alpha != 1:
        acc = acc * terms.alpha
    if terms.inp is not None and terms.beta != 0:
        acc = acc + terms.inp.to(acc.dtype) * terms.beta
    return acc


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float32, but float64 for float64; and for int8, whose sums it holds exactly."""
    return torch.float64 if dtype in (torch.float64, torch.int8) else torch.float32


def _as_given(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a, b


def _stored(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(acc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """All operations of torch's signatures: read, multiply in the accumulator's dtype, finish, round once, store."""

    gemm_traits: Traits = field(default=DENSE)
    read: Read = _as_given
    product: Product = torch.matmul
    finish: Finish = finished
    store: Store = _stored

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """a[M, K] @ b[K, N]."""
        return self._run(a, b, out=out)

    def bmm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """a[B, M, K] @ b[B, K, N]."""
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
        """alpha · a[M, K] @ b[K, N] + beta · inp."""
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
        """alpha · a[B, M, K] @ b[B, K, N] + beta · inp."""
        return self._run(a, b, inp=inp, alpha=alpha, beta=beta, out=out)

    def int_mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """a[M, K] @ b[K, N], int8 to int32."""
        return self._run(a, b, out=out, dtype=torch.int32)

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
        """scale_a · scale_b · (a[M, K] @ b[K, N]), 8-bit floats to ``out_dtype``."""
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
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        work = accumulator(a.dtype)
        read_a, read_b = self.read(a, b)
        terms = Terms(
            a=read_a.to(work), b=read_b.to(work), inp=inp, alpha=alpha, beta=beta, scale_a=scale_a, scale_b=scale_b
        )  # fmt: skip
        acc = self.finish(self.product(terms.a, terms.b), terms)
        if out is None:
            out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype or a.dtype, device=a.device)
        return self.store(acc, out)
