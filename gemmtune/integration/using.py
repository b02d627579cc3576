"""Stored picks for code without modules: torch's products within a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import settings
from ..dispatch.ready import generation
from ..problem.gradients import grouped_op
from ..problem.operation import Operation
from ..problem.operations import DENSE_OPS, OPERATIONS
from .eager import Bound, plain_here
from .modules import Picks

Tensor = torch.Tensor


class use(TorchFunctionMode):
    """``with gemmtune.use():`` torch's products of tensors run by stored picks where these are faster.

    ``torch.mm``, ``addmm``, ``bmm``, ``baddbmm``, ``matmul``, ``@``, ``F.linear`` and ``F.grouped_mm`` (groups of rows or terms,
    without gradients), in this thread. Nothing is tuned. Every function of torch costs the host a microsecond or two more within
    the block; for modules ``gemmtune.optimize`` costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._picks = Picks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        statement = _STATEMENTS.get(func)
        if statement is not None and not torch.compiler.is_compiling() and plain_here():
            stated = statement(args, kwargs or {})
            if stated is not None and (result := self._run(*stated)) is not None:
                return result
        return func(*args, **(kwargs or {}))

    def _run(self, op: str, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor | None:
        key = (op, settings.token(), generation.number, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
        found = self._picks[key] if key in self._picks else self._picks.find(key, op, tensors)
        result = found.run(op, tensors) if isinstance(found, Bound) else None
        return None if result is None else result.view(shape)


Stated = tuple[str, tuple[Tensor, ...], tuple[int, ...]]
"""The operation, its operands, and the shape of the result."""


def _linear(args: Any, kwargs: Mapping[str, Any]) -> Stated | None:
    given: list[Any] = [*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :])]
    x, weight, bias = given
    if not _tensors(x, weight, *([] if bias is None else [bias])) or weight.dim() != 2 or x.dim() < 2 or not x.is_contiguous():
        return None
    rows, b = x.view(-1, x.shape[-1]), weight.t()
    operands = (rows, b) if bias is None else (rows, b, bias)
    return ("mm" if bias is None else "addmm"), operands, (*x.shape[:-1], weight.shape[0])


def _named(row: Operation) -> Callable[[Any, Mapping[str, Any]], Stated | None]:
    """Statements of torch's own function of that name, with factors of one."""

    def stated(args: Any, kwargs: Mapping[str, Any]) -> Stated | None:
        if kwargs.keys() - set(row.scalars) or any(value != 1 for value in kwargs.values()) or len(args) != len(row.operands):
            return None
        *inp, a, b = args
        if not _tensors(*args) or not a.dim() == b.dim() == 2 + row.batched:
            return None
        return row.name, (a, b, *inp), (*a.shape[:-1], b.shape[-1])

    return stated


def _grouped(args: Any, kwargs: Mapping[str, Any]) -> Stated | None:
    """Groups of rows or of terms, with nothing added."""
    given = dict(zip(("a", "b", "offs", "bias", "out_dtype"), args, strict=False)) | dict(kwargs)
    offs = given.pop("offs", None)
    a, b = (given.pop(mine, given.pop(theirs, None)) for mine, theirs in (("a", "mat_a"), ("b", "mat_b")))
    if any(x is not None for x in given.values()) or not _tensors(a, b, offs) or a.dim() != 2 or b.dim() not in (2, 3):
        return None
    size = (*(offs.shape if b.dim() == 2 else ()), a.shape[0], b.shape[-1])
    return grouped_op(b), (a, b, offs), size


def _matmul(args: Any, kwargs: Mapping[str, Any]) -> Stated | None:
    """Two matrices, rows of many matrices by one matrix, or as many matrices by as many."""
    if kwargs or len(args) != 2 or not _tensors(*args):
        return None
    a, b = args
    shape = (*a.shape[:-1], b.shape[-1])
    if b.dim() == 2 and a.dim() >= 2 and (a.dim() == 2 or a.is_contiguous()):
        return "mm", (a if a.dim() == 2 else a.view(-1, a.shape[-1]), b), shape
    if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]:
        return "bmm", (a, b), shape
    return None


def _tensors(*values: object) -> bool:
    return all(isinstance(x, Tensor) for x in values)


_STATEMENTS: dict[Any, Callable[[Any, Mapping[str, Any]], Stated | None]] = {
    functional.linear: _linear,
    **{getattr(owner, op): _named(OPERATIONS[op]) for op in DENSE_OPS for owner in (torch, Tensor)},
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch._grouped_mm: _grouped,
    getattr(functional, "grouped_mm", torch._grouped_mm): _grouped,
}
