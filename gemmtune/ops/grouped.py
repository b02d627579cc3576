"""Grouped products: several products of different sizes in one call, as in mixtures of experts."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..declaration.traits import gemm
from ..dispatch.arguments import call_of, transposed_operand
from ..dispatch.checks import check_tensors
from ..dispatch.grouped import Form, form_of
from ..dispatch.keys import NOTHING
from ..dispatch.statement import check_composed
from ..errors import InvalidProblemError
from ..operand_kinds import Encoding, Gate
from ..problem.grouped_compositions import added_alike, added_by_token, gated_columns, within_groups
from ..problem.operations import OPERATIONS
from ..quantized.weight import QuantizedWeight
from .operate import is_batch_invariant, is_compiling, operate

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]
IN_STEPS = ("routed_grouped_mm", "combined_grouped_mm")
"""Operations without tables of M, since an index makes M differ from the rows of a or of the result, or without classes."""


@gemm(ops=tuple(op for op, row in OPERATIONS.items() if "grouped_mm" in (op, row.function)))
def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    gated: Gate = "",
    scatter: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b for each group, *epilogue_args), in the four forms of torch's ``grouped_mm``:

        a [M, K]     b [G, K, N]  out [M, N]     groups of rows: those of group g are multiplied by b[g]
        a [G, M, K]  b [K, N]     out [M, N]     groups of columns: those of group g are a[g] @ b[:, g]
        a [M, K]     b [K, N]     out [G, M, N]  groups along K: out[g] = a[:, g] @ b[g], 0 for an empty group
        a [G, M, K]  b [G, K, N]  out [G, M, N]  no groups: ``offs`` is None, and this is ``bmm``

    Args:
        a, b: any strides; float32, float16 or bfloat16, both the same.
        offs: int32 [G], the end of each group, where the next one begins. The host never reads it, so a captured CUDA graph uses
            offsets that changed. Groups may be empty, and there may be none. If offsets fall or pass the end, the result is
            undefined, and nothing outside of the operands is touched.
        rows: int32 or int64 [M], for groups of rows. Row r of the product uses a[rows[r]]; a has any number of rows.
        gated: ``silu``, ``gelu`` or ``gelu_tanh``, for groups of rows. The first half of the product's columns are gates. The
            result is act(gates) · the other half, computed in float32 if one kernel does it.
        scatter: (slots, weights), for groups of rows: slots int32 or int64 [M], weights [T, C] float32 or of a's dtype, M = T · C.
            Row r of the product, times the weight in slot slots[r] = t · C + c, is added to row t of the result [T, N], in a
            fixed order. Rows after the last group do not count. Each slot belongs to one row. No epilogue is possible.
        out, epilogue, epilogue_args: as for ``mm``.

    Returns ``out`` if it was given. Rows (columns) after the last group hold anything, as in torch. Raises as ``mm``.
    """
    if _lacks_groups(a, b, offs):
        words = {"rows": rows, "gated": gated, "scatter": scatter, "epilogue": epilogue, "epilogue_args": epilogue_args}
        return _without_groups(a, b, out, words)
    form = form_of("grouped_mm", a, b, offs, rows=rows, gated=gated, scatter=scatter)
    return _by_form(form, isinstance(b, QuantizedWeight), out, epilogue, epilogue_args)


