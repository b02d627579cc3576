"""Translations of the functions that a Python epilogue may call into nodes of the epilogue's graph.

An entry of FUNCTIONS takes a GraphBuilder, followed by the arguments of the torch function under torch's names. The tracer handles
``inplace`` itself. An entry returns the Ref of the result. Keys are torch's names of functions in torch, torch.nn.functional and
torch.special, of tensor methods and of operators. Equal names mean the same function.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import EpilogueError
from .dtypes import DTYPES
from .epilogue import OPERATIONS, Arg, Node, Ref

Function = Callable[..., Ref]

_COMMUTATIVE = ("add", "mul", "eq", "ne")
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_TAKES_BOOL = {"where": (0,)}
"""Positions of arguments that are conditions. Elsewhere a boolean counts as 0 or 1."""


class GraphBuilder:
    """The nodes made so far, each with a sample: a one-element CPU tensor whose dtype and rank show torch's promotion."""

    def __init__(self, acc_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> None:
        self.nodes: list[Node] = []
        self.samples: list[torch.Tensor] = []
        self._known: dict[object, Ref] = {}
        self.acc = self._append("acc", (), torch.ones((1, 1), dtype=acc_dtype, device="cpu"))
        self.operands = [
            self._append("operand", (i,), torch.ones((1,) * x.dim(), dtype=x.dtype, device="cpu")) for i, x in enumerate(operands)
        ]

    def dtype(self, value: Arg) -> torch.dtype | None:
        """Return the dtype of an earlier node, None for a number."""
        return self.nodes[value.index].dtype if isinstance(value, Ref) else None

    def emit(self, op: str, *args: Any) -> Ref:
        """Return the node for ``op``, shared with an equal earlier one. Raise EpilogueError for arguments that no node takes."""
        for arg in args:
            if not isinstance(arg, (Ref, bool, int, float)):
                raise EpilogueError(f"{op}: got an argument of type {type(arg).__name__}, expected a tensor or a Python number")
        # A bool becomes 0 or 1, and numpy.float64 a Python float: printers write a number by its repr.
        args = tuple(arg if isinstance(arg, Ref) else int(arg) if isinstance(arg, int) else float(arg) for arg in args)
        if not any(isinstance(arg, Ref) for arg in args):
            raise EpilogueError(f"{op}: got numbers only, expected the accumulator or an operand among the arguments")
        if len(args) == 2 and not isinstance(args[0], Ref) and (op in _COMMUTATIVE or op in _MIRRORED):
            op, args = _MIRRORED.get(op, op), args[::-1]
        args = self._without_booleans(op, args)
        sample = OPERATIONS[op](*(self.samples[a.index] if isinstance(a, Ref) else a for a in args))
        if sample.dtype not in DTYPES and sample.dtype != torch.bool:
            raise EpilogueError(
                f"{op}: the result would be {sample.dtype}, expected a float; write the numbers as floats, 1.0 for 1"
            )
        return self._append(op, args, sample)

    def cast(self, value: Ref, dtype: object) -> Ref:
        """Return ``value`` rounded to ``dtype``. Keep a cast to the same dtype, since a final cast decides the result's dtype."""
        if dtype not in DTYPES:
            raise EpilogueError(f"cast: got {dtype}, expected one of {', '.join(str(d) for d in DTYPES)}")
        assert isinstance(dtype, torch.dtype)
        return self._append("cast", (value,), self.samples[value.index].to(dtype))

    def _without_booleans(self, op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Cast comparison results to 0 or 1 in the dtype of the other arguments, so that printers need no boolean arithmetic."""
        if not any(self.dtype(a) == torch.bool for i, a in enumerate(args) if i not in _TAKES_BOOL.get(op, ())):
            return args
        dtype = next((d for a in args if (d := self.dtype(a)) not in (None, torch.bool)), self.nodes[0].dtype)
        return tuple(
            self.cast(a, dtype) if isinstance(a, Ref) and self.dtype(a) == torch.bool and i not in _TAKES_BOOL.get(op, ()) else a
            for i, a in enumerate(args)
        )

    def _append(self, op: str, args: tuple[Arg, ...], sample: torch.Tensor) -> Ref:
        # Keys use repr: 1, 1.0 and True are equal as keys, as are 0.0 and -0.0, but they differ in meaning.
        key = (op, tuple(map(repr, args)), sample.dtype)
        if key not in self._known:
            self._known[key] = Ref(len(self.nodes))
            self.nodes.append(Node(op=op, args=args, dtype=sample.dtype))
            self.samples.append(sample)
        return self._known[key]


def _unary(op: str) -> Function:
    return lambda g, input: g.emit(op, input)


def _binary(op: str) -> Function:
    return lambda g, input, other: g.emit(op, input, other)


def _scaled(g: GraphBuilder, value: Any, alpha: Any) -> Any:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return value
    return g.emit("mul", value, alpha) if isinstance(value, Ref) else value * alpha


def _add(g: GraphBuilder, input: Any, other: Any, *, alpha: Any = 1) -> Ref:
    return g.emit("add", input, _scaled(g, other, alpha))


def _sub(g: GraphBuilder, input: Any, other: Any, *, alpha: Any = 1) -> Ref:
    return g.emit("sub", input, _scaled(g, other, alpha))


def _div(g: GraphBuilder, input: Any, other: Any, *, rounding_mode: str | None = None) -> Ref:
    if rounding_mode is not None:
        raise EpilogueError(f"torch.div: got rounding_mode={rounding_mode!r}, expected None")
    return g.emit("div", input, other)


def _truediv(g: GraphBuilder, input: Any, other: Any) -> Ref:
    """Return ``input / other``. torch computes ``number / tensor`` as reciprocal times number, with two roundings."""
    if isinstance(input, Ref):
        return g.emit("div", input, other)
    reciprocal = g.emit("div", 1.0, other)
    return reciprocal if input == 1 else g.emit("mul", reciprocal, input)


def _pow(g: GraphBuilder, input: Any, exponent: Any) -> Ref:
    if isinstance(input, Ref) and isinstance(exponent, (int, float)):
        match float(exponent):
            case 0.5:
                return g.emit("sqrt", input)
            case -0.5:
                return g.emit("rsqrt", input)
            case 1.0:
                return input
            case 2.0:
                return g.emit("mul", input, input)
            case 3.0:
                return g.emit("mul", g.emit("mul", input, input), input)
            case -1.0:
                return g.emit("div", 1.0, input)
            case -2.0:
                return g.emit("div", 1.0, g.emit("mul", input, input))
    raise EpilogueError("torch.pow: expected a tensor and one of the exponents -2, -1, -0.5, 0.5, 1, 2, 3")


def _clamp(g: GraphBuilder, input: Any, min: Any = None, max: Any = None) -> Ref:
    """Return the clamped input. Tensor bounds act as maximum and minimum do: NaN propagates from either side."""
    if min is None and max is None:
        raise EpilogueError("torch.clamp: got neither min nor max, expected at least one of them")
    if isinstance(min, Ref) or isinstance(max, Ref):
        if isinstance(min, (int, float)) or isinstance(max, (int, float)):
            raise EpilogueError("torch.clamp: got a tensor and a number, expected bounds of the same kind; use two clamps")
        low = input if min is None else g.emit("maximum", input, min)
        return low if max is None else g.emit("minimum", low, max)
    return g.emit("clamp", input, -math.inf if min is None else min, math.inf if max is None else max)


def _extremum(op: str) -> Function:
    def call(g: GraphBuilder, input: Any, other: Any) -> Ref:
        if not (isinstance(input, Ref) and isinstance(other, Ref)):
            raise EpilogueError(f"torch.{op}: torch takes no number here; use torch.clamp(x, min=…, max=…)")
        return g.emit(op, input, other)

    return call


def _where(g: GraphBuilder, condition: Any, input: Any, other: Any) -> Ref:
    if g.dtype(condition) != torch.bool:
        raise EpilogueError(f"torch.where: got a condition of {g.dtype(condition)}, expected torch.bool, such as acc > 0")
    return g.emit("where", condition, input, other)


def _gelu(g: GraphBuilder, input: Any, *, approximate: str = "none") -> Ref:
    if approximate not in ("none", "tanh"):
        raise EpilogueError(f"torch.nn.functional.gelu: got approximate={approximate!r}, expected 'none' or 'tanh'")
    return g.emit("gelu_tanh" if approximate == "tanh" else "gelu", input)


def _to(g: GraphBuilder, input: Any, dtype: Any = None, **_how: bool) -> Ref:
    """Translate x.to(dtype), x.to(other tensor), x.type(dtype) and x.type_as(other tensor). Options of the copy have no effect."""
    if _how.keys() - {"copy", "non_blocking", "memory_format"}:
        raise EpilogueError(f"torch.Tensor.to: got {', '.join(_how)}, expected a dtype")
    target = g.dtype(dtype) if isinstance(dtype, Ref) else dtype
    if not isinstance(target, torch.dtype):
        raise EpilogueError(f"torch.Tensor.to: got {target!r}, expected a dtype: an epilogue moves nothing between devices")
    return g.cast(input, target)


def _cast_to(dtype: torch.dtype) -> Function:
    return lambda g, input: g.cast(input, dtype)


CASTS: dict[str, Function] = {
    **dict.fromkeys(("to", "type", "type_as"), _to), "float": _cast_to(torch.float32), "double": _cast_to(torch.float64),
    "half": _cast_to(torch.float16), "bfloat16": _cast_to(torch.bfloat16),
}  # fmt: skip
"""Functions that return their argument itself if it already has the dtype."""

_UNARY_ALIASES = {"negative": "neg", "absolute": "abs", "special_expit": "sigmoid", "special_erf": "erf"}
_BINARY_ALIASES = {
    "multiply": "mul", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
}  # fmt: skip
FUNCTIONS: dict[str, Function] = {
    **{name: _unary(name) for name in ("neg", "abs", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "relu", "relu6", "silu")},
    **{name: _binary(name) for name in ("mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{alias: _unary(name) for alias, name in _UNARY_ALIASES.items()},
    **{alias: _binary(name) for alias, name in _BINARY_ALIASES.items()},
    "reciprocal": lambda g, input: g.emit("div", 1.0, input),
    "square": lambda g, input: g.emit("mul", input, input),
    **dict.fromkeys(("pos", "positive"), lambda g, input: input),  # noqa: ARG005 - adds no node
    "add": _add,
    **dict.fromkeys(("sub", "subtract"), _sub),
    "rsub": lambda g, input, other, *, alpha=1: _sub(g, other, input, alpha=alpha),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    "truediv": _truediv,
    "pow": _pow,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda g, input, min: _clamp(g, input, min=min),
    "clamp_max": lambda g, input, max: _clamp(g, input, max=max),
    "hardtanh": lambda g, input, min_val=-1.0, max_val=1.0: _clamp(g, input, min_val, max_val),
    **dict.fromkeys(("minimum", "min"), _extremum("minimum")),
    **dict.fromkeys(("maximum", "max"), _extremum("maximum")),
    "where": _where,
    "masked_fill": lambda g, input, mask, value: _where(g, mask, value, input),
    "leaky_relu": lambda g, input, negative_slope=0.01: g.emit(
        "where", g.emit("gt", input, 0), input, g.emit("mul", input, negative_slope)
    ),
    "gelu": _gelu,
    **CASTS,
}
"""Every function, method and operator that an epilogue may call, by torch's name."""


def usable_names() -> str:
    """Return the usable names for an error message, without aliases."""
    special = ("add", "sub", "mul", "div", "pow", "square", "reciprocal", "clamp", "hardtanh", "leaky_relu", "masked_fill", "to")
    return ", ".join(sorted({*special, *(op for op in OPERATIONS if op in FUNCTIONS)}))
