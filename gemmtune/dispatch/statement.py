"""Problems of calls, the values that a call's arguments have without its tensors, and their reports to a recording in force."""

import contextlib
import dis
import itertools
import math
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..bounded import Bounded
from ..errors import InvalidProblemError
from ..problem import Epilogue, Layout, Problem, precision_of
from ..problem.dtypes import DTYPES, accumulator_dtype, dtype_name
from ..problem.functions import FUNCTIONS
from ..problem.fused import Then
from ..problem.operation import Operation
from ..problem.problem import scalar_class
from ..problem.trace import trace
from .arguments import Call
from .checks import apart, check_extra, check_out, overlaps
from .scalars import check_scalars


def stated(call: Call) -> Problem:
    """Return the Problem of a checked call that is about to run. Its tensors are brought to one device, and ``out`` is checked.

    Raises InvalidProblemError if operands or ``out`` do not fit, EpilogueError if the epilogue is not pointwise.
    """
    # 0-D tensors of another device go to the device of a, as in torch.
    device = call.a.device
    call.operands |= {role: x.to(device) for role, x in call.operands.items() if x.device != device}
    call.extra = tuple(x.to(device) for x in call.extra)
    problem = problem_of(call, epilogue_of(call))
    if call.out is not None:
        _prepare_out(call, problem)
    return problem


def _prepare_out(call: Call, problem: Problem) -> None:
    """Check ``out``. If it overlaps the added operand, as torch allows, read that operand from a copy."""
    assert call.out is not None
    if call.out.requires_grad and torch.is_grad_enabled():
        raise InvalidProblemError(
            f"{call.name}: out requires grad, but a call with out= is not differentiable; detach it or leave out out="
        )
    inp = call.operands.get("inp")
    if inp is not None and overlaps(call.out, inp):
        call.operands["inp"] = apart(inp)
    others = [(name, x) for name, x in call.inputs if name != "inp"]
    check_out(call.name, call.out, problem.out.size, problem.out.dtype, call.a.device, others)


def epilogue_of(call: Call) -> Epilogue | None:
    """Return the graph of the call's epilogue, None without one. Raises EpilogueError for one that is not pointwise."""
    return traced(call.epilogue, epilogue_dtype(call.a.dtype), call.extra) if call.epilogue is not None else None


