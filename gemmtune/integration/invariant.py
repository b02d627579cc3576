"""Layers of ``optimize(batch_invariant=True)``: products by the batch-invariant table of a weight, and never by torch."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import settings
from ..device import detect
from ..dispatch.arguments import product_under_autocast
from ..errors import NoValidChoicesError
from ..ops.grouped import grouped_mm
from ..ops.products import addmm, mm
from ..problem import Problem
from ..problem.grouped_compositions import grouped_by_terms, grouped_product, within_groups
from ..problem.layout import ALIGNED_BYTES
from ..problem.rows import RowClass, row_classes, with_rows
from ..quantized.weight import QuantizedWeight
from ..selector.segments import INVARIANT
from ..selector.stored_tables import stored_class, stored_table
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from ..tuning.tune import tune as run_tuning
from ..tuning.tune import tune_in_class
from .measured import in_models
from .record import record

log = logging.getLogger("gemmtune")
LEAST_ROWS = 256
"""Rows of a table that ``optimize`` makes, at least. Larger batches of the example make it longer."""
Wanted = tuple[Problem, int]
"""Problem of a layer, and the number of its rows for each token: the experts of a token, otherwise 1."""
_collected: ContextVar[list[Wanted] | None] = ContextVar("gemmtune_invariant_problems", default=None)
"""Problems of the layers that run in a ``collecting`` block."""


def invariant_linear(module: nn.Linear, input: Tensor) -> Tensor:
    """Run the forward of an ``nn.Linear`` so that the bits of a row do not depend on its batch."""
    return product_of_layer(input, module.weight, module.bias)


def invariant_conv1d(module: Any, x: Tensor) -> Tensor:
    """Run the forward of HF's Conv1D, x @ weight + bias, so that the bits of a row do not depend on its batch."""
    return product_of_layer(x, module.weight, module.bias, transposed=False)


def _scripted(self: Any, input: Tensor) -> Tensor:  # noqa: ARG001 - the forward's arguments
    """TorchScript cannot run batch-invariant layers. Call restore(model) before torch.jit.script, or use torch.export."""
    global BATCH_INVARIANT_LAYERS  # noqa: PLW0602 - here torch.jit.script fails and prints these lines, before it makes a type
    raise NotImplementedError


_unscriptable: tuple[Any, ...] = (invariant_linear, invariant_conv1d)
for _forward in _unscriptable:
    _forward.__wrapped__ = _scripted


@product_under_autocast
def product_of_layer(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = True) -> Tensor:
    """Return input @ weightᵀ + bias, without ``transposed`` input @ weight + bias, with bits that do not depend on the batch."""
    if isinstance(weight, QuantizedWeight) and _in_a_graph(input):
        return _quantized_operator(input, weight.tensor, weight.scales, weight.zero_points, bias, None, weight.encoding)  # type: ignore[no-any-return]
    if _as_operator(input, weight, bias):
        return (_transformed if _in_a_transform() else _operator)(input, weight, bias, transposed)  # type: ignore[no-any-return]
    return multiplied(input, weight, bias, transposed)


@product_under_autocast
def invariant_grouped(x: Tensor, matrix: Tensor, offs: Tensor, copies: int) -> Tensor:
    """Return groups of rows [M, K] @ [G, K, N] with bits independent of the batch. ``copies`` counts the rows of a token."""
    if isinstance(matrix, QuantizedWeight) and _in_a_graph(x):
        return _quantized_operator(x, matrix.tensor, matrix.scales, None, None, offs, matrix.encoding)  # type: ignore[no-any-return]
    if _as_operator(x, matrix):
        return (_transformed_groups if _in_a_transform() else _grouped_operator)(x, matrix, offs, copies)  # type: ignore[no-any-return]
    return _multiplied_in_groups(x, matrix, offs, copies)


def _in_a_transform() -> bool:
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _in_a_graph(x: Tensor) -> bool:
    """Return True in a graph without gradients. With them a product with a quantized weight runs between two graphs."""
    return torch.compiler.is_compiling() and not (torch.is_grad_enabled() and x.requires_grad)


