"""The arguments of one call of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..choice import Choice
from ..numerics.block_sparse import parts
from ..problem.operation import Operation
from .prepack import PackedOperand

EpilogueFunction = Callable[..., torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call of an operation, as the caller gave them.

    ``name`` is the public function's. ``operands`` are by role, in the row's order. ``scalars`` and ``options`` are those of the
    row. ``extra`` has the epilogue's operands, and ``extra_names`` their arguments. ``out_dtype`` is the dtype of the result unless
    the epilogue ends in a cast. None leaves it to the operation.
    """

    name: str
    operation: Operation
    operands: dict[str, torch.Tensor]
    scalars: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    packed: PackedOperand | None = None
    out: torch.Tensor | None = None
    epilogue: EpilogueFunction | None = None
    extra: tuple[torch.Tensor, ...] = ()
    extra_names: tuple[str, ...] = ()
    out_dtype: torch.dtype | None = None

    @property
    def a(self) -> torch.Tensor:
        return self.operands["a"]

    @property
    def b(self) -> torch.Tensor:
        """The right operand, as it was before ``prepack``."""
        return self.operands["b"]

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name of its argument. A block-sparse weight is read by its parts."""
        row = self.operation
        read = [
            (row.argument(role), part)
            for role, x in self.operands.items()
            for part in (parts(x) if row.sparse and role == "b" else (x,))
        ]
        return [*read, *zip(self.extra_names, self.extra, strict=True)]

    def tensors_for(self, choice: Choice) -> tuple[torch.Tensor, ...]:
        """Return the tensors for a kernel of the choice: all operands, a prepacked b in the choice's own format."""
        b = self.packed.for_choice(choice) if self.packed is not None else self.b
        return (*(self.operands | {"b": b}).values(), *self.extra)

    @property
    def wants_grad(self) -> list[str]:
        """Names of the arguments that require a gradient. Empty if gradients are off."""
        if not torch.is_grad_enabled():
            return []
        return [name for name, x in self.inputs if isinstance(x, torch.Tensor) and x.requires_grad]


def transposed_operand(x: Any) -> Any:
    """Return x, which broadcasts to a matrix, such that it broadcasts to the transposed matrix; anything else unchanged."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.dim() > 2:
        return x
    if x.dim() == 1:
        return x.unsqueeze(-1)
    return x.squeeze(-1) if x.shape[1] == 1 and x.shape[0] != 1 else x.t()
