"""Printer of an epilogue graph as C++ statements for one element, one statement per node."""

import functools
import math
from collections.abc import Sequence

import torch

from ...errors import EpilogueError
from ...problem import Epilogue
from ...problem.epilogue import Arg, Node, Ref

COMPUTE_TYPES: dict[torch.dtype, str] = {
    torch.float64: "double", torch.float32: "float", torch.float16: "float", torch.bfloat16: "float", torch.bool: "bool",
}  # fmt: skip
"""C++ type in which values of a torch dtype are computed."""

STORAGE_TYPES: dict[torch.dtype, str] = {
    torch.float64: "double", torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool",
}  # fmt: skip
"""C++ type of an element in memory."""

_ROUND = {torch.float16: "round_f16", torch.bfloat16: "round_bf16"}
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FUNCTIONS = (
    "abs", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "relu", "relu6", "silu", "gelu", "gelu_tanh", "clamp", "minimum",
    "maximum",
)  # fmt: skip
_ROUNDED_NUMBERS = (*_COMPARISONS, "add", "sub", "clamp", "minimum", "maximum", "where")
"""Functions for which torch on a CPU first rounds a Python number to the tensor's dtype. Other functions use the exact number."""


def print_epilogue(epilogue: Epilogue, acc: str, operands: Sequence[str], result: str) -> list[str]:
    """Return statements that assign the value of the last node to ``result``. Raises EpilogueError if one has no C++ form.

    ``acc`` and ``operands`` are expressions of the compute types. 16-bit nodes are computed in float and rounded to nearest even.
    NaN propagates as in torch.
    """
    names: list[str] = []
    lines: list[str] = []
    for index, node in enumerate(epilogue.nodes):
        if node.dtype not in COMPUTE_TYPES:
            raise EpilogueError(f"epilogue: the C++ printer has no type for {node.dtype}, expected a float dtype or bool")
        if node.op == "acc":
            names.append(acc)
        elif node.op == "operand":
            number = node.args[0]
            assert not isinstance(number, Ref)
            names.append(operands[int(number)])
        else:
            names.append(f"v{index}")
            lines.append(f"const {COMPUTE_TYPES[node.dtype]} {names[-1]} = {_expression(node, epilogue.nodes, names)};")
    return [*lines, f"{result} = {names[-1]};"]


def _expression(node: Node, nodes: Sequence[Node], names: Sequence[str]) -> str:
    dtype, compares = node.dtype, node.op in _COMPARISONS
    if compares:  # torch compares in the promoted dtype of the tensors
        dtype = functools.reduce(torch.promote_types, [nodes[arg.index].dtype for arg in node.args if isinstance(arg, Ref)])
    args = [_value(arg, dtype, nodes, names, rounded=node.op in _ROUNDED_NUMBERS) for arg in node.args]
    if node.op in _INFIX:
        text = f"{args[0]} {_INFIX[node.op]} {args[1]}"
    elif node.op in _FUNCTIONS:
        text = f"f_{node.op}({', '.join(args)})"
    elif node.op == "where":
        text = f"{_value(node.args[0], torch.bool, nodes, names, rounded=False)} ? {args[1]} : {args[2]}"
    elif node.op in ("cast", "neg"):
        text = f"{'-' if node.op == 'neg' else ''}{args[0]}"
    else:
        raise EpilogueError(f"epilogue: the C++ printer has no form for {node.op!r}")
    return f"{_ROUND[node.dtype]}({text})" if node.dtype in _ROUND else text


def _value(arg: Arg, dtype: torch.dtype, nodes: Sequence[Node], names: Sequence[str], *, rounded: bool) -> str:
    """Return an argument in the compute type of ``dtype``."""
    wanted = COMPUTE_TYPES[dtype]
    if not isinstance(arg, Ref):
        return _literal(torch.tensor(arg, dtype=dtype).item() if rounded else arg, wanted)
    name, own = names[arg.index], COMPUTE_TYPES[nodes[arg.index].dtype]
    if own == wanted:
        return name
    return f"({name} != 0)" if wanted == "bool" else f"{wanted}({name})"


def _literal(value: float, c_type: str) -> str:
    """Return an exact constant: C++17 has hexadecimal float literals."""
    if c_type == "bool":
        return "true" if value else "false"
    number = float(value)
    if math.isnan(number):
        return f'{c_type}(__builtin_nan(""))'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}{c_type}(__builtin_inf())"
    return f"{c_type}({number.hex()})"
