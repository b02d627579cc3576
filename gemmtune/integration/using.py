"""``use()``: stored picks for torch's products in a ``with`` block."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import settings
from ..dispatch.checks import is_dense
from ..dispatch.ready import generation
from ..operators.torch_products import BY_FUNCTION, TorchProduct, positional_order
from ..problem.gradients import grouped_op
from ..problem.operations import OPERATIONS
from .eager import Bound, plain_here
from .modules import Picks

Tensor = torch.Tensor


class use(TorchFunctionMode):
    """A block in which torch's GEMMs run by stored picks if these are faster: ``with gemmtune.use():``.

    Covers ``torch.mm``, ``addmm``, ``bmm``, ``baddbmm``, ``matmul``, ``@``, ``F.linear`` and ``F.grouped_mm`` (groups of rows or
    along K, without gradients) in this thread. Nothing is tuned. Every function of torch costs the host 1 to 2 µs more here.
    For modules ``gemmtune.optimize`` has no such cost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._picks = Picks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = BY_FUNCTION.get(func)
        if row is not None and not torch.compiler.is_compiling() and plain_here():
            stated = _stated(row, args, kwargs or {})
            if stated is not None and (result := self._run(*stated)) is not None:
                return result
        return func(*args, **(kwargs or {}))

    def _run(self, op: str, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor | None:
        """Return the product by its pick with this shape, or None for torch."""
        key = (op, settings.token(), generation.number, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
        known = self._picks.get(key)
        found = self._picks.find(key, op, tensors) if known is self._picks else known
        result = found.run(op, tensors) if isinstance(found, Bound) else None
        return None if result is None else result.view(shape)


Stated = tuple[str, tuple[Tensor, ...], tuple[int, ...]]
"""An operation, its operands, and the shape of the result."""


def _stated(row: TorchProduct, args: Any, kwargs: Mapping[str, Any]) -> Stated | None:
    """Return what to run for a call of torch's function, or None if only torch has it."""
    order = positional_order(row, len(args)) if args and args[-1] is not None and not kwargs else None
    if order is not None:  # without a Statement, which costs 2 µs
        op, operands = "addmm" if row.composite and len(args) == 3 else row.op, [args[place] for place in order]
    else:
        found = row.stated(args, kwargs)
        if isinstance(found, str) or found.out_dtype is not None or any(x != 1 for x in found.numbers.values()):
            return None
        op, operands = found.op, list(found.operands.values())
    if not all(map(is_dense, operands)):
        return None
    a, b, *others = operands
    if row.transposed:
        return _flattened(op, a, b.t(), others) if b.dim() == 2 else None
    if row.composite:
        return _flattened(op, a, b, others)
    operation = OPERATIONS[op]
    if operation.grouped:
        return _grouped(a, b, *others)
    fits = a.dim() == b.dim() == 2 + operation.batched
    return (op, (a, b, *others), (*a.shape[:-1], b.shape[-1])) if fits else None


def _flattened(op: str, a: Tensor, b: Tensor, others: list[Tensor]) -> Stated | None:
    """Return the product of two matrices, of the rows of many matrices with one matrix, or of batches of equal length."""
    one = b.dim() == 2 and a.dim() >= 2 and (a.dim() == 2 or (a.is_contiguous() and all(x.dim() < 2 for x in others)))
    if not one and not (a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]):
        return None
    operands = (a.flatten(0, -2) if one and a.dim() > 2 else a, b, *others)
    return op if one else "bmm", operands, (*a.shape[:-1], b.shape[-1])


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Stated | None:
    """Return the product of groups of rows or of terms."""
    if offs is None or a.dim() != 2 or b.dim() not in (2, 3):
        return None
    return grouped_op(b), (a, b, offs), (*(offs.shape if b.dim() == 2 else ()), a.shape[0], b.shape[-1])
