"""Linear layers of vLLM whose weight is not quantized.

vLLM's linear method is asked at two moments. When a layer's weight is loaded, we decide by its table. When the layer runs, a graph
gets our operator, which looks up the kernel at each run: ``torch.compile`` cannot keep the choice for the M that it traced.
The operator reads the weight of the layer itself, so that a weight that vLLM loads again is used at once.
"""

from typing import Any

import torch
from torch.nn import functional

from ...dispatch.checks import why_not_ours
from ...errors import InvalidProblemError
from ...operators import library as library  # defines torch.ops.gemmtune
from ...problem import Problem
from .. import invariant as _  # noqa: F401 - defines gemmtune::invariant_linear
from ..defaults import ROWS
from ..eager import scalars_of
from ..picks import stated
from .points import Points
from .tables import invariant, note, unserved

Tensor = torch.Tensor
OP = "gemmtune_op"
"""Attribute of a layer that we run, with the operation that has a table: ``mm``, ``addmm`` or ``invariant``."""
_OURS = "gemmtune_original"
"""Attribute of a function that stands in a linear method of vLLM, with vLLM's own."""


def take_over(method: Any, points: Points) -> None:
    """Let a linear method run layers by our tables, and all others as before. A second call changes nothing."""
    if hasattr(method.apply, _OURS):
        return
    process, apply = method.process_weights_after_loading, method.apply

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        op = operation_for(layer, points)
        setattr(layer, OP, op)
        if op and points.device_type == "cpu":
            layer.cpu_linear = functional.linear  # vLLM would pack the weight and drop it
        else:
            process(self, layer)

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        op = getattr(layer, OP, "")
        if op:
            return product(op, x, layer.weight, bias)
        return apply(self, layer, x, bias)  # type: ignore[no-any-return]

    for name, ours, theirs in (
        ("process_weights_after_loading", process_weights_after_loading, process),
        ("apply", apply_weights, apply),
    ):
        setattr(ours, _OURS, theirs)
        setattr(method, name, ours)


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


def operation_for(layer: Any, points: Points) -> str:
    """Return the operation by whose table we run a layer, or an empty text if vLLM runs it."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.is_meta or getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return ""
    ops = ("addmm", "mm") if isinstance(bias, Tensor) and bias.dim() == 1 and not invariant(points) else ("mm",)
    for op in ops:
        if not unserved(lambda op=op: _problem(op, weight, bias), points, defaults=True):  # type: ignore[misc]
            found = "invariant" if invariant(points) else op
            return found if note(points, f"{found} {list(weight.shape)} {weight.dtype}") else ""
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
