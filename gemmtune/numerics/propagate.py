"""Error propagation through an epilogue: every node of the graph becomes a value with an error bound.

The value is f(R) in float64, except that a cast rounds an exact argument. The bound covers the incoming error and the error
of a correct evaluation of each function in the node's precision. If a comparison may go either way, both branches count. If
any value may come out, because a pole or an overflow is within reach, the bound is infinite.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..problem import Epilogue
from ..problem.dtypes import DTYPES, dtype_info
from ..problem.epilogue import OPERATIONS, Arg, Node, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximate:
    """``value`` ± ``error``, float64.

    A computed NaN is expected where ``value`` is NaN and ``error`` finite. The ``value`` of a comparison is boolean, and
    its ``error`` is infinite where the other answer is correct too.
    """

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exactly(cls, value: torch.Tensor) -> "Approximate":
        """Return ``value`` without an error."""
        return cls(value=value, error=torch.zeros_like(value))


Rule = Callable[[torch.Tensor, Sequence[Approximate]], torch.Tensor]
"""Function of (value, arguments) that returns the error of the value caused by the errors of the arguments."""


def propagate(
    epilogue: Epilogue,
    acc: Approximate,
    operands: Sequence[torch.Tensor | Approximate],
    *,
    precision: torch.dtype,
    flush: bool,
    reference_is_float64: bool,
) -> Approximate:
    """Return f(acc, *operands) with its error bound.

    ``operands`` broadcast to ``acc`` and are exact unless they carry errors. ``precision`` is the type to which the
    accumulator is rounded before the epilogue. With a narrow one every node may be rounded to it. ``reference_is_float64``
    states that the kernel is no less precise than this function, whose errors then count too.
    """
    values: list[Approximate] = []
    for node in epilogue.nodes:
        match node.op:
            case "acc":
                values.append(acc)
            case "operand":
                given = operands[int(node.args[0])]  # type: ignore[arg-type]
                if isinstance(given, Approximate):
                    values.append(given)
                    continue
                value = given.double()
                values.append(Approximate(value=value, error=torch.zeros((), dtype=torch.float64, device=value.device)))
            case "cast":
                source = _argument(node.args[0], values, precision)
                if source.value.dtype == torch.bool:  # a comparison as 0 or 1, which is at most 1 from the other answer
                    source = Approximate(value=source.value.double(), error=source.error.clamp(max=1.0))
                values.append(_with_overflow(rounded(source, node.dtype, flush=flush), node.dtype, [source]))
            case _:
                # The coarser of the node's type and the type to which the accumulator was rounded.
                own = node.dtype if node.dtype in DTYPES else torch.float32
                held = max((own, precision), key=lambda dtype: dtype_info(dtype).unit_roundoff)
                args = [_argument(a, values, held) for a in node.args]
                values.append(_step(node, args, held, flush, 2 if reference_is_float64 else 1))
    return values[-1]


def rounded(x: Approximate, dtype: torch.dtype, *, flush: bool) -> Approximate:
    """Return x rounded to ``dtype``: exact where x has no error, else with half a unit in the last place more error."""
    info = dtype_info(dtype)
    tiny = info.smallest_normal if flush else info.smallest_subnormal / 2
    value = torch.where(x.error > 0, x.value, x.value.to(dtype).double())
    spread = x.error + info.unit_roundoff * (x.value.abs() + x.error) + tiny
    return Approximate(value=value, error=torch.where(x.error > 0, spread, tiny if flush else 0.0))


def _argument(arg: Arg, values: Sequence[Approximate], precision: torch.dtype) -> Approximate:
    """Return an earlier node, or a number with the error of its rounding to the node's precision."""
    if isinstance(arg, Ref):
        return values[arg.index]
    device = values[0].value.device
    held = torch.tensor(arg, dtype=precision).item()
    error = 0.0 if arg == held or not math.isfinite(arg) else abs(held - arg)
    # torch.full fills on the device, where torch.tensor would copy and wait
    value, spread = (torch.full((), x, dtype=torch.float64, device=device) for x in (float(arg), error))
    return Approximate(value=value, error=spread)


def _step(node: Node, args: Sequence[Approximate], precision: torch.dtype, flush: bool, factor: int) -> Approximate:
    given = [a.value.double() for a in args]
    value = torch.where(given[0].bool(), given[1], given[2]) if node.op == "where" else OPERATIONS[node.op](*given)
    if node.op in _COMPARISONS:
        margin = args[0].error + args[1].error
        certain_nan = (given[0].isnan() & args[0].error.isfinite()) | (given[1].isnan() & args[1].error.isfinite())
        either = (margin > 0) & ~((given[0] - given[1]).abs() > margin) & ~certain_nan
        return Approximate(value=value, error=torch.where(either, math.inf, 0.0).to(torch.float64))
    carried = _RULES[node.op](value, args)
    exact = _exactly_rounded(node, value, args, precision)
    info, computed = dtype_info(precision), dtype_info(torch.float64 if precision == torch.float64 else torch.float32)
    own = factor * _EVALUATION[node.op](value, args) * computed.unit_roundoff
    if node.op in _ROUNDED:
        own = own + info.unit_roundoff * (value.abs() + carried)
        own = own + (info.smallest_normal if flush else info.smallest_subnormal)
    value = torch.where(exact, value.to(precision).double(), value)
    error = torch.where(exact, 0.0, torch.where(carried == math.inf, math.inf, carried + own))
    return _with_overflow(Approximate(value=value, error=error), precision, args if node.op != "where" else ())


