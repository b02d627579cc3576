"""Block-sparse products as operators of torch. They take the parts of a weight, because Dynamo traces no sparse_bsr tensors.

``torch.ops.gemmtune.bsr_mm(crow, col, values, x)`` is ``bsr_mm`` of the weight [M, K] with these parts: M = (len(crow) − 1) · block
rows, and K is the number of rows of ``x``. ``bsr_addmm(inp, crow, col, values, x, *, beta, alpha)`` is ``bsr_addmm``.
``bsr_linear(x, crow, col, values, bias)`` is ``torch.nn.functional.linear``, with row-major x and result. These have gradients.
``bsr_sampled(crow, col, g, x, block_m, block_k)`` returns the blocks of g @ xᵀ that exist.

``operators/`` makes the other operators from the table of operations. They have one tensor for each operand of a row, and its shape
gives the sizes. Here one operand is three tensors, the sizes follow from their lengths and block sides, and three of the five
operators have no row.
"""

# ruff: noqa: ARG001 - a fake result has the arguments of its operator

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..dispatch.freshness import Stamp
from ..dispatch.prepack import PackedOperand
from ..numerics.block_sparse import assembled
from ..operators.schema import NAMESPACE
from ..problem.operations import OPERATIONS
from .gradients import transposed
from .products import linear, multiplied
from .sampled import sampled_blocks
from .weights import declare, sparsity_of

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Weight:
    """A kept weight, with its index tensors and their stamp."""

    crow: ReferenceType[Tensor]
    col: ReferenceType[Tensor]
    indices: Stamp
    packed: PackedOperand


_weights: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Kept weights by their tensor of values, so that indices are read and packed copies are made once."""


def weight_of(crow: Tensor, col: Tensor, values: Tensor, columns: int) -> PackedOperand:
    """Return the weight with these parts. It shares the memory of ``values`` and is kept as long as that tensor.

    Changes are read off ``values``, because operators run below autograd, where a sparse tensor that aliases it shows no change.
    """
    known: _Weight | None = _weights.get(values)  # type: ignore[no-untyped-call]
    same = known is not None and known.crow() is crow and known.col() is col and known.indices.holds((crow, col))
    if known is None or not same or not _fits(known.packed.tensor, values, columns):
        size = ((len(crow) - 1) * values.shape[1], columns)
        indices = Stamp.of((crow, col))
        weight = assembled(crow.detach(), col.detach(), values.detach(), size)
        declare(weight, sparsity_of("bsr_mm", weight))
        known = _weights[values] = _Weight(ref(crow), ref(col), indices, PackedOperand(weight, sources=(values,)))
    return known.packed


def _fits(weight: Tensor, values: Tensor, columns: int) -> bool:
    """Return True if the weight has this number of columns and the memory of ``values``, which ``values.data = …`` replaces."""
    return weight.shape[1] == columns and weight.values().data_ptr() == values.data_ptr()


BODIES: dict[str, Callable[..., Tensor]] = {}
"""Python function of each operator, for modes that watch its parts: torch's modes see no call below an operator."""


def _operator(body: Callable[..., Tensor]) -> CustomOpDef:
    BODIES[body.__name__] = body
    return torch.library.custom_op(f"{NAMESPACE}::{body.__name__}", mutates_args=())(body)


