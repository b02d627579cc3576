"""Parts of grouped products whose rows are picked by an index, gated, or weighted and added up by token."""

import math
from dataclasses import replace

import torch

from ..problem import Epilogue, Layout, Problem
from ..problem.grouped_compositions import GATES
from ..problem.trace import trace
from .bounds import Claims
from .operands import Operands
from .propagate import Approximate, propagate, rounded
from .reference import Region


def grouped_problem(problem: Problem) -> Problem:
    """Return the plain product, with contiguous rows and all columns of b, within one of picked, gated or added rows."""
    dtype = problem.dtype
    a = problem.a if problem.rows is None else Layout.contiguous((problem.m, problem.k), dtype)
    out = Layout.contiguous((problem.m, problem.b.size[-1]), dtype)
    return replace(problem, op="grouped_mm", a=a, out=out, rows=None, slots=None, weights=None, gated="", epilogue=None)


def by_steps(problem: Problem, claims: Claims) -> Claims:
    """Return the claims of a product whose gating, weighting and adding are steps of their own, each rounded to the dtype of a."""
    if problem.weights is not None:
        return replace(claims, partials=problem.dtype, splits=claims.splits + 1)
    return replace(claims, epilogue_input=problem.dtype) if problem.gated else claims


def rows_of(problem: Problem, operands: Operands, region: Region) -> Region:
    """Return the sorted rows and columns of the product from which a region of the result is made."""
    rows, cols = region.rows, region.cols
    if rows is not None and problem.weights is not None:
        rows = _rows_of_tokens(problem, operands, rows).flatten().sort().values
    if cols is not None and problem.gated:
        cols = torch.cat([cols, cols + problem.n])
    return Region(rows=rows, cols=cols)


def added_up(
    problem: Problem, operands: Operands, region: Region, value: torch.Tensor, magnitude: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Σ_c weights[t, c] · row of slot t · C + c, and the same sum of magnitudes, for the tokens of a region.

    ``value`` and ``magnitude`` [1, rows, N] belong to the rows of ``rows_of``. A row of no group, whose magnitude is NaN,
    counts as 0.
    """
    assert operands.weights is not None
    weights = operands.weights.double() if region.rows is None else operands.weights.double()[region.rows]
    everything = torch.arange(weights.shape[0], device=weights.device) if region.rows is None else region.rows
    wanted = _rows_of_tokens(problem, operands, everything).flatten()
    place = torch.empty(problem.m, dtype=torch.long, device=wanted.device)
    place[wanted.sort().values] = torch.arange(len(wanted), device=wanted.device)
    absent = magnitude.isnan()
    parts = [x.masked_fill(absent, 0)[0, place[wanted]].view(*weights.shape, -1) for x in (value, magnitude)]
    total, above = parts[0] * weights.unsqueeze(-1), parts[1] * weights.abs().unsqueeze(-1)
    return total.sum(dim=1).unsqueeze(0), above.nan_to_num(nan=math.inf, posinf=math.inf).sum(dim=1).unsqueeze(0)


def _rows_of_tokens(problem: Problem, operands: Operands, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows of the product that are added up for these tokens, [tokens, C]."""
    assert operands.slots is not None
    assert problem.weights is not None
    row_of_slot = torch.empty(problem.m, dtype=torch.long, device=tokens.device)
    row_of_slot[operands.slots.long()] = torch.arange(problem.m, device=tokens.device)
    return row_of_slot.view(problem.weights.size)[tokens]


def gate_of(name: str) -> Epilogue:
    """Return the epilogue act(acc) · x0, with the gates as ``acc`` and the other half of the columns as ``x0``."""
    act = GATES[name]
    return trace(lambda acc, other: act(acc) * other, torch.float32, [torch.empty((), device="meta")])


def gated(problem: Problem, product: Approximate, *, held: torch.dtype, flush: bool) -> Approximate:
    """Return act(gates) · the other half of the columns of a product, where both halves are rounded to ``held`` first."""
    halves = (Approximate(value=x, error=e) for x, e in zip(product.value.chunk(2, -1), product.error.chunk(2, -1), strict=True))
    gates, others = (rounded(x, held, flush=flush) for x in halves)
    return propagate(gate_of(problem.gated), gates, [others], precision=held, flush=flush, reference_is_float64=False)