def epilogue_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an epilogue gets a product of ``dtype`` operands (see ``Problem.epilogue_dtype``)."""
    accumulator = accumulator_dtype(dtype)
    return torch.float32 if accumulator == torch.int32 else accumulator


def problem_of(call: Call, epilogue: Epilogue | None) -> Problem:
    """Return the Problem of a call. Raises InvalidProblemError if operands do not fit together or a scalar overflows."""
    row, a = _row_of(call), call.a
    fields: dict[str, Any] = {role: Layout.of(x) for role, x in call.operands.items() if not (row.sparse and role == "b")}
    if row.sparse:  # the weight is the transpose of b
        weight = call.operands["b"]
        fields["b"] = Layout.contiguous(tuple(weight.shape), weight.dtype).transposed
    cast = epilogue.result_dtype if epilogue else None
    dtype = cast or call.out_dtype or row.result_dtype(a.dtype, epilogue=epilogue is not None)
    size = row.out_size({role: x.size for role, x in fields.items()})
    check_extra(call.name, zip(call.extra_names, call.extra, strict=True), size)
    wanted = (size, dtype, torch.strided)
    fits = call.out is not None and (tuple(call.out.shape), call.out.dtype, call.out.layout) == wanted
    # The caller of a block-sparse product gets the transpose of the result, which is contiguous then.
    new = Layout.contiguous(size[::-1], dtype).transposed if row.sparse else Layout.contiguous(size, dtype)
    out = Layout.of(call.out) if call.out is not None and fits else new
    fields |= {name: scalar_class(value) for name, value in zip(row.scalars, call.scalars, strict=True)}
    problem = Problem(
        op=row.name,
        out=out,
        epilogue=epilogue,
        device_type=a.device.type,
        precision=precision_of(a.dtype, a.device.type),
        prepacked=call.packed is not None,
        **fields,
        **call.options,
    )
    if not (problem.empty or 0 in problem.summed):  # torch reads no scalars of a product without terms
        check_scalars(call.name, zip(row.scalars, call.scalars, strict=True), a.dtype)
    return problem


def _row_of(call: Call) -> Operation:
    """Return the operation with the operands that a call has. Raises InvalidProblemError for a matrix of another rank."""
    row = call.operation.given(call.operands, gated=str(call.options.get("gated", "")))
    for operand in row.matrices:
        x = call.operands[operand.role]
        dims = len(row.symbols(operand))
        if x.dim() != dims:
            raise InvalidProblemError(f"{call.name}: {operand.role} must be a {dims}-D tensor, got shape {list(x.shape)}")
    return row


def check_composed(call: Call) -> None:
    """Check shapes and options of a call that torch's own operations do. These broadcast, and know no names of options.

    Strides, and dtypes of operands that have the dtype of ``a``, are torch's business. Sizes that are symbols are not checked.
    """
    if call.operation.sparse or any(isinstance(n, torch.SymInt) for _, x in call.inputs for n in x.shape):
        return
    row, dtype = _row_of(call), call.a.dtype
    if row.floats and dtype not in DTYPES:
        dtype = torch.float32  # torch has products of more dtypes, such as complex ones, with the same shapes
    alike = {operand.role for operand in row.operands if operand.like_a and not operand.dtypes} | {"a"}
    fields: dict[str, Any] = {
        role: Layout.contiguous(tuple(x.shape), dtype if role in alike else x.dtype) for role, x in call.operands.items()
    }
    size = row.out_size({role: x.size for role, x in fields.items()})
    check_extra(call.name, zip(call.extra_names, call.extra, strict=True), size)
    fields |= dict.fromkeys(row.scalars, "general")
    Problem(
        op=row.name,
        out=Layout.contiguous(size, row.result_dtype(dtype, epilogue=False)),
        device_type="cpu",
        precision=precision_of(dtype, "cpu"),
        **fields,
        **call.options,
    )


def noted(problem: Callable[[], Problem | None]) -> contextlib.AbstractContextManager[None]:
    """Return a context for one call, reported as a whole, not only in parts, to a dispatch mode with a method ``note_call``."""
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    note_call = getattr(mode, "note_call", None)
    block: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if note_call is None else note_call(problem)
    return block


_traced = Bounded[Hashable, Epilogue]()
_codes = Bounded[int, tuple[types.CodeType, int, tuple[str, ...] | None]]()
"""Number of a code object and the globals that it looks up, by id. The object is kept so that no other gets that id."""
_numbers = itertools.count()
_STABLE_MODULES = ("torch", "math", "operator")
"""Modules whose attributes a program does not change while it runs."""
_BUILTINS = frozenset(("abs", "bool", "float", "int", "len", "max", "min", "range", "round", "sum", "tuple"))
_STABLE_NAMES = frozenset((
    *FUNCTIONS, *(f"{name}_" for name in FUNCTIONS), *dir(math), *map(dtype_name, DTYPES), *_BUILTINS,
    "Tensor", "dim", "dtype", "functional", "ndim", "ndimension", "nn", "numel", "shape", "size", "special",
))  # fmt: skip
"""Names of attributes and functions whose results depend on nothing but arguments. Others, such as torch.rand, read a state."""
_PLAIN = frozenset((int, float, bool, torch.dtype, type(None)))


def traced(function: Callable[..., Any], acc_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> Epilogue:
    """Return the graph of an epilogue function for these operands.

    Tracing takes milliseconds, so graphs are cached for functions whose meaning their code shows: it uses numbers, its arguments
    and functions of torch without a state. A function that reads attributes of objects or calls other functions is traced at every
    call, because whatever it reads may change.
    """
    meaning = meaning_of(function)
    if meaning is None:
        return trace(function, acc_dtype, operands)
    key = (meaning, acc_dtype, tuple((o.dtype, tuple(o.shape), o.stride(), o.data_ptr() % 16) for o in operands))
    if key not in _traced:
        _traced[key] = trace(function, acc_dtype, operands)
    return _traced[key]


def meaning_of(function: Callable[..., Any]) -> Hashable | None:
    """Return a key that is equal for functions with the same graph, or None if their code does not show it. Hot path."""
    kind = function.__class__
    if kind is types.BuiltinFunctionType:
        return function
    if kind is Then:
        then = meaning_of(function.function)  # type: ignore[attr-defined]
        return None if then is None else (function.first, then)  # type: ignore[attr-defined]
    if kind is not types.FunctionType:
        return None
    code, cells = function.__code__, function.__closure__
    _, number, names = _codes.get(id(code)) or _known(code)
    if cells is None and str(function.__globals__.get("__name__")).partition(".")[0] in _STABLE_MODULES:
        return function
    if names is None:
        return None
    outside, values = function.__globals__, []
    for name in names:
        if name in outside:
            values.append(outside[name])
        elif name not in _BUILTINS:
            return None
    for cell in cells or ():
        values.append(cell.cell_contents)
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    zeros: tuple[str, ...] = ()
    for value in values:
        if value.__class__ not in _PLAIN and not _is_stable(value):
            return None
        if value.__class__ is float and value == 0:
            zeros += (repr(value),)  # -0.0 equals 0.0
    return (number, *values, *map(type, values), *zeros)


def _is_stable(value: object) -> bool:
    """Return True for a module whose attributes do not change, or one of its functions of C without a state."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _STABLE_MODULES
    if not isinstance(value, types.BuiltinFunctionType) or value.__name__ not in _STABLE_NAMES:
        return False
    home: Any = value.__self__  # of a bound method its object
    name = home.__name__ if isinstance(home, types.ModuleType) else home.__module__ if isinstance(home, type) else ""
    return name.partition(".")[0] in (*_STABLE_MODULES, "_operator", "builtins")


def _known(code: types.CodeType) -> tuple[types.CodeType, int, tuple[str, ...] | None]:
    """Return the code with a unique number and its globals, or None for them if it makes functions or may read a state."""
    named = [x for x in dis.get_instructions(code) if x.opcode in dis.hasname]
    names = dict.fromkeys(x.argval for x in named if x.opname == "LOAD_GLOBAL")
    stable = all(x.argval in _STABLE_NAMES for x in named if x.opname != "LOAD_GLOBAL")
    inner = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    _codes[id(code)] = known = (code, next(_numbers), tuple(names) if stable and not inner else None)
    return known
