"""Mutants that sum wrongly: dropped parts of K, too few bits in between, races."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import torch

from .gemm import ALL_OPS, DENSE, INT8, SCALED, Gemm, Terms, apply_epilogue
from .products import Product, blocks, narrowed, rounding_blocks, split_k, tf32

__all__ = [
    "alpha_before_the_last_split",
    "b_read_as_bfloat16",
    "b_read_as_float8",
    "bfloat16_accumulation",
    "bias_added_by_every_split",
    "blocks_of_zeros_skipped",
    "eight_partials_in_the_result_type",
    "first_k_block_dropped",
    "float16_accumulation",
    "float64_read_as_float32",
    "inputs_read_as_tf32",
    "int8_read_as_unsigned",
    "k_tail_dropped",
    "last_k_block_dropped",
    "last_term_dropped_for_few_rows",
    "last_term_dropped_past_8191",
    "partial_sum_lost_sometimes",
    "partial_sum_twice_sometimes",
    "partials_in_the_result_type",
    "ranges_of_zeros_skipped",
    "remainder_of_the_splits_dropped",
    "rows_of_zeros_skipped",
    "scale_before_the_last_split",
    "splits_reach_into_the_next",
    "wrong_at_the_first_call",
    "wrong_once_in_sixty",
    "zeros_skipped",
]

BLOCK = 32
"""Elements of a block along K."""
FEW_ROWS, TILE_ROWS = 16, 8
SOMETIMES = 4
"""Average number of calls for one faulty one."""


def _of_dtype(dtype: str) -> Gemm:
    return Gemm(gemm_traits=dataclasses.replace(DENSE, dtypes=(dtype,)))


def _over_k(keep: Callable[[int], slice]) -> Product:
    """Return a product over a part of K, which ``keep`` selects by K's length."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        part = keep(a.shape[-1])
        return a[..., part] @ b[..., part, :]

    return product


