"""Products of a model's weights: their classes, each of which has one table for every number of rows."""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import settings
from ..problem import Problem
from ..problem.rows import RowClass, row_classes
from ..quantized.weight import QuantizedWeight
from .defaults import ROWS
from .modules import is_conv1d, is_linear
from .record import record
from .sparsify import is_sparse


def classes_of(model: nn.Module) -> list[RowClass]:
    """Return the classes of the model's linear layers and HF's Conv1D, without a run of the model.

    Block-sparse weights have none, because the rows of an input are the columns of such a product. Weights without memory here,
    such as offloaded or sharded ones, are left out.
    """
    layers: dict[Hashable, Any] = {}
    for module in model.modules():
        if (is_linear(module) or is_conv1d(module)) and not is_sparse(module) and (look := _look(module)) is not None:
            layers.setdefault(look, module)
    with torch.no_grad(), record() as recording:
        for module in layers.values():  # some rows by each weight, as the layer's forward does, without its hooks
            weight, by_columns = module.weight, is_conv1d(module)
            x = torch.zeros(ROWS, weight.shape[0 if by_columns else 1], dtype=weight.dtype, device=weight.device)
            if by_columns:
                type(module).forward(module, x)
            else:
                functional.linear(x, weight, module.bias)
    return list(dict.fromkeys(found[0] for p in recording.problems() if p.k > 1 and (found := row_classes(p))))


def _look(module: nn.Module) -> Hashable | None:
    """Return all properties on which a layer's class may depend, or None for a layer without a class."""
    weight: Any = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if isinstance(weight, QuantizedWeight):
        parts = weight.parts
        kind: tuple[Hashable, ...] = (weight.transposed, weight.dtype, weight.encoding)
    else:
        parts, kind = [x for x in (weight, bias) if x is not None], (is_conv1d(module),)
        if weight is None or any(type(x) is not nn.Parameter or x.layout is not torch.strided for x in parts):
            return None
    if weight.dim() != 2 or not weight.numel() or any(x.device.type not in ("cpu", "cuda") for x in parts):
        return None
    computed = None if "bias" in module._parameters else module  # a bias that is no Parameter: no other layer looks like this one
    return (*kind, bias is None, computed, *((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in parts))


def tables_and_singles(model: nn.Module, problems: Iterable[Problem]) -> tuple[dict[RowClass, list[int]], list[Problem]]:
    """Split the products of a run into the classes of weights, with the Ms that the run showed, and all other products.

    A product is a weight's if its N and K are those of a Parameter: autocast multiplies by a copy of another dtype. With the
    setting ``rows="exact"``, which uses no tables, none is.
    """
    if settings.current().rows != "shared":
        return {}, list(problems)
    matrices = {size for x in model.parameters() if x.dim() > 1 for size in (x.shape[-2:], x.shape[:-3:-1])}
    tables: dict[RowClass, list[int]] = {}
    singles: list[Problem] = []
    of_one_row: list[Problem] = []
    for p in problems:
        found = row_classes(p) if _may_be_a_weights(p) and (p.n, p.k) in matrices else ()
        if not found:
            singles.append(p)
        elif p.m == 1:
            of_one_row.append(p)
        else:
            tables.setdefault(found[0], []).append(p.m)
    known = {*tables, *(classes_of(model) if of_one_row else ())}
    for p in of_one_row:  # an operand of one row may follow M or not: prefer a class that other rows show
        found = row_classes(p)
        tables.setdefault(next((x for x in found if x in known), found[0]), []).append(1)
    return tables, singles


def _may_be_a_weights(p: Problem) -> bool:
    """Return True for a product with whole rows: the distance of strided ones depends on the input, not on the weight."""
    return p.a.stride[-2:] == (p.k, 1) and p.k > 1 and p.epilogue is None and not p.operation.batched and not p.operation.sparse
