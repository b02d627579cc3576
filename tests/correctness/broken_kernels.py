"""GEMM kernels in plain torch, right ones in several orders of summation and ones broken on purpose, and choices made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gemmtune.choice import Choice, Claims, Kernel
from gemmtune.problem import Problem
from gemmtune.problem.epilogue import evaluate

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(a, b) in the accumulator's dtype to the accumulator."""
CPU = torch.device("cpu")


def claims_of(dtype: torch.dtype, **changes: Any) -> Claims:
    """The strictest claims for inputs of ``dtype``, with changes."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return Claims(**({"accumulate": accumulator, "partials": accumulator, "epilogue_input": accumulator} | changes))


@dataclass(frozen=True, kw_only=True)
class MadeChoice(Choice):
    """A choice that is one Python function."""

    run: Callable[..., None]
    run_new: Callable[..., torch.Tensor] | None = None
    packing: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def content_hash(self) -> str:
        return self.name

    def build(self) -> Kernel:
        return Kernel(run=self.run, run_new=self.run_new)

    @property
    def packed_format(self) -> str | None:
        return None if self.packing is None else "made"

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        assert self.packing is not None
        return self.packing(b)


def choice_of(problem: Problem, run: Callable[..., None], claims: Claims | None = None, **fields: Any) -> MadeChoice:
    """A choice that runs ``run``."""
    return MadeChoice(
        name="made:choice", backend="made", problem=problem, claims=claims or claims_of(problem.dtype), run=run, **fields
    )


def kernel(problem: Problem, product: Product = torch.matmul) -> Callable[..., None]:
    """A right kernel around ``product``: alpha, beta, epilogue in the accumulator's dtype, one rounding at the end."""

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        acc = product(a.to(problem.accumulator), b.to(problem.accumulator))
        if alpha != 1:
            acc = acc * alpha
        if inp is not None and beta != 0:
            acc = acc + inp.to(acc.dtype) * beta
        out.copy_(acc if problem.epilogue is None else evaluate(problem.epilogue, acc, extra))

    return run


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rounded after each of K additions."""
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    for k in range(a.shape[-1]):
        acc = acc + a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return acc


def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same, from the last to the first."""
    return one_by_one(a.flip(-1), b.flip(-2))


def pairwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As a tree."""
    k = a.shape[-1]
    return (
        one_by_one(a, b)
        if k < 3
        else pairwise(a[..., : k // 2], b[..., : k // 2, :]) + pairwise(a[..., k // 2 :], b[..., k // 2 :, :])
    )


def shuffled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One by one in a random order."""
    order = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(5))
    return one_by_one(a[..., order], b[..., order, :])


def blocks(a: torch.Tensor, b: torch.Tensor, size: int = 16) -> list[torch.Tensor]:
    """The products of blocks along K."""
    return [a[..., k : k + size] @ b[..., k : k + size, :] for k in range(0, a.shape[-1], size)]


def rounding_blocks(dtype: torch.dtype) -> Product:
    """An accumulator of ``dtype``, rounded after each block of 16."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=dtype)
        for block in blocks(a, b):
            acc = (acc.to(a.dtype) + block).to(dtype)
        return acc.to(a.dtype)

    return product


def split_k(dtype: torch.dtype, splits: int = 2) -> Product:
    """Split-K with partial sums stored as ``dtype``."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = blocks(a, b, -(-a.shape[-1] // splits))
        return torch.stack([part.to(dtype).to(a.dtype) for part in parts]).sum(dim=0)

    return product


def tensor_core(bits: int, *, promoted_every: int | None = None, width: int = 32) -> Product:
    """A matrix unit as of an NVIDIA GPU: ``width`` products and the sum so far, each cut off to ``bits`` significand bits of the
    largest of them, then added exactly. Every ``promoted_every`` elements of K the sum goes into a float32 one."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
        acc = torch.zeros_like(total, dtype=torch.float64)
        for k in range(0, a.shape[-1], width):
            terms = a[..., k : k + width].double().unsqueeze(-1) * b[..., k : k + width, :].double().unsqueeze(-3)
            terms = torch.cat([acc.unsqueeze(-2), terms], dim=-2)
            largest = torch.frexp(terms.abs().amax(dim=-2, keepdim=True)).exponent
            unit = torch.exp2((largest - bits).double())
            acc = ((terms / unit).trunc() * unit).sum(dim=-2)
            if promoted_every is not None and (k + width) % promoted_every == 0:
                total, acc = total + acc.float(), torch.zeros_like(acc)
        return total + acc.float()

    return product


def narrowed(which: str, dtype: torch.dtype) -> Product:
    """An input read as ``dtype``."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(dtype).to(a.dtype) if which == "a" else a) @ (b.to(dtype).to(b.dtype) if which == "b" else b)

    return product


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 cut off to tf32's 11 significand bits."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of inputs cut off to tf32."""
    return to_tf32(a) @ to_tf32(b)