last_k_block_dropped = Gemm(gemm_traits=ALL_OPS, product=_over_k(lambda k: slice(0, max(0, k - 1) // BLOCK * BLOCK)))
"""The loop ends one block early."""
k_tail_dropped = Gemm(gemm_traits=ALL_OPS, product=_over_k(lambda k: slice(0, k // BLOCK * BLOCK)))
"""The loop runs over K / BLOCK whole blocks and drops the remainder."""
first_k_block_dropped = Gemm(product=_over_k(lambda k: slice(BLOCK if k > BLOCK else 0, k)))
"""The first stage of a pipeline is overwritten before its use."""
remainder_of_the_splits_dropped = Gemm(product=_over_k(lambda k: slice(0, k // 3 * 3 if k >= 512 else k)))
"""Three splits of K / 3 elements each, for long K only."""

float16_accumulation = dataclasses.replace(_of_dtype("float16"), product=rounding_blocks(torch.float16))
"""Undeclared float16 accumulation."""
bfloat16_accumulation = dataclasses.replace(_of_dtype("bfloat16"), product=rounding_blocks(torch.bfloat16))

partials_in_the_result_type = dataclasses.replace(_of_dtype("float16"), product=split_k(torch.float16, 2))
"""Two splits, whose sums go through memory as float16, undeclared."""
eight_partials_in_the_result_type = dataclasses.replace(_of_dtype("bfloat16"), product=split_k(torch.bfloat16, 8))


b_read_as_bfloat16 = Gemm(
    gemm_traits=dataclasses.replace(DENSE, dtypes=("float32", "float16")), product=narrowed("b", torch.bfloat16)
)
inputs_read_as_tf32 = dataclasses.replace(_of_dtype("float32"), product=tf32)
"""Undeclared tf32, independent of torch's setting."""
b_read_as_float8 = dataclasses.replace(_of_dtype("bfloat16"), product=narrowed("b", torch.float8_e5m2))
float64_read_as_float32 = dataclasses.replace(_of_dtype("float64"), product=narrowed("ab", torch.float32))


def _reaching(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[-1]
    each = -(-k // 4)
    ends = [min(begin + -(-each // BLOCK) * BLOCK, k) for begin in range(0, k, max(each, 1))]
    parts = [a[..., i * each : end] @ b[..., i * each : end, :] for i, end in enumerate(ends)]
    return torch.stack(parts).sum(0) if a.shape[-2] <= FEW_ROWS and k >= 4 * BLOCK else a @ b


splits_reach_into_the_next = Gemm(product=_reaching)
"""Four splits of K for few rows are rounded up to whole blocks, and masked by K alone."""


def _as_unsigned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a.view(torch.uint8).double(), b


int8_read_as_unsigned = Gemm(gemm_traits=INT8, read=_as_unsigned)
"""The sign extension of a is missing."""


def _skipping_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with 0 · x taken for 0, even if x is NaN or infinite."""
    if bool(b.isfinite().all()):
        return a @ b
    terms = (a[..., :, k : k + 1] * b[..., k : k + 1, :] for k in range(a.shape[-1]))
    zeros = (a[..., :, k : k + 1] == 0 for k in range(a.shape[-1]))
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for term, zero in zip(terms, zeros, strict=True):
        acc = acc + torch.where(zero, 0.0, term)
    return acc


zeros_skipped = Gemm(product=_skipping_zeros)


def _skipping_rows_of_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((a == 0).all(-1, keepdim=True), 0.0, a @ b)


def _skipping_blocks_of_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product without blocks of BLOCK / 2 along K whose first 16 rows of a are all zero."""
    acc = a @ b
    for k in range(0, a.shape[-1], BLOCK // 2):
        part = slice(k, k + BLOCK // 2)
        if not bool(a[..., :16, part].any()):
            kept = torch.cat([torch.arange(0, k), torch.arange(min(k + BLOCK // 2, a.shape[-1]), a.shape[-1])])
            acc[..., :16, :] = a[..., :16, kept] @ b[..., kept, :]
    return acc


def _skipping_ranges_of_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product without those elements of K for which all of b is zero."""
    kept = b.ne(0).any(-1)
    kept = kept.any(0) if kept.dim() > 1 else kept
    return a[..., kept] @ b[..., kept, :]


rows_of_zeros_skipped = Gemm(product=_skipping_rows_of_zeros)
blocks_of_zeros_skipped = Gemm(product=_skipping_blocks_of_zeros)
ranges_of_zeros_skipped = Gemm(product=_skipping_ranges_of_zeros)
"""Right for finite numbers, and a good idea if declared."""


def _for_few_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    few = TILE_ROWS < a.shape[-2] < FEW_ROWS - 1
    return a[..., :-1] @ b[..., :-1, :] if few else a @ b


last_term_dropped_for_few_rows = Gemm(product=_for_few_rows)
"""The kernel for 9 to 14 rows is wrong. None of these sizes is at the edge of a tile."""
last_term_dropped_past_8191 = Gemm(product=_over_k(lambda k: slice(0, k - 1 if k > 8191 else k)))
"""A counter has only 13 bits."""


class _OnceInSixty:
    """Product that drops the last term in one call of sixty."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        k = a.shape[-1] - (next(self._calls) % 60 == 0)
        return a[..., :k] @ b[..., :k, :]


wrong_once_in_sixty = Gemm(product=_OnceInSixty())


class _FirstCall:
    """Product whose first call for a pair of sizes adds to an uncleared workspace."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        key = (a.shape, b.shape, a.dtype)
        first = key not in self._seen
        self._seen.add(key)
        return a @ b + 3.0 * first


wrong_at_the_first_call = Gemm(product=_FirstCall())


def _halves(terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of two splits along K. The second one is zero if there is only one block."""
    half = max(1, -(-terms.a.shape[-1] // 2))
    first, *others = blocks(terms.a, terms.b, half)
    return first, others[0] if others else torch.zeros_like(first)


def _alpha_early(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    first, last = _halves(terms)
    return apply_epilogue(first, terms) + last


def _bias_twice(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    return apply_epilogue(acc, dataclasses.replace(terms, beta=2 * terms.beta) if terms.a.shape[-1] > BLOCK else terms)


alpha_before_the_last_split = Gemm(epilogue=_alpha_early)
"""The first split's sum is multiplied by alpha before the second one's is added."""
scale_before_the_last_split = Gemm(gemm_traits=SCALED, epilogue=_alpha_early)
bias_added_by_every_split = Gemm(epilogue=_bias_twice)
"""Two splits, for K above one block, both add the bias."""


class _Racing:
    """Product of four splits that add to one sum without synchronisation. In some calls, one of them counts ``times`` times."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._calls = itertools.count()

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = blocks(a, b, max(1, -(-a.shape[-1] // 4)))
        chance = random.Random(next(self._calls))  # each run of a case hits other calls
        if len(parts) > 1 and chance.randrange(SOMETIMES) == 0:
            hit = chance.randrange(len(parts))
            parts[hit : hit + 1] = [parts[hit]] * self._times
        return torch.stack(parts).sum(dim=0)


partial_sum_lost_sometimes = Gemm(product=_Racing(0))
partial_sum_twice_sometimes = Gemm(product=_Racing(2))
