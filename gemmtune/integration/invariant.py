"""Layers of ``optimize(batch_invariant=True)``: products by the batch-invariant table of a weight, and never by torch."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import settings
from ..errors import InvalidProblemError
from ..ops.products import addmm, mm
from ..problem import Problem
from ..problem.layout import ALIGNED_BYTES
from ..problem.rows import RowClass, row_classes, with_rows
from ..quantized.weight import QuantizedWeight
from ..tuning.tune import tune as run_tuning
from .record import record

LEAST_ROWS = 256
"""Rows of a table that ``optimize`` makes, at least. Larger batches of the example make it longer."""
_collected: ContextVar[list[Problem] | None] = ContextVar("gemmtune_invariant_problems", default=None)
"""Problems of the layers that run in a ``collecting`` block."""


def invariant_linear(module: nn.Linear, input: Tensor) -> Tensor:
    """Run the forward of an ``nn.Linear`` so that the bits of a row do not depend on its batch."""
    return _product(input, module.weight, module.bias, transposed=True)


def invariant_conv1d(module: Any, x: Tensor) -> Tensor:
    """Run the forward of HF's Conv1D, x @ weight + bias, so that the bits of a row do not depend on its batch."""
    return _product(x, module.weight, module.bias, transposed=False)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    operands = (x, weight) if bias is None else (x, weight, bias)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    if (torch.compiler.is_compiling() or (differentiated and _collected.get() is None)) and not isinstance(weight, QuantizedWeight):
        return _operator(x, weight, bias, transposed)  # type: ignore[no-any-return]
    return _multiplied(x, weight, bias, transposed)


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return x @ b + bias by the stored table. Rows are laid out alike in every call, so that one table serves them.

    Raises NoValidChoicesError if no batch-invariant table is stored for the weight, or it does not cover the rows.
    """
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if not rows.is_contiguous() or rows.data_ptr() % ALIGNED_BYTES:
        rows = rows.clone(memory_format=torch.contiguous_format)
    if (found := _collected.get()) is not None:  # torch computes the product, whose problem is collected
        with record() as recording:
            result = functional.linear(rows, weight if transposed else weight.t(), bias)
        found += recording.problems()
    else:
        with settings.patch(batch_invariant=True, tune="never"):
            if isinstance(weight, QuantizedWeight):  # its rules call the operators, which follow the settings
                result = functional.linear(rows, weight if transposed else weight.t(), bias)
            else:
                b = weight.t() if transposed else weight
                result = mm(rows, b) if bias is None else addmm(bias, rows, b)
    return result.reshape(*x.shape[:-1], result.shape[-1])


@contextmanager
def collecting() -> Iterator[list[Problem]]:
    """Collect the problems of batch-invariant layers in a block. torch computes them."""
    found: list[Problem] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def tune_layers(problems: list[Problem], rows: range | None, *, progress: bool) -> None:
    """Make the batch-invariant table of each class of problems, for ``rows``, or for those that occurred and LEAST_ROWS."""
    most: dict[RowClass, int] = {}
    for problem in problems:
        if not problem.empty:
            # One row leaves open which operands follow M: two rows do not.
            (rows_class, *_) = row_classes(problem if problem.m > 1 else with_rows(dataclasses.replace(problem), 2))
            most[rows_class] = max(most.get(rows_class, LEAST_ROWS), problem.m)
    for rows_class, m in most.items():
        run_tuning(rows_class.problem, m=rows or range(1, m + 1), batch_invariant=True, progress=progress)


def check_layers(model: nn.Module) -> None:
    """Raise InvalidProblemError for a layer whose product is not covered."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.layout in (torch.sparse_bsr, torch.sparse_bsc):
            raise InvalidProblemError(
                f"optimize: batch_invariant: got a block-sparse weight in {name or 'the model'}, expected dense or quantized ones; "
                "make it dense, or leave batch_invariant out"
            )


_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor"
_operator = torch.library.custom_op("gemmtune::invariant_linear", _multiplied, mutates_args=(), schema=_SCHEMA)
"""The product as graphs of torch.compile have it: they keep no settings of their own."""


@_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:  # noqa: ARG001 - the operator's arguments
    return x.new_empty(*x.shape[:-1], weight.shape[0 if transposed else 1])


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch calls it so
    x, weight, bias, ctx.transposed = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    """Return the gradients by torch, whose bits depend on the batch."""
    x, weight = ctx.saved_tensors
    count = x.shape[:-1].numel()
    rows, rows_of_grad = x.reshape(count, x.shape[-1]), grad.reshape(count, grad.shape[-1])
    of_weight = rows_of_grad.t() @ rows if ctx.transposed else rows.t() @ rows_of_grad
    of_x = (rows_of_grad @ (weight if ctx.transposed else weight.t())).reshape(x.shape)
    return of_x, of_weight, rows_of_grad.sum(0) if ctx.has_bias else None, None


_operator.register_autograd(_gradients, setup_context=_saved)
