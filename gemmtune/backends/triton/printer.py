"""Printer of epilogue graphs as Triton statements, one for each node."""

import math
from collections.abc import Sequence

import torch

from ...errors import EpilogueError
from ...problem import Epilogue
from ...problem.epilogue import Arg, Node, Ref

PACKAGE = "gemmtune.backends.triton"
TRITON_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}  # fmt: skip
"""Triton name of each torch dtype."""


def cast(name: str, dtype: torch.dtype, *, interpret: bool) -> str:
    """Return an expression for ``name`` rounded to ``dtype``."""
    if dtype == torch.bool:
        return f"({name} != 0)"
    if interpret and dtype == torch.bfloat16:
        return f"round_bfloat16({name}.to(tl.float32))"
    return f"{name}.to({TRITON_DTYPES[dtype]})"


def _tanh_series(terms: int) -> list[float]:
    """Return c with tanh(x) = x · Σ c[n]·x^2n, from tanh' = 1 − tanh²."""
    c = [1.0]
    for n in range(1, terms):
        c.append(-sum(c[i] * c[n - 1 - i] for i in range(n)) / (2 * n + 1))
    return c


TANH_SERIES = _tanh_series(14)
TANH_SERIES_REACH = 0.3
"""Largest |x| for which the interpreter's tanh uses the series: the next term is below float64's rounding."""
_HALF = (torch.float16, torch.bfloat16)
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_INFIX = {"add": "+", "sub": "-", "mul": "*"}


def print_epilogue(epilogue: Epilogue, acc: str, operands: Sequence[str], result: str, *, interpret: bool = False) -> list[str]:
    """Return statements that leave the value of the last node in ``result``. Raises EpilogueError if one has no Triton form.

    ``acc`` and ``operands`` name the accumulator and the loaded operands, in their dtypes. 16-bit nodes are computed in float32 and
    rounded. NaN propagates as in torch: each comparison is false where torch keeps the NaN. ``interpret`` avoids device libraries.
    """
    names: list[str] = []
    lines: list[str] = []
    for index, node in enumerate(epilogue.nodes):
        match node.op:
            case "acc":
                names.append(acc)
            case "operand":
                names.append(operands[int(_number(node.args[0]))])
            case _:
                names.append(f"{result}_{index}")
                lines.append(f"{names[-1]} = {_Printer(epilogue.nodes, names, interpret).node(node)}")
    return [*lines, f"{result} = {names[-1]}"]


