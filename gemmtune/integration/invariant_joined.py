"""Batch-invariant layers of one input as one product, whose weights are adjacent in memory.

A joined product has the bits of the separate ones. So a graph may join layers that run separately elsewhere. Its table has the
reduction class of theirs, and their bits are compared before it runs for a number of rows.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import settings
from ..bounded import Bounded
from ..dispatch.ready import generation
from ..dispatch.wholes import gathered, whole
from ..errors import NoValidChoicesError
from ..numerics.some_rows import first_other_row
from ..problem import Problem
from ..problem.dtypes import FLOAT8
from ..problem.layout import ALIGNED_BYTES
from ..problem.precision import flags_token
from ..quantized.weight import QuantizedWeight
from .adjacent import adjacent_runs, are_consecutive
from .eager import scalars_of
from .invariant import Joined, aligned_rows, collecting, multiplied
from .picks import pick_for

_ROLES = ("weights", "scales", "zeros", "biases")
_INTEGERS = (torch.int8, torch.uint8)
_equal = Bounded[Hashable, bool]()
"""Which joined products have the bits of the separate ones, by the sizes of the operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Operands of layers of one input: weights [N, K], or numbers [K, N] or [K/2, N] with scales and zero points.

    Lists of what the layers lack are empty.
    """

    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    zeros: Sequence[Tensor]
    biases: Sequence[Tensor]
    encoding: str

    @classmethod
    def of(cls, layers: "Sequence[Columns]") -> "Columns":
        """Return the columns of several layers that have the same operands."""
        fields: dict[str, Any] = {name: [x for layer in layers for x in getattr(layer, name)] for name in _ROLES}
        return replace(layers[0], **fields)

    @property
    def quantized(self) -> bool:
        """True for integers of a quantized weight."""
        return self.weights[0].dtype in _INTEGERS

    @property
    def each(self) -> "list[Columns]":
        """The columns of each layer."""
        places = range(len(self.weights))
        fields: dict[str, Any] = {name: getattr(self, name) for name in _ROLES}
        return [replace(self, **{name: x[i : i + 1] for name, x in fields.items()}) for i in places]

    @property
    def adjacent(self) -> bool:
        """True if the layers are adjacent in memory. Scales and zero points of groups along K are copied, and need not be."""
        factors = [x for x in (self.scales, self.zeros) if x and x[0].shape[0] == 1]
        dense = all(x.stride() == (1, x.shape[0]) if self.quantized else x.is_contiguous() for x in self.weights)
        return dense and all(map(are_consecutive, (self.weights, self.biases, *factors)))

    def together(self) -> "Columns | None":
        """Return all columns as those of one layer, or None if they are not adjacent in memory."""
        weights = self.weights if self.quantized else [x.t() for x in self.weights]
        wholes = [
            whole(weights),
            *(_whole_factors(x) for x in (self.scales, self.zeros)),
            whole(self.biases) if self.biases else None,
        ]
        given = (self.weights, self.scales, self.zeros, self.biases)
        if any(x is None and pieces for x, pieces in zip(wholes, given, strict=True)):
            return None
        weight, scales, zeros, bias = ([] if x is None else [x] for x in wholes)
        return replace(self, weights=weight if self.quantized else [weight[0].t()], scales=scales, zeros=zeros, biases=bias)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [N, K] and the bias of a single layer."""
        scales, zeros, bias = (x[0] if x else None for x in (self.scales, self.zeros, self.biases))
        if not self.quantized:
            return self.weights[0], bias
        return QuantizedWeight(self.weights[0], scales, zeros, encoding=self.encoding).t(), bias  # type: ignore[arg-type]

    def key(self) -> Hashable:
        """Return a key of what the bits and the table depend on."""
        pieces = (*self.weights, *self.scales, *self.zeros, *self.biases)
        return (self.encoding, len(self.biases), *((x.shape, x.dtype, x.data_ptr() % ALIGNED_BYTES) for x in pieces))


