"""Grouped products in plain torch with the public signatures, made of steps that a mutant replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemmtune.declaration.labels import FLOAT8, GATES, GROUPED, INDEX_DTYPES, NARROW_FLOATS, SCALES
from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits
from gemmtune.numerics.quantized import numbers
from gemmtune.problem.grouped_compositions import GATES as FUNCTIONS
from gemmtune.problem.grouped_compositions import spans
from gemmtune.problem.operations import Encoding

Tensor = torch.Tensor
TRAITS = Traits(
    ops=GROUPED, dtypes=(*NARROW_FLOATS, *FLOAT8), layouts=tuple(KINDS), out=True, scales=SCALES, scale_dtypes=NARROW_FLOATS,
    weights=("int8", "uint8", "int4", "uint4"), float8_pairs=True, results=NARROW_FLOATS, gates=GATES, index_dtypes=INDEX_DTYPES,
    deterministic=True, threads=True,
)  # fmt: skip


def spread(scale: Tensor, size: int, dim: int) -> Tensor:
    """Repeat scales over their blocks of 1, 32, 64, 128 or all lines along ``dim``."""
    count = scale.shape[dim]
    block = next((x for x in (1, 32, 64, 128) if -(-size // x) == count), max(size, 1))
    return scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def widened(b: Tensor, scale: Tensor, encoding: Encoding) -> Tensor:
    """Return b · scale_b [G, K, N] in float32."""
    values = numbers(b, encoding).float()
    groups, k = scale.shape[1], values.shape[1]
    return values * scale.float().repeat_interleave(k // groups, 1)


def scale_of_rows(scale: Tensor, k: int, _: list[tuple[int, int]]) -> Tensor:
    """Return scale_a for each element of a."""
    return spread(scale, k, 1)


def scale_of_matrices(scale: Tensor, k: int, n: int) -> Tensor:
    """Return scale_b for each element of b."""
    return spread(spread(scale, k, 1), n, 2)


def picked(a: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a that an index picks."""
    return a[rows.long()]


def gated(product: Tensor, gate: str) -> Tensor:
    """Return act(gates) · the other half of the columns."""
    gates, others = product.chunk(2, -1)
    return FUNCTIONS[gate](gates) * others