def _exactly_rounded(node: Node, value: torch.Tensor, args: Sequence[Approximate], precision: torch.dtype) -> torch.Tensor:
    """Return where a sum or product of exact arguments is exact in float32, so that one rounding gives one result."""
    if node.op not in ("add", "sub", "mul") or node.dtype != precision or precision == torch.float64:
        return torch.zeros((), dtype=torch.bool, device=value.device)
    return (args[0].error == 0) & (args[1].error == 0) & (value.float().double() == value)


def _with_overflow(x: Approximate, dtype: torch.dtype, args: Sequence[Approximate]) -> Approximate:
    """Set ``error`` to infinity where the value may not fit ``dtype`` or an argument may be anything, to 0 for certain NaN."""
    value, error = x.value, x.error
    anything = torch.zeros((), dtype=torch.bool, device=value.device)
    for arg in args:
        anything = anything | (arg.error == math.inf)
    anything = anything | (error == math.inf) | (value.abs() + error > torch.finfo(dtype).max)
    settled = torch.where(value.isnan(), 0.0, torch.nan_to_num(error, nan=math.inf, posinf=math.inf))
    return Approximate(value=value, error=torch.where(anything, math.inf, settled))


def _through(slope: float) -> Rule:
    """Return the rule of a function of one argument whose derivative is at most ``slope``."""
    return lambda _, args: args[0].error * slope


def _largest(_: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    error = args[0].error
    for arg in args[1:]:
        error = torch.maximum(error, arg.error)
    return error


def _product(_: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    x, y = args
    return x.value.abs() * y.error + y.value.abs() * x.error + x.error * y.error


def _quotient(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    x, y = args
    room = y.value.abs() - y.error
    return torch.where(room <= 0, math.inf, (x.error + value.abs() * y.error) / room)  # a NaN stays a NaN


def _root(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    x, e = args[0].value, args[0].error
    across = (x - e < 0) & (x + e >= 0)
    return torch.where(across, math.inf, value - torch.sqrt((x - e).clamp_min(0)))


def _reciprocal_root(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    x, e = args[0].value, args[0].error
    across = (x - e <= 0) & (x + e >= 0)
    return torch.where(across, math.inf, torch.rsqrt(x - e) - value)


def _selected(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    """Return the error of the branch taken, plus the distance to the other branch if the condition may go either way."""
    condition, x, y = args
    error = torch.where(condition.value.bool(), x.error, y.error)
    either = condition.error == math.inf
    apart = torch.nan_to_num((x.value - y.value).abs(), nan=math.inf) + torch.maximum(x.error, y.error)
    return torch.where(either, apart * (1 + 2.0**-50), error).expand_as(value)


_RULES: dict[str, Rule] = {
    "add": lambda _, args: args[0].error + args[1].error,
    "sub": lambda _, args: args[0].error + args[1].error,
    "exp": lambda value, args: value * torch.expm1(args[0].error),
    "mul": _product, "div": _quotient, "sqrt": _root, "rsqrt": _reciprocal_root,
    "neg": _through(1), "abs": _through(1), "relu": _through(1), "relu6": _through(1), "tanh": _through(1),
    "sigmoid": _through(0.25), "erf": _through(1.13), "silu": _through(1.1), "gelu": _through(1.13), "gelu_tanh": _through(1.13),
    "clamp": _largest, "minimum": _largest, "maximum": _largest, "where": _selected,
}  # fmt: skip

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ROUNDED = frozenset(_RULES) - {"neg", "abs", "relu", "relu6", "clamp", "minimum", "maximum", "where"}
"""Operations whose result has to be rounded. The others pick a value or change a sign."""

_Evaluation = Callable[[torch.Tensor, Sequence[Approximate]], torch.Tensor]


def _units(count: float) -> _Evaluation:
    """Return a rule of ``count`` units in the last place."""
    return lambda value, _: count * value.abs()


def _by_exponential(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    """Return the error of exp(x) as 2^(x·log2(e)), which rounds its argument: |x| units, and a few for the function.

    The absolute term covers an exp(-x) that overflows inside, where the result is 0 instead of a very small number.
    """
    x = args[0].value.abs()
    return (8 + 2 * x) * value.abs() + x * 2.0**-100


def _by_difference(value: torch.Tensor, _: Sequence[Approximate]) -> torch.Tensor:
    """Return the error of tanh or erf as a difference from 1: a few units of 1 instead of the value."""
    return 8 * (1 + value.abs())


def _by_product(value: torch.Tensor, args: Sequence[Approximate]) -> torch.Tensor:
    """Return the error of x times a function that is a difference from 1 (gelu)."""
    return 8 * (args[0].value.abs() + value.abs())


_EVALUATION: dict[str, _Evaluation] = {
    **dict.fromkeys(_RULES, _units(0)),
    "div": _units(4), "sqrt": _units(4), "rsqrt": _units(4), "exp": _by_exponential, "sigmoid": _by_exponential,
    "silu": _by_exponential, "tanh": _by_difference, "erf": _by_difference, "gelu": _by_product, "gelu_tanh": _by_product,
}  # fmt: skip
"""Error of each function in roundoffs of its type: 2 units (CUDA C++ Programming Guide), and room for other formulas."""
