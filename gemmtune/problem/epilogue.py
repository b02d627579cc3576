"""The epilogue as a value: a small graph of pointwise torch functions over the accumulator and extra operands.

``trace.py`` makes the graph from a Python function. Templates print it, with one printer for each language. ``evaluate`` runs it
with torch, one call for each node, at the cost of an unfused epilogue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .layout import Layout


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to the value of an earlier node of the graph."""

    index: int


Arg = Ref | float | int | bool
"""An argument of a node: an earlier node, or a Python number, which promotes dtypes weakly as in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One step: ``op`` applied to ``args``, its result rounded to ``dtype``.

    ``op`` is ``acc`` (the accumulator, no args), ``operand`` (one int, the index of the extra operand), ``cast`` (one Ref) or a
    name in OPERATIONS. The target of a cast is ``dtype``. ``dtype`` follows torch's promotion, starting from the accumulator
    dtype. A node of a 16-bit dtype is computed in float32 and then rounded, as torch's eager kernels do.
    """

    op: str
    args: tuple[Arg, ...] = field(compare=False)
    dtype: torch.dtype
    text: tuple[str, ...] = field(init=False, repr=False)
    """The arguments as text, by which nodes are compared: -0.0 equals 0.0 but has another meaning, and NaN differs from itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", tuple(map(repr, self.args)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """A pointwise function of the accumulator. Nodes are in order of evaluation, and the last one is the result.

    ``operands`` are the layouts of the caller's extra operands. Each broadcasts to the output.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Layout, ...] = ()

    @property
    def result_dtype(self) -> torch.dtype | None:
        """The dtype of a cast that ends the function. None means the default of the operation."""
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
    """Wrap torch.maximum, minimum or where, which reject Python numbers: pass a tensor of the other argument's dtype."""

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
"""Every function that an epilogue may use, by its name in the graph. NaN propagates as in torch: ``relu(nan) = nan`` and
``minimum(nan, 0) = nan``. ``clamp`` always has both bounds, -inf or inf where the caller gave none."""


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
"""Functions that accept ``out`` and write their result there."""


def evaluate(
    epilogue: Epilogue, acc: torch.Tensor, operands: Sequence[torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the epilogue with torch, one call for each node.

    ``acc`` is the GEMM's result in any float dtype. In the accumulator dtype the result equals that of a fused kernel. In the
    output dtype it equals the function applied after the GEMM. ``operands`` are tensors that broadcast to ``acc``.
    Return the value of the last node in its own dtype. With ``out``, which may be ``acc``, write the value there and return it.
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