class _Printer:
    """Printer of one node's expression from the names of earlier nodes."""

    def __init__(self, nodes: Sequence[Node], names: Sequence[str], interpret: bool) -> None:
        self.nodes = nodes
        self.names = names
        self.interpret = interpret

    def node(self, node: Node) -> str:
        if node.op == "cast":
            return cast(self._name(node.args[0]), node.dtype, interpret=self.interpret)
        if node.op == "where":
            return self._where(node)
        if node.op in _COMPARISONS:
            x, y = (self._value(arg, self._compared_dtype(node), rounded=True) for arg in node.args)
            return f"{x} {_COMPARISONS[node.op]} {y}"
        compute = torch.float32 if node.dtype in _HALF else node.dtype
        args = [self._value(arg, compute) for arg in node.args]
        text = self._arithmetic(node.op, args, compute)
        return cast(f"({text})", node.dtype, interpret=self.interpret) if node.dtype in _HALF else text

    def _where(self, node: Node) -> str:
        condition, x, y = node.args
        test = self._name(condition)
        if self._dtype(condition) is not torch.bool:
            test = f"({test} != 0)"
        return f"tl.where({test}, {self._value(x, node.dtype)}, {self._value(y, node.dtype)})"

    def _compared_dtype(self, node: Node) -> torch.dtype:
        """Return torch's comparison dtype: the promoted dtype of the tensors. Python numbers promote only across kinds."""
        dtypes = [self._dtype(arg) for arg in node.args if isinstance(arg, Ref)]
        dtype = dtypes[0] if len(dtypes) == 1 else torch.promote_types(dtypes[0], dtypes[1])
        if not dtype.is_floating_point and any(isinstance(arg, float) for arg in node.args):
            return torch.float32
        return dtype

    def _arithmetic(self, op: str, args: list[str], dtype: torch.dtype) -> str:
        if op in _INFIX:
            return f"{args[0]} {_INFIX[op]} {args[1]}"
        x, y = args[0], args[1] if len(args) > 1 else ""
        zero, half, one = (_literal(value, dtype) for value in (0.0, 0.5, 1.0))
        match op:
            case "div":
                return self._divide(x, y, dtype)
            case "neg":
                return f"-{x}"
            case "abs" | "exp" | "rsqrt" | "erf":
                return f"tl.{op}({x})"
            case "sqrt":
                return f"tl.sqrt_rn({x})" if dtype == torch.float32 else f"tl.sqrt({x})"
            case "sigmoid" | "silu":
                return self._divide(one if op == "sigmoid" else x, f"({one} + tl.exp(-{x}))", dtype)
            case "tanh":
                return self._tanh(x, dtype)
            case "relu":
                return f"tl.where({x} < 0, {zero}, {x})"
            case "relu6":
                return _bounded("<", _bounded(">", x, zero), _literal(6.0, dtype))
            case "gelu":
                return f"{half} * {x} * ({one} + tl.erf({x} * {_literal(math.sqrt(0.5), dtype)}))"
            case "gelu_tanh":
                inner = f"({_literal(math.sqrt(2 / math.pi), dtype)} * ({x} + {_literal(0.044715, dtype)} * {x} * {x} * {x}))"
                return f"{half} * {x} * ({one} + {self._tanh(inner, dtype)})"
            case "clamp":
                return _bounded("<", _bounded(">", x, y), args[2])
            case "minimum" | "maximum":
                return _bounded("<" if op == "minimum" else ">", x, y)
        raise EpilogueError(f"epilogue: the Triton printer has no form for {op!r}")

    def _divide(self, x: str, y: str, dtype: torch.dtype) -> str:
        """Return a correctly rounded division, as in torch. Triton's own ``/`` is within 2 ulp in float32."""
        return f"tl.div_rn({x}, {y})" if dtype == torch.float32 else f"{x} / {y}"

    def _tanh(self, x: str, dtype: torch.dtype) -> str:
        if not self.interpret:
            return f"libdevice.tanh({x})"
        one = _literal(1.0, dtype)
        decay = f"tl.exp(-(tl.abs({x}) + tl.abs({x})))"
        large = f"tl.where({x} < 0, -{one}, {one}) * ({one} - {decay}) / ({one} + {decay})"
        square, series = f"({x} * {x})", _literal(TANH_SERIES[-1], dtype)
        for coefficient in reversed(TANH_SERIES[:-1]):
            series = f"({_literal(coefficient, dtype)} + {square} * {series})"
        return f"tl.where(tl.abs({x}) < {_literal(TANH_SERIES_REACH, dtype)}, {x} * {series}, {large})"

    def _name(self, arg: Arg) -> str:
        if not isinstance(arg, Ref):
            return _literal(arg, torch.bool if isinstance(arg, bool) else torch.float32)
        return self.names[arg.index]

    def _dtype(self, arg: Arg) -> torch.dtype:
        return self.nodes[arg.index].dtype if isinstance(arg, Ref) else torch.bool if isinstance(arg, bool) else torch.float32

    def _value(self, arg: Arg, dtype: torch.dtype, *, rounded: bool = False) -> str:
        """Return an argument in ``dtype``, with Python numbers ``rounded`` to it even if arithmetic would keep them exact."""
        wide = torch.float32 if dtype in _HALF else dtype
        if isinstance(arg, Ref):
            name = self.names[arg.index]
            return name if self.nodes[arg.index].dtype == wide else cast(name, wide, interpret=self.interpret)
        value = torch.tensor(arg, dtype=dtype).item() if rounded else arg
        return _literal(value, wide)


def _bounded(sign: str, x: str, y: str) -> str:
    """Return min (<) or max (>) with torch's NaN rule: NaN if either operand is NaN."""
    return f"tl.where(({x} {sign} {y}) | ({x} != {x}), {x}, {y})"


def _literal(value: float, dtype: torch.dtype) -> str:
    """Return a typed constant, because some of Triton's functions round a bare Python float to float32."""
    number = float(value) if dtype.is_floating_point else value
    text = f'float("{number}")' if isinstance(number, float) and not math.isfinite(number) else repr(number)
    return f"tl.full((), {text}, {TRITON_DTYPES[dtype]})"


def _number(arg: Arg) -> float:
    if isinstance(arg, Ref):
        raise EpilogueError(f"epilogue: expected an operand's number, got a reference to node {arg.index}")
    return arg
