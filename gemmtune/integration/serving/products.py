"""Products of layers whose weight is not quantized.

An engine asks twice. When a layer's weight is loaded, we decide by its table. When the layer runs, a graph gets our operator, which
looks up the kernel at each run: ``torch.compile`` cannot keep the choice for the M that it traced. The operator reads the weight of
the layer itself, so that a weight that is loaded again is used at once.
"""

from typing import Any

import torch

from ...dispatch.checks import why_not_ours
from ...errors import InvalidProblemError
from ...operators import library as library  # defines torch.ops.gemmtune
from ...problem import Problem
from .. import invariant as _  # noqa: F401 - defines gemmtune::invariant_linear
from ..defaults import ROWS
from ..eager import scalars_of
from ..picks import stated
from .tables import Engine, invariant, unserved

Tensor = torch.Tensor
OP = "gemmtune_op"
"""Attribute of a layer that we run, with the operation that has a table: ``mm``, ``addmm`` or ``invariant``."""


def product(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias by the table of the operation ``op``."""
    if op == "invariant":  # the table is that of the product alone
        result = torch.ops.gemmtune.invariant_linear(x, weight, None, True)
        return result if bias is None else result + bias  # type: ignore[no-any-return]
    rows, b = x.reshape(-1, x.shape[-1]), weight.t()
    if bias is not None and op == "addmm":
        result = torch.ops.gemmtune.addmm(bias, rows, b, may_tune=False)
    else:
        result = torch.ops.gemmtune.mm(rows, b, may_tune=False)
        result = result if bias is None else result + bias
    return result.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def operation_for(layer: Any, engine: Engine) -> str:
    """Return the operation by whose table we run a layer, or an empty text if the engine runs it."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.is_meta:
        return ""
    ops = ("addmm", "mm") if isinstance(bias, Tensor) and bias.dim() == 1 and not invariant(engine) else ("mm",)
    for op in ops:
        if not unserved(lambda op=op: _problem(op, weight, bias), engine, defaults=True):  # type: ignore[misc]
            return "invariant" if invariant(engine) else op
    return ""


def _problem(op: str, weight: Tensor, bias: Tensor | None) -> Problem:
    """Return the product of a layer with some rows. Raise InvalidProblemError if only torch has it."""
    with torch.no_grad():
        b = weight.detach().t()
        parts = [torch.empty(ROWS, b.shape[0], dtype=b.dtype, device=b.device), b]
        parts += [bias.detach()] if op == "addmm" and bias is not None else []
        problem = stated(op, parts, scalars_of(op), ())
    if problem is None:
        raise InvalidProblemError(f"torch alone has this product: {why_not_ours(parts, floats=True) or 'it is empty'}")
    return problem