def _whole_factors(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the scales or zero points of all columns. Those of groups along K are copied."""
    if not pieces:
        return None
    return gathered(pieces) if pieces[0].shape[0] > 1 else whole(pieces)


def _multiplied_together(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], zeros: list[Tensor], biases: list[Tensor], encoding: str
) -> Tensor:
    """Return the products of x with all layers, side by side, as one product if that is known to have the same bits."""
    columns = Columns(weights=weights, scales=scales, zeros=zeros, biases=biases, encoding=encoding)
    if can_join(x, columns) and (joined := columns.together()) is not None:
        return multiplied(x, *joined.operands(), True)
    return torch.cat([multiplied(x, *part.operands(), True) for part in columns.each], -1)


_operator = torch.library.custom_op(
    "gemmtune::invariant_joined",
    _multiplied_together,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] zeros, Tensor[] biases, str encoding) -> Tensor",
)
OPERATOR = torch.ops.gemmtune.invariant_joined.default
"""The products of several layers as graphs have them."""


@_operator.register_fake
def _(x: Tensor, weights: list[Tensor], scales: object, zeros: object, biases: object, encoding: str) -> Tensor:  # noqa: ARG001
    dim = 1 if weights[0].dtype in _INTEGERS else 0
    return x.new_empty(*x.shape[:-1], sum(weight.shape[dim] for weight in weights))


def can_join(x: Tensor, columns: Columns) -> bool:
    """Return True if one product of the rows of x has the bits of the separate ones.

    All tables must have one reduction class. The bits of random rows, as many as x has, are compared once for each number of rows.
    """
    m = x.shape[:-1].numel()
    key = (generation.number, settings.token(), flags_token(x.dtype), m, x.dtype, x.device, columns.key())
    found = _equal.get(key)
    if found is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        found = _equal[key] = m > 0 and _is_one_class(x, columns) and _are_bits_equal(x, columns)
    return found


def _is_one_class(x: Tensor, columns: Columns) -> bool:
    joined = columns.together()
    classes = {_class_of(x, part) for part in (*columns.each, joined) if part is not None}
    return joined is not None and len(classes) == 1 and "" not in classes


def _class_of(x: Tensor, columns: Columns) -> str:
    """Return the reduction class of a layer's table for the rows of x, or an empty text if no table serves them."""
    weight, bias = columns.operands()
    rows, options = aligned_rows(x), tuple[Hashable, ...]()
    if isinstance(weight, QuantizedWeight):
        op, options = "mixed_mm", (weight.encoding,)
        tensors = tuple(part for part in (rows, *weight.parts) if part is not None)
    else:
        op, tensors = ("mm", (rows, weight.t())) if bias is None else ("addmm", (rows, weight.t(), bias))
    with settings.patch(batch_invariant=True, tune="never"):
        try:
            pick = pick_for(op, tensors, scalars_of(op), options)
        except NoValidChoicesError:
            return ""
    shared = None if pick is None else pick.plan.shared
    return "" if shared is None or shared.table is None else shared.table.reduction


def _are_bits_equal(x: Tensor, columns: Columns) -> bool:
    """Compare the bits of random rows."""
    generator = torch.Generator(x.device).manual_seed(0)
    rows = torch.randn(x.shape[:-1].numel(), x.shape[-1], generator=generator, device=x.device, dtype=x.dtype)
    joined = columns.together()
    assert joined is not None
    apart = torch.cat([multiplied(rows, *part.operands(), True) for part in columns.each], -1)
    return first_other_row(apart, multiplied(rows, *joined.operands(), True), 0) is None


def joined_problems(groups: Sequence[Sequence[nn.Module]]) -> list[Joined]:
    """Return the joined problem of each run of layers with adjacent weights, and the problems of the layers."""
    found: dict[Hashable, Joined] = {}
    for group in groups:
        for columns in _runs(list(dict.fromkeys(group))):
            joined = columns.together()
            if joined is not None and (key := columns.key()) not in found:
                problems = [problem for x in (joined, *columns.each) for problem in _problems_of(x)]
                if len(problems) == 1 + len(columns.weights):  # torch alone has products of some dtypes
                    found[key] = Joined(whole=problems[0], parts=tuple(problems[1:]))
    return list(found.values())


def _problems_of(columns: Columns) -> list[Problem]:
    """Return the problem of two rows of a layer, if it has one."""
    weight, bias = columns.operands()
    x = torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad(), collecting() as wanted:
        multiplied(x, weight, bias, True)
    return [problem for problem, _ in wanted[:1]]


def _runs(layers: Sequence[nn.Module]) -> list[Columns]:
    """Return the columns of each run of two or more layers whose weights and biases are adjacent."""
    runs = adjacent_runs(layers, lambda x, y: (both := _columns_of((x, y))) is not None and both.adjacent)
    return [columns for run in runs if (columns := _columns_of(run)) is not None]


def _columns_of(layers: Sequence[nn.Module]) -> Columns | None:
    """Return the columns of layers, or None if they are of different kinds."""
    weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
    biases = [x for layer in layers if (x := layer._parameters.get("bias")) is not None]
    kinds = {_kind(weight) for weight in weights}
    if len(kinds) != 1 or None in kinds or len(biases) not in (0, len(layers)):
        return None
    first = weights[0]
    if not isinstance(first, QuantizedWeight):
        return Columns(weights=weights, scales=[], zeros=[], biases=biases, encoding="")
    scales, zeros = ([x for weight in weights if (x := getattr(weight, name)) is not None] for name in ("scales", "zero_points"))
    numbers = [weight.tensor for weight in weights]
    return Columns(weights=numbers, scales=scales, zeros=zeros, biases=biases, encoding=first.encoding)


def _kind(weight: Any) -> Hashable | None:
    if isinstance(weight, QuantizedWeight):
        narrow = weight.transposed and weight.packed is None and weight.tensor.dim() == 2 and weight.tensor.dtype not in FLOAT8
        factors = [None if x is None else (x.dtype, x.shape[0]) for x in (weight.scales, weight.zero_points)]
        return (weight.encoding, weight.dtype, weight.tensor.dtype, weight.device, *factors) if narrow else None
    is_plain = type(weight) is nn.Parameter and weight.layout is torch.strided and weight.is_contiguous() and weight.dim() == 2
    return (weight.dtype, weight.device, weight.shape[1]) if is_plain and weight.numel() and weight.is_floating_point() else None