def _as_operator(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True for a product in a graph or with gradients, unless a rule of a quantized weight computes it."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    asked = torch.compiler.is_compiling() or (differentiated and _collected.get() is None)
    return asked and not isinstance(weight, QuantizedWeight)


def aligned_rows(x: Tensor) -> Tensor:
    """Return the rows of x as a matrix that is laid out alike in every call, so that one table serves them."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return (
        rows.clone(memory_format=torch.contiguous_format) if not rows.is_contiguous() or rows.data_ptr() % ALIGNED_BYTES else rows
    )


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return x @ b + bias by the weight's batch-invariant table. Raises NoValidChoicesError if none stored has these rows."""
    rows = aligned_rows(x)
    if (found := _collected.get()) is not None:  # torch computes the product, whose problem is collected
        with record() as recording:
            result = functional.linear(rows, weight if transposed else weight.t(), bias)
        found += [(problem, 1) for problem in recording.problems()]
    else:
        with settings.patch(batch_invariant=True, tune="never"):
            if isinstance(weight, QuantizedWeight):  # its rules call the operators, which follow the settings
                result = functional.linear(rows, weight if transposed else weight.t(), bias)
            else:
                b = weight.t() if transposed else weight
                result = mm(rows, b) if bias is None else addmm(bias, rows, b)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def _multiplied_in_groups(x: Tensor, matrix: Tensor, offs: Tensor, copies: int) -> Tensor:
    """Return the grouped product by the stored table. Raises as ``multiplied``."""
    found = _collected.get()
    if found is None:
        with settings.patch(batch_invariant=True, tune="never"):
            return grouped_mm(x, matrix, offs)
    with settings.patch(batch_invariant=False, tune="never"), record() as recording:
        result = grouped_mm(x, matrix, offs)
    found += [(problem, copies) for problem in recording.problems()]
    return result


@contextmanager
def collecting() -> Iterator[list[Wanted]]:
    """Collect the problems of batch-invariant layers in a block. torch computes them."""
    found: list[Wanted] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Problem of one product for layers of one input, and those of the layers."""

    whole: Problem
    parts: tuple[Problem, ...]


def tune_layers(wanted: list[Wanted], rows: range | None, *, progress: bool, joined: Sequence[Joined] = ()) -> None:
    """Make the batch-invariant table of each class of problems, for ``rows``, or for those that occurred and LEAST_ROWS.

    A joined product has a table if it can have the reduction class of the layers, which then have that class.
    """
    ranges: dict[RowClass, range] = {}
    for problem, copies in wanted:
        if not problem.empty:
            rows_class = _class_of(problem)
            asked = range(1, LEAST_ROWS + 1) if rows is None else rows
            asked = range(asked.start, asked[-1] * copies + 1)
            most = max(asked[-1], problem.m if rows is None else 0, ranges.get(rows_class, asked)[-1])
            ranges[rows_class] = range(asked.start, most + 1)
    for product in joined:
        _tune_joined(product, ranges, progress=progress)
    for rows_class, asked in ranges.items():
        chosen = _timed_as(rows_class, settings.current())
        run_tuning(rows_class.problem, m=asked, batch_invariant=True, progress=progress, settings=chosen)


def _class_of(problem: Problem) -> RowClass:
    """Return the class of a layer's problem. One row leaves open which operands follow M: two rows do not."""
    (rows_class, *_) = row_classes(problem if problem.m > 1 else with_rows(dataclasses.replace(problem), 2))
    return rows_class


def _tune_joined(joined: Joined, ranges: Mapping[RowClass, range], *, progress: bool) -> None:
    """Make the table of a joined product, then those of its layers in its reduction class. Otherwise the layers stay apart."""
    whole, parts = _class_of(joined.whole), dict.fromkeys(map(_class_of, joined.parts))
    asked = max((ranges[x] for x in parts if x in ranges), key=len, default=None)
    device, current = detect(joined.whole.device_type), settings.current()
    stored = {name for x in parts if (name := stored_class(x, device, in_models(current, device), open_store(current)))}
    if asked is None or len(stored) > 1:
        log.info("%s: its layers stay apart: their stored tables have several reduction classes: %s", whole, sorted(stored))
        return
    try:
        agreed = next(iter(stored), "")
        table = tune_in_class(whole, asked, _timed_as(whole, current), agreed=agreed, progress=progress).table
        for x in parts:
            tune_in_class(x, ranges.get(x, asked), _timed_as(x, current), agreed=table.reduction, progress=progress)
    except NoValidChoicesError as error:
        log.info("%s: its layers stay apart: %s", whole, error)


def _timed_as(rows_class: RowClass, current: Settings) -> Settings:
    """Return the settings by which a table is measured: in models, unless one of the current mode is stored, which goes first."""
    device = detect(rows_class.problem.device_type)
    known = stored_table(rows_class, fingerprint_text(device, current.timing), open_store(current), INVARIANT)
    return in_models(current, device) if known is None else current


_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor"
_operator = torch.library.custom_op("gemmtune::invariant_linear", multiplied, mutates_args=(), schema=_SCHEMA)
LINEAR = torch.ops.gemmtune.invariant_linear.default
"""The product as graphs of torch.compile have it: they keep no settings of their own."""


@_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:  # noqa: ARG001 - the operator's arguments
    return x.new_empty(*x.shape[:-1], weight.shape[0 if transposed else 1])


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch calls it so
    x, weight, _, ctx.transposed = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    """Return the gradients by torch, whose bits depend on the batch."""
    x, weight = ctx.saved_tensors
    count = x.shape[:-1].numel()
    rows, rows_of_grad = x.reshape(count, x.shape[-1]), grad.reshape(count, grad.shape[-1])
    of_weight = rows_of_grad.t() @ rows if ctx.transposed else rows.t() @ rows_of_grad
    of_x = (rows_of_grad @ (weight if ctx.transposed else weight.t())).reshape(x.shape)
    return of_x, of_weight, rows_of_grad.sum(0) if ctx.needs_input_grad[2] else None, None


def _differentiable(operator: Any, gradients: Callable[..., Any], saved: Callable[..., None]) -> Callable[..., Any]:
    """Give an operator its gradients. Return it for torch.func, which refuses the function that ``register_autograd`` makes."""
    operator.register_autograd(gradients, setup_context=saved)
    parts = {"forward": operator, "setup_context": saved, "backward": gradients}
    methods = {name: staticmethod(function) for name, function in parts.items()}
    return type("Transformed", (torch.autograd.Function,), {"generate_vmap_rule": True, **methods}).apply  # type: ignore[attr-defined, no-any-return]


_transformed = _differentiable(_operator, _gradients, _saved)
_GROUPS = "(Tensor x, Tensor matrix, Tensor offs, int copies) -> Tensor"
_grouped_operator = torch.library.custom_op("gemmtune::invariant_grouped", _multiplied_in_groups, mutates_args=(), schema=_GROUPS)
GROUPED = torch.ops.gemmtune.invariant_grouped.default
"""The product of groups as graphs of torch.compile have it."""


@_grouped_operator.register_fake
def _(x: Tensor, matrix: Tensor, offs: Tensor, copies: int) -> Tensor:  # noqa: ARG001 - the operator's arguments
    return x.new_empty(x.shape[0], matrix.shape[2])


def _gradients_in_groups(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Return the gradients by torch. Rows of no group have zeros."""
    x, matrix, offs = ctx.saved_tensors
    of_x = within_groups(grouped_product(grad, matrix.mT, offs), offs)
    return of_x, grouped_by_terms(x.t(), grad, offs), None, None


def _saved_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch calls it so
    ctx.save_for_backward(*inputs[:3])


_transformed_groups = _differentiable(_grouped_operator, _gradients_in_groups, _saved_groups)


def _multiplied_by_parts(
    x: Tensor, numbers: Tensor, scales: Tensor | None, zeros: Tensor | None, bias: Tensor | None, offs: Tensor | None, encoding: str
) -> Tensor:
    """Return the product with a quantized weight of these parts, for the rows of groups if there are offsets."""
    weight = QuantizedWeight(numbers, scales, zeros, encoding=encoding)  # type: ignore[arg-type]
    return multiplied(x, weight, bias, False) if offs is None else _multiplied_in_groups(x, weight, offs, 1)


_quantized_operator = torch.library.custom_op(
    "gemmtune::invariant_quantized",
    _multiplied_by_parts,
    mutates_args=(),
    schema="(Tensor x, Tensor numbers, Tensor? scales, Tensor? zeros, Tensor? bias, Tensor? offs, str encoding) -> Tensor",
)
QUANTIZED = torch.ops.gemmtune.invariant_quantized.default
"""Both products with the parts of a quantized weight, as graphs have it."""


@_quantized_operator.register_fake
def _(x: Tensor, numbers: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], numbers.shape[-1])
