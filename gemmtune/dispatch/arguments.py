"""The arguments of one call of an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..problem.operations import QUANTIZED_OPS, ROLES, Encoding, Op
from .fallback import torch_call, torch_quantized, torch_sum
from .prepack import PackedOperand

__all__ = ["Call"]

EpilogueFunction = Callable[..., torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call of an operation, as the caller gave them.

    ``name`` is what the caller called and ``extra_names`` are the arguments that ``extra`` came from, where those are not ``op``
    and ``epilogue_args``. ``out_dtype`` is that of the result, unless the epilogue ends in a cast; None leaves it to the operation.
    """

    op: Op
    a: torch.Tensor
    b: torch.Tensor
    packed: PackedOperand | None = None
    inp: torch.Tensor | None = None
    alpha: float = 1
    beta: float = 0
    out: torch.Tensor | None = None
    epilogue: EpilogueFunction | None = None
    extra: tuple[torch.Tensor, ...] = ()
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    zero_b: torch.Tensor | None = None
    encoding: Encoding = ""
    fast_accum: bool = False
    out_dtype: torch.dtype | None = None
    name: str = ""
    extra_names: tuple[str, ...] = ()
    c: torch.Tensor | None = None
    d: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.name = self.name or self.op
        rest = len(self.extra) - len(self.extra_names)
        self.extra_names += tuple(f"epilogue_args[{i}]" for i in range(rest))

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The operands that are given, by role, in the order in which kernels get them."""
        return {role: x for role in ROLES if (x := getattr(self, role)) is not None}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """``operands`` without their names."""
        return tuple(self.operands.values())

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name of its argument."""
        return [*self.operands.items(), *zip(self.extra_names, self.extra, strict=True)]

    @property
    def needs_grad(self) -> bool:
        """The result has to be differentiable."""
        return torch.is_grad_enabled() and any(x.requires_grad for _, x in self.inputs)

    def by_torch(self) -> torch.Tensor:
        """The call as torch does it."""
        if self.c is not None and self.d is not None:
            return torch_sum(self.a, self.b, self.c, self.d, self.out, self.epilogue, self.extra)
        if self.op in QUANTIZED_OPS:
            return torch_quantized(
                self.op,
                self.a,
                self.b,
                scale_a=self.scale_a,
                scale_b=self.scale_b,
                zero_b=self.zero_b,
                encoding=self.encoding,
                out_dtype=self.out_dtype,
                out=self.out,
                epilogue=self.epilogue,
                extra=self.extra,
                name=self.name,
            )
        return torch_call(self.op, self.a, self.b, self.inp, self.alpha, self.beta, self.out, self.epilogue, self.extra)