@_operator
def bsr_mm(crow: Tensor, col: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """Return bsr @ x."""
    return multiplied("bsr_mm", weight_of(crow, col, values, x.shape[0]), x)


@_operator
def bsr_addmm(
    inp: Tensor, crow: Tensor, col: Tensor, values: Tensor, x: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta · inp + alpha · bsr @ x."""
    weight = weight_of(crow, col, values, x.shape[0])
    return multiplied("bsr_addmm", weight, x, inp, (alpha, beta))


@_operator
def bsr_linear(x: Tensor, crow: Tensor, col: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ bsrᵀ + bias for x [..., K]."""
    return linear(x, weight_of(crow, col, values, x.shape[-1]), bias)


@_operator
def bsr_sampled(crow: Tensor, col: Tensor, g: Tensor, x: Tensor, block_m: int, block_k: int) -> Tensor:
    """Return the blocks of g [M, N] @ xᵀ [N, K] that exist: [blocks, block_m, block_k]."""
    return sampled_blocks(crow, col, g, x, (block_m, block_k))


@_operator
def bsr_transposed_mm(crow: Tensor, col: Tensor, values: Tensor, g: Tensor, columns: int) -> Tensor:
    """Return bsrᵀ @ g, for a weight of ``columns`` columns."""
    return multiplied("bsr_mm", transposed(weight_of(crow, col, values, columns).tensor), g)


@bsr_mm.register_fake
def _(crow: Tensor, col: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(_rows(crow, values), x.shape[1], dtype=OPERATIONS["bsr_mm"].result_dtype(values.dtype, epilogue=False))


@bsr_addmm.register_fake
def _(inp: Tensor, crow: Tensor, col: Tensor, values: Tensor, x: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    return x.new_empty(_rows(crow, values), x.shape[1])


@bsr_linear.register_fake
def _(x: Tensor, crow: Tensor, col: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], _rows(crow, values))


@bsr_sampled.register_fake
def _(crow: Tensor, col: Tensor, g: Tensor, x: Tensor, block_m: int, block_k: int) -> Tensor:
    return g.new_empty(col.shape[0], block_m, block_k)


@bsr_transposed_mm.register_fake
def _(crow: Tensor, col: Tensor, values: Tensor, g: Tensor, columns: int) -> Tensor:
    return g.new_empty(columns, g.shape[1])


def _rows(crow: Tensor, values: Tensor) -> Any:
    return (crow.shape[0] - 1) * values.shape[1]


def _kept(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Mapping[str, float] = MappingProxyType({})
) -> None:
    *inp, crow, col, values, x = inputs
    ctx.shape = inp[0].shape if inp else None
    ctx.numbers = keyword_only_inputs.get("alpha", 1.0), keyword_only_inputs.get("beta", 1.0)
    ctx.save_for_backward(crow, col, values, x)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (crow, col, values, x), (alpha, beta) = ctx.saved_tensors, ctx.numbers
    *wants_inp, _, _, wants_values, wants_x = ctx.needs_input_grad
    g_inp = [(g * beta).sum_to_size(ctx.shape) if wanted else None for wanted in wants_inp]
    scaled = g if alpha == 1 else g * alpha
    g_values = bsr_sampled(crow, col, scaled, x, values.shape[1], values.shape[2]) if wants_values else None
    g_x = bsr_transposed_mm(crow, col, values, scaled, x.shape[0]) if wants_x else None
    return (*g_inp, None, None, g_values, g_x)


def _kept_of_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, crow, col, values, *_ = inputs  # torch 2.11 leaves a default out
    ctx.save_for_backward(x, crow, col, values)


def _gradients_of_linear(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, crow, col, values = ctx.saved_tensors
    wants_x, _, _, wants_values, *wants_bias = ctx.needs_input_grad
    count = x.shape[:-1].numel()
    columns, rows = g.reshape(count, g.shape[-1]).t(), x.reshape(count, x.shape[-1])
    g_x = bsr_transposed_mm(crow, col, values, columns, x.shape[-1]).t().reshape(x.shape) if wants_x else None
    g_values = bsr_sampled(crow, col, columns, rows.t(), values.shape[1], values.shape[2]) if wants_values else None
    return g_x, None, None, g_values, *(columns.sum(dim=1) if wanted else None for wanted in wants_bias)


bsr_linear.register_autograd(_gradients_of_linear, setup_context=_kept_of_linear)
bsr_mm.register_autograd(_gradients, setup_context=_kept)
bsr_addmm.register_autograd(_gradients, setup_context=_kept)
