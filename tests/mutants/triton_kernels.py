"""Mutants as real kernels: one matrix product in Triton whose faults are switched on at compile time.

They do what plain torch cannot: access memory out of bounds, overflow offsets in the hardware's integers, race between programs.
Run them only in a process that may crash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.traits import Traits

__all__ = [
    "BLOCKS",
    "TritonGemm",
    "element_unwritten",
    "float16_accumulation",
    "k_tail_dropped",
    "k_tail_unmasked",
    "last_row_clamped",
    "offsets_of_32_bits",
    "partials_in_the_result_type",
    "product",
    "race",
    "right",
    "rows_written_past_the_end",
    "split_in_2",
    "wrong_stream",
]

BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    a, b, out, M, N, K, k_per_split,
    a_row, a_col, b_row, b_col, out_split, out_row, out_col,
    FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[split, M, N] = a[M, part of K] @ b[part of K, N]. The grid is (tiles along M, tiles along N, splits)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if FAULT != "offsets_of_32_bits":
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
    first = tl.program_id(2) * k_per_split
    last = min(K, first + k_per_split)
    end = first + (last - first) // BLOCK_K * BLOCK_K if FAULT == "k_tail_dropped" else last
    read_rows = tl.minimum(rows, max(M - 2, 0)) if FAULT == "last_row_clamped" else rows
    sum_type: tl.constexpr = tl.float16 if FAULT == "float16_accumulation" else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=sum_type)
    for k0 in range(first, end, BLOCK_K):
        ks = k0 + tl.arange(0, BLOCK_K)
        if FAULT != "offsets_of_32_bits":
            ks = ks.to(tl.int64)
        k_mask = ks < (K + BLOCK_K if FAULT == "k_tail_unmasked" else last)
        x = tl.load(a + read_rows[:, None] * a_row + ks[None, :] * a_col, mask=(rows[:, None] < M) & k_mask[None, :], other=0)
        y = tl.load(b + ks[:, None] * b_row + cols[None, :] * b_col, mask=k_mask[:, None] & (cols[None, :] < N), other=0)
        acc = tl.dot(x, y, acc, input_precision="ieee", out_dtype=sum_type)
    place = out + rows[:, None] * out_row + cols[None, :] * out_col
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    if FAULT == "rows_written_past_the_end":
        mask = (rows[:, None] < tl.cdiv(M, BLOCK_M) * BLOCK_M) & (cols[None, :] < N)
    if FAULT == "element_unwritten":
        mask = mask & ((rows[:, None] != M - 1) | (cols[None, :] != N - 1))
    if FAULT == "race":
        acc += tl.load(place, mask=mask, other=0)
    else:
        place += tl.program_id(2).to(tl.int64) * out_split
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonGemm:
    """``product`` with a fault and a number of splits, whose sums go through a workspace of dtype ``partials``."""

    fault: str = "none"
    splits: int = 1
    partials: torch.dtype = torch.float32
    aside: bool = False
    """Launches on another stream, without any synchronisation."""
    gemm_traits: Traits

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a (M, K) @ b (K, N)."""
        if out is None:
            out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        if not self.aside or a.device.type != "cuda":
            return self._run(a, b, out)
        with torch.cuda.stream(torch.cuda.Stream(a.device)):  # type: ignore[no-untyped-call]
            return self._run(a, b, out)

    def _run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.splits == 1:
            self._launch(a, b, out.unsqueeze(0))
            return out
        slots = 1 if self.fault == "race" else self.splits
        workspace = torch.zeros((slots, *out.shape), dtype=self.partials, device=a.device)
        self._launch(a, b, workspace)
        return out.copy_(workspace.float().sum(dim=0))

    def _launch(self, a: torch.Tensor, b: torch.Tensor, target: torch.Tensor) -> None:
        (m, k), n = a.shape, b.shape[1]
        if m == 0 or n == 0:
            return
        grid = (triton.cdiv(m, BLOCKS["BLOCK_M"]), triton.cdiv(n, BLOCKS["BLOCK_N"]), self.splits)
        strides = (*a.stride(), *b.stride(), *target.stride())
        product[grid](a, b, target, m, n, k, triton.cdiv(k, self.splits), *strides, FAULT=self.fault, **BLOCKS)


DENSE = Traits(
    ops=("mm",), dtypes=("float32", "float16", "bfloat16"), layouts=tuple(KINDS), out=True, empty=True, streams=True, threads=True
)
FLOAT16 = DENSE.changed({"dtypes": ("float16",)})

right = TritonGemm(gemm_traits=DENSE)
split_in_2 = TritonGemm(gemm_traits=DENSE.changed({"splits": 2}), splits=2)
k_tail_dropped = TritonGemm(gemm_traits=DENSE, fault="k_tail_dropped")
last_row_clamped = TritonGemm(gemm_traits=DENSE, fault="last_row_clamped")
float16_accumulation = TritonGemm(gemm_traits=FLOAT16, fault="float16_accumulation")
partials_in_the_result_type = TritonGemm(gemm_traits=FLOAT16, splits=2, partials=torch.float16)
rows_written_past_the_end = TritonGemm(gemm_traits=DENSE, fault="rows_written_past_the_end")
element_unwritten = TritonGemm(gemm_traits=DENSE, fault="element_unwritten")
offsets_of_32_bits = TritonGemm(gemm_traits=DENSE, fault="offsets_of_32_bits")
wrong_stream = TritonGemm(gemm_traits=DENSE, aside=True)
k_tail_unmasked = TritonGemm(gemm_traits=DENSE, fault="k_tail_unmasked")
race = TritonGemm(gemm_traits=DENSE, fault="race", splits=2)
"""Two splits add to one workspace, and each may read it before the other one has written."""
