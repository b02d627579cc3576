"""The epilogue as a value: a small graph of pointwise torch functions over the accumulator and extra operands.

The graph is made from a Python function by ``trace.py``; templates print it (one printer for each language); ``evaluate`` runs it
with torch, one call for each node, which is what the unfused way costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .layout import Layout


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node of the graph."""

    index: int


Arg = Ref | float | int | bool
"""An argument of a node: an earlier node, or a Python number, which promotes dtypes weakly as in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One step: ``op`` applied to ``args``, its result rounded to ``dtype``.

    ``op`` is ``acc`` (the accumulator; no args), ``operand`` (one int: which extra operand), ``cast`` (one Ref; the target is
    ``dtype``) or a name in OPERATIONS. ``dtype`` is what torch's promotion gives when the accumulator has the accumulator dtype. A
    node of a 16-bit dtype is computed in float32 and then rounded, as torch's eager kernels do.
    """

    op: str
    args: tuple[Arg, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """A pointwise function of the accumulator: nodes in order of evaluation, the last one is the result.

    ``operands`` are the layouts of the extra operands as given by the caller, each broadcastable to the output.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Layout, ...] = ()

    @property
    def result_dtype(self) -> torch.dtype | None:
        """The dtype that the function asks for by ending in a cast, else None (the operation's own)."""
        return self.nodes[-1].dtype if self.nodes[-1].op == "cast" else None

    def __str__(self) -> str:
        text: list[str] = []
        for node in self.nodes:
            args = ", ".join(text[a.index] if isinstance(a, Ref) else repr(a) for a in node.args)
            match node.op:
                case "acc":
                    text.append("acc")
                case "operand":
                    text.append(f"x{node.args[0]}")
                case "cast":
                    text.append(f"{args}.to({str(node.dtype).removeprefix('torch.')})")
                case _:
                    text.append(f"{node.op}({args})")
        return text[-1]


def _as_tensor(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.maximum, minimum and where take no Python numbers: give them one of the other argument's dtype."""

    def call(*args: torch.Tensor | float) -> torch.Tensor:
        like = next(a for a in reversed(args) if isinstance(a, torch.Tensor))
        return function(
            *(a if isinstance(a, torch.Tensor) else torch.full((), a, dtype=like.dtype, device=like.device) for a in args)
        )

    return call


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "relu": torch.relu, "relu6": torch.nn.functional.relu6, "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu, "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "clamp": torch.clamp, "minimum": _as_tensor(torch.minimum), "maximum": _as_tensor(torch.maximum), "where": torch.where,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
"""Every function that an epilogue may use, by its name in the graph. NaN goes through all of them as in torch, so
``relu(nan) = nan`` and ``minimum(nan, 0) = nan``. ``clamp`` has both bounds (-inf or inf where the caller gave none)."""


_INTO: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "neg", "abs")},
    **{name: getattr(torch, name) for name in ("exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf")},
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "relu6": lambda x, out: torch.clamp(x, 0, 6, out=out),
    "clamp": lambda x, low, high, out: torch.clamp(x, low, high, out=out),
    "gelu": lambda x, out: torch._C._nn.gelu(x, out=out),  # type: ignore[call-arg]
    "gelu_tanh": lambda x, out: torch._C._nn.gelu(x, approximate="tanh", out=out),  # type: ignore[call-arg]
    "silu": lambda x, out: torch._C._nn.silu(x, out=out),  # type: ignore[call-arg]
}  # fmt: skip
"""The functions that can write their result where it is wanted, taking ``out``."""


def evaluate(
    epilogue: Epilogue, acc: torch.Tensor, operands: Sequence[torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the epilogue with torch, one call for each node.

    ``acc`` is the GEMM's result in any float dtype: with the accumulator dtype this is the fused meaning, with the output dtype it
    is what a caller gets who applies the function after the GEMM. ``operands`` are tensors that broadcast to ``acc``.
    Returns the value of the last node, of that node's own dtype; or ``out``, which may be ``acc`` itself, with that value in it.
    """
    values: list[torch.Tensor] = []
    last = len(epilogue.nodes) - 1
    for i, node in enumerate(epilogue.nodes):
        args = [values[a.index] if isinstance(a, Ref) else a for a in node.args]
        dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
        match node.op:
            case "acc":
                values.append(acc)
            case "operand":
                values.append(operands[int(args[0])])
            case "cast":
                values.append(args[0].to(node.dtype))  # type: ignore[union-attr]
            # Not into a strided tensor: torch's CPU kernel of gelu ignores the strides of ``out``.
            case op if i == last and op in _INTO and out is not None and out.is_contiguous() and dtypes == {out.dtype}:
                return _INTO[op](*args, out=out)
            case _:
                values.append(OPERATIONS[node.op](*args))
    return values[-1] if out is None else out.copy_(values[-1])