def _by_form(
    form: Form, quantized: bool, out: Tensor | None, epilogue: EpilogueFunction | None, epilogue_args: Sequence[Tensor]
) -> Tensor:
    quantized = quantized and out is None and epilogue is None and not _has_gradient(form, epilogue_args)
    in_steps = OPERATIONS[form.op].gradient is None and out is None and _has_gradient(form, epilogue_args)
    alike = form.op in IN_STEPS and is_batch_invariant()
    if (quantized or in_steps or alike) and not is_compiling():
        _check(form, epilogue, epilogue_args)
    if alike:
        result = _in_steps(form, epilogue, epilogue_args, added_alike)
        return result if out is None else _into(out, result)
    if quantized:
        # The rule of the weight multiplies all experts at once. torch's composition takes one after the other on a CPU.
        options = {"gated": form.options[0]} if any(form.options) else {}
        return cast(Tensor, getattr(torch.ops.gemmtune, form.op)(*form.operands, **options))
    if form.transposed:
        return _transposed(form, out, epilogue, tuple(map(transposed_operand, epilogue_args)) if epilogue_args else NOTHING)
    if in_steps:
        return _in_steps(form, epilogue, epilogue_args, added_by_token)
    return operate(form.op, form.operands, out, epilogue, epilogue_args, (), form.options)


def _check(form: Form, epilogue: EpilogueFunction | None, epilogue_args: Sequence[Tensor]) -> None:
    """Raise InvalidProblemError unless the parts of a product fit, before it is done in steps that know nothing of each other.

    Parts that fit are remembered by their shapes: to state them takes longer than the rest of a small product.
    """
    parts = (*form.operands, *epilogue_args)
    plain = all(x is None or isinstance(x, Tensor | str) for x in parts)
    given_parts = ((type(x), x.shape, x.dtype, x.layout, x.device) if isinstance(x, Tensor) else x for x in parts)
    key = (form.op, form.options, *given_parts) if plain else ()
    if key in _fitting:
        return
    given = {operand.role: x for operand, x in zip(OPERATIONS[form.op].operands, form.operands, strict=False)}
    call = call_of(form.op, given, options=form.options, epilogue=epilogue, epilogue_args=epilogue_args)
    check_tensors(call)
    check_composed(call)
    if len(_fitting) >= MOST_FITTING:
        _fitting.clear()
    if plain:
        _fitting.add(key)


MOST_FITTING = 1024
"""Combinations of shapes that are remembered. Each number of tokens is another one."""
_fitting: set[tuple[object, ...]] = set()


def _lacks_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> bool:
    """Return True for a product without a group, in all operands that have a dimension for groups."""
    if not all(isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested for x in (a, b, offs)):
        return False
    assert offs is not None
    return offs.dim() == 1 and not any(x.shape[0] for x in (a, b, offs) if x.dim() in (1, 3)) and {a.dim(), b.dim()} <= {2, 3}


def _without_groups(a: Tensor, b: Tensor, out: Tensor | None, words: dict[str, Any]) -> Tensor:
    """Do a product without groups as one with a group of zeros, so that its result and its gradients are zeros."""
    of_terms = a.dim() == b.dim() == 2
    counted = words["rows"] if words["rows"] is not None else a
    end = a.shape[1] if of_terms else b.shape[1] if a.dim() == 3 else counted.shape[0]
    a, b = (torch.cat([x, x.new_zeros((1, *x.shape[1:]))]) if x.dim() == 3 else x for x in (a, b))
    offs = torch.full((1,), end, dtype=torch.int32, device=a.device)
    result = grouped_mm(a, b, offs, out=None if of_terms else out, **words)
    if not of_terms:
        return result
    return result[:0].clone() if out is None else out.copy_(result[:0])


def _has_gradient(form: Form, epilogue_args: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (*form.operands, *epilogue_args))