def added(product: Tensor, end: int, slots: Tensor, weights: Tensor) -> Tensor:
    """Return the rows before ``end``, weighted and added up by token."""
    tokens, each = weights.shape
    index = slots[:end].long()
    result = product.new_zeros((tokens, product.shape[1]))
    return result.index_add(0, index // each, product[:end] * weights.float().flatten()[index].unsqueeze(-1))


def multiplied(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
    """Return a @ b[g] for each group of rows."""
    product = a.new_zeros((a.shape[0], b.shape[-1]))
    for g, (begin, end) in enumerate(pieces):
        product[begin:end] = a[begin:end] @ b[g]
    return product


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """All grouped operations. Everything is computed in float32 and rounded once."""

    gemm_traits: Traits = TRAITS
    widen: Callable[[Tensor, Tensor, Encoding], Tensor] = widened
    scale_a: Callable[[Tensor, int, list[tuple[int, int]]], Tensor] = scale_of_rows
    scale_b: Callable[[Tensor, int, int], Tensor] = scale_of_matrices
    pick: Callable[[Tensor, Tensor], Tensor] = picked
    gate: Callable[[Tensor, str], Tensor] = gated
    add: Callable[[Tensor, int, Tensor, Tensor], Tensor] = added
    multiply: Callable[[Tensor, Tensor, list[tuple[int, int]]], Tensor] = multiplied

    def grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        *,
        rows: Tensor | None = None,
        gated: str = "",
        scatter: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a @ b[g] for each group of rows, or a[:, g] @ b[g] for a 2-D b."""
        if b.dim() == 2:
            pieces = spans(offs.tolist(), a.shape[1])
            return stored(torch.stack([a[:, s:e].float() @ b[s:e].float() for s, e in pieces]), a.dtype, out)
        x = a.float() if rows is None else self.pick(a, rows).float()
        product = self.multiply(x, b.float(), spans(offs.tolist(), x.shape[0]))
        if gated:
            product = self.gate(product, gated)
        if scatter is not None:
            product = self.add(product, int(offs[-1]), *scatter)
        return stored(product, a.dtype, out)

    def mixed_grouped_mm(
        self, a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, *, encoding: Encoding = "", out: Tensor | None = None
    ) -> Tensor:
        """Return a @ (b[g] · scale_b[g]) for narrow weights."""
        wide = self.widen(b, scale_b, encoding)
        return stored(self.multiply(a.float(), wide, spans(offs.tolist(), a.shape[0])), a.dtype, out)

    def scaled_grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return (a · scale_a) @ (b[g] · scale_b[g]) for 8-bit floats."""
        k, n = b.shape[1:]
        pieces = spans(offs.tolist(), a.shape[0])
        left, right = a.float() * self.scale_a(scale_a, k, pieces), b.float() * self.scale_b(scale_b, k, n)
        return stored(self.multiply(left, right, pieces), out_dtype, out)


every_group = Grouped()
"""The right GEMM, by name."""


def stored(product: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return the product rounded to ``dtype``, in ``out`` if that is given."""
    return product.to(dtype) if out is None else out.copy_(product)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A grouped product with one bug in an operation, and words of its diagnosis."""

    op: str
    gemm: Grouped
    diagnosis: str


def _mutant(op: str, diagnosis: str, **steps: object) -> Mutant:
    return Mutant(op=op, gemm=dataclasses.replace(Grouped(), **steps), diagnosis=diagnosis)  # type: ignore[arg-type]


def _within_groups(scale: Tensor, k: int, pieces: list[tuple[int, int]]) -> Tensor:
    moved = scale.clone()
    for begin, end in pieces:
        moved[begin:end] = scale[: end - begin]
    return spread(moved, k, 1)


def _scale_of_the_next_block(b: Tensor, scale: Tensor, encoding: Encoding) -> Tensor:
    return widened(b, scale.roll(-1, 1), encoding)


def _ignoring_slots(product: Tensor, end: int, slots: Tensor, weights: Tensor) -> Tensor:
    return added(product, end, torch.arange(len(slots)), weights)


def _weights_by_row(product: Tensor, end: int, slots: Tensor, weights: Tensor) -> Tensor:
    by_row = weights.flatten().clone()
    by_row[slots.long()] = weights.flatten()
    return added(product, end, slots, by_row.view_as(weights))


def _first_of_each_token(product: Tensor, end: int, slots: Tensor, weights: Tensor) -> Tensor:
    alone = weights.clone()
    alone[:, 1:] = 0
    return added(product, end, slots, alone)


def _k_tail_dropped(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
    k = a.shape[1] // 16 * 16 or a.shape[1]
    return multiplied(a[:, :k], b[:, :k], pieces)


def _halves_of_16_bits(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
    half = a.shape[1] // 2
    first, second = (multiplied(a[:, part], b[:, part], pieces) for part in (slice(half), slice(half, None)))
    return first.bfloat16().float() + second.bfloat16().float()


MUTANTS = (
    _mutant(
        "mixed_grouped_mm", "scale_b of the group before", widen=lambda b, scale, encoding: widened(b, scale.roll(1, 0), encoding)
    ),
    _mutant("mixed_grouped_mm", "scale_b of the next block along K", widen=_scale_of_the_next_block),
    _mutant(
        "mixed_grouped_mm", "low and high four bits exchanged",
        widen=lambda b, scale, encoding: widened((b << 4) | (b >> 4) if encoding else b, scale, encoding),
    ),
    _mutant(
        "mixed_grouped_mm", "b read as unsigned integers",
        widen=lambda b, scale, encoding: widened(b, scale, "uint4" if encoding else ""),
    ),
    _mutant("mixed_grouped_mm", "last K block of 1 dropped", multiply=_k_tail_dropped),
    _mutant("scaled_grouped_mm", "scale_a of the row's number within its group", scale_a=_within_groups),
    _mutant("scaled_grouped_mm", "scale_b of the first group used for all", scale_b=lambda x, k, n: scale_of_matrices(x[:1], k, n)),
    _mutant("scaled_grouped_mm", "scale_a of the first block used all along K", scale_a=lambda x, k, _: x[:, :1].expand(-1, k)),
    _mutant("scaled_grouped_mm", "bfloat16 partial sums", multiply=_halves_of_16_bits),
    _mutant("routed_grouped_mm", "row r of a used in place of row rows[r]", pick=lambda a, x: a[torch.arange(len(x)) % len(a)]),
    _mutant("routed_grouped_mm", "rows of the index one place late", pick=lambda a, rows: picked(a, rows.roll(1))),
    _mutant("routed_grouped_mm", "gates and the other columns exchanged", gate=lambda x, f: gated(x.roll(x.shape[1] // 2, 1), f)),
    _mutant("routed_grouped_mm", "gates by gelu for silu", gate=lambda x, gate: gated(x, {"silu": "gelu"}.get(gate, gate))),
    _mutant("combined_grouped_mm", "weights dropped", add=lambda x, end, slots, w: added(x, end, slots, torch.ones_like(w))),
    _mutant("combined_grouped_mm", "weights read as bfloat16", add=lambda x, end, slots, w: added(x, end, slots, w.bfloat16())),
    _mutant("combined_grouped_mm", "weights in the order of rows", add=_weights_by_row),
    _mutant("combined_grouped_mm", "rows added in their own order", add=_ignoring_slots),
    _mutant("combined_grouped_mm", "only the first row of each token counts", add=_first_of_each_token),
    _mutant(
        "combined_grouped_mm", "rows behind the last group taken for its own",
        add=lambda x, _, slots, weights: added(x, len(x), slots, weights),
        multiply=lambda a, b, pieces: multiplied(a, b, [*pieces[:-1], (pieces[-1][0], len(a))]),
    ),
)  # fmt: skip