def _transposed(form: Form, out: Tensor | None, epilogue: EpilogueFunction | None, extra: Sequence[Tensor]) -> Tensor:
    """Return the transposed result of ``form``, contiguous unless it is ``out``."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    if out is None and (epilogue is not None or is_compiling() or transforms or _has_gradient(form, extra)):
        return operate(form.op, form.operands, None, epilogue, extra).t().contiguous()
    first, second, _ = form.operands
    result = second.new_empty((second.shape[2], first.shape[0])) if out is None else out
    operate(form.op, form.operands, result.t(), epilogue, extra)
    return result


def _into(out: Tensor, result: Tensor) -> Tensor:
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise InvalidProblemError(f"out: got {list(out.shape)} {out.dtype}, expected {list(result.shape)} {result.dtype}")
    return out.copy_(result)


def _in_steps(
    form: Form, epilogue: EpilogueFunction | None, epilogue_args: Sequence[Tensor], added: Callable[..., Tensor]
) -> Tensor:
    """Do a product with picked, gated or summed rows in steps, which autograd follows, and which have batch-invariant tables."""
    a, b, offs, *rest = form.operands
    if form.op == "combined_grouped_mm":
        if epilogue is not None:
            raise InvalidProblemError("combined_grouped_mm: takes no epilogue; apply the function to its result")
        slots, weights = rest
        return added(grouped_mm(a, b, offs), offs, slots, weights)
    x = within_groups(a.index_select(0, rest[0]), offs) if rest else a  # the gradient of a row behind the last group is anything
    gated = form.options[0]
    if not gated:
        return grouped_mm(x, b, offs, epilogue=epilogue, epilogue_args=epilogue_args)
    result = gated_columns(grouped_mm(x, b, offs), gated)
    return result if epilogue is None else epilogue(result, *epilogue_args)


def mixed_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    encoding: Encoding = "",
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ (b[g] · scale_b[g]) for each group of rows, *epilogue_args) for quantized weights

    Args:
        a: [M, K] float32, float16 or bfloat16, any strides.
        b: [G, K, N] int8 or uint8, any strides; or with ``encoding`` uint8 [G, K/2, N], each matrix as ``pack_int4`` makes it.
        scale_b: [G, S, N], float32 or of a's dtype: with S = 1 one for each column, else one for each K/S = 32, 64 or 128 elements
            along K of a column.
        offs, out, epilogue, epilogue_args: as for ``grouped_mm``.
        encoding: ``int4`` (two's complement) or ``uint4`` for a packed ``b``.

    A kernel may round b · scale_b to the dtype of ``a``, as torch's composition does. There is no gradient.

    Returns:
        [M, N] of a's dtype, unless the epilogue ends in a cast.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    contiguous = [x.contiguous() if isinstance(x, Tensor) else x for x in (scale_b, offs)]
    return operate("mixed_grouped_mm", (a, b, *contiguous), out, epilogue, epilogue_args, (), (encoding,))


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue((a · scale_a) @ (b[g] · scale_b[g]) for each group of rows, *epilogue_args) for 8-bit floats

    Args:
        a: [M, K] float8_e4m3fn, float8_e5m2 or their fnuz forms, any strides.
        b: [G, K, N] of one of these dtypes, any strides.
        scale_a, scale_b: float32. One number for each row of a and each column of each matrix: [M] or [M, 1] with [G, N] or
            [G, 1, N]. Or one for each 128 elements along K of a row, [M, K/128], with one for each 128 along K of a column,
            [G, K/128, N], or for each 128×128 of a matrix, [G, K/128, N/128]; fewer elements at the ends.
        offs, out, epilogue, epilogue_args: as for ``grouped_mm``.
        out_dtype: float32, float16 or bfloat16; bfloat16 unless the epilogue ends in a cast.
        fast_accum: a permission for sums in the narrow registers of 8-bit tensor cores, as in ``scaled_mm``.

    There is no gradient.

    Returns:
        [M, N]. Rows behind the last group hold anything.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    if isinstance(scale_a, Tensor) and scale_a.dim() == 1:
        scale_a = scale_a.unsqueeze(-1)
    if isinstance(scale_b, Tensor) and scale_b.dim() == 2:
        scale_b = scale_b.unsqueeze(1)
    scale_b, offs = (x.contiguous() if isinstance(x, Tensor) else x for x in (scale_b, offs))
    operands = (a, b, scale_a, scale_b, offs)
    return operate("scaled_grouped_mm", operands, out, epilogue, epilogue_args, (), (fast_accum,), out_dtype=out_dtype)
