"""Problems of ``explain``, ``tune`` and ``multi``: given as such, or as an operation with the operands of a call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..dispatch.arguments import Call, call_of, transposed_operand
from ..dispatch.checks import check_operands, why_not_ours
from ..dispatch.grouped import form_of
from ..dispatch.prepack import PackedOperand
from ..dispatch.statement import epilogue_of, problem_of
from ..errors import InvalidProblemError, raised_as
from ..problem import Problem
from ..problem.fused import BROUGHT, NAMES
from ..problem.operations import OPERATIONS, OPTIONS, SPARSE_OPS
from ..quantized.arguments import float8_parts, parts_of
from ..quantized.weight import QuantizedWeight
from ..sparse.calls import block_call

Operation = str | Callable[..., object]
"""Name of an operation, such as ``"mm"``, or the operation itself, such as ``gemmtune.scaled_mm``."""
Operand = torch.Tensor | PackedOperand | QuantizedWeight
_INSTEAD_OF_A_MODEL = {
    "explain": "for all its layers call compiled = torch.compile(model, backend='gemmtune') once, then explain(compiled); for one "
    "layer explain('addmm', layer.bias, x, layer.weight.t()), or explain('mm', x, layer.weight.t()) without a bias",
    "tune": "optimize(model, tune=inputs) tunes its layers",
    "multi": "name the product of one of its layers, such as multi('addmm', layer.bias, x, layer.weight.t())",
}
"""Remedies for a model, by the function that got it."""


def stated(
    asker: str, op: Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]
) -> tuple[Problem | str, torch.device]:
    """Return the problem of a call, or the reason why only torch supports the call, and the device.

    ``asker`` begins each error message.

    Raises:
        InvalidProblemError: an unknown operation, or operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    name = getattr(op, "__name__", op)
    if name == "grouped_mm" and len(operands) in (2, 3):
        op, operands, arguments = _grouped(asker, operands, arguments)
    sparse = name in SPARSE_OPS
    call = _call_with_blocks(asker, str(name), operands, arguments) if sparse else _call(asker, op, operands, arguments)
    check_operands(call.name, call.inputs)
    reason = why_not_ours([x for _, x in call.inputs], floats=call.operation.floats)
    return problem_of(call, epilogue_of(call)) if reason is None else reason, call.a.device


def _call_with_blocks(asker: str, name: str, operands: Sequence[Operand], arguments: Mapping[str, Any]) -> Call:
    """Return the call of bsr_mm(bsr, x) or bsr_addmm(inp, bsr, x)."""
    scalars = ("alpha", "beta") if name == "bsr_addmm" else ()
    words = (*scalars, "out", "epilogue", "epilogue_args")
    roles = ("inp", "bsr", "x") if name == "bsr_addmm" else ("bsr", "x")
    if unknown := sorted(arguments.keys() - set(words)):
        raise InvalidProblemError(f"{asker}: {name}: got {', '.join(unknown)}, expected none but {', '.join(words)}")
    if len(operands) != len(roles):
        raise InvalidProblemError(f"{asker}: {name}: got {len(operands)} operands, expected {', '.join(roles)}")
    *inp, bsr, x = operands
    more = {word: arguments[word] for word in ("out", "epilogue", "epilogue_args") if arguments.get(word) is not None}
    return block_call(name, bsr, x, *inp, scalars=[arguments.get(scalar, 1) for scalar in scalars], **more)


def _grouped(
    asker: str, operands: Sequence[Operand], arguments: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """Return the operation of a grouped product and its operands, all transposed if the operation is that of the transpose."""
    a, b, *ends = operands
    more = dict(arguments)
    offs, what = ends[0] if ends else more.pop("offs", None), f"{asker}: grouped_mm"
    form = form_of(what, a, b, offs, **{word: more.pop(word) for word in ("rows", "gated", "scatter") if word in more})
    if form.transposed:
        more |= {"out": transposed_operand(more["out"])} if more.get("out") is not None else {}
        more |= {"epilogue_args": tuple(map(transposed_operand, more["epilogue_args"]))} if more.get("epilogue_args") else {}
    row = OPERATIONS[form.op]
    more |= zip(row.options, form.options, strict=False)
    more |= zip((x.role for x in row.operands), form.operands, strict=False)
    return form.op, (), more


def stated_problem(
    asker: str, op: Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]
) -> tuple[Problem, torch.device]:
    """Return the problem of a call and its device. Raises InvalidProblemError if only torch supports the call."""
    problem, place = stated(asker, op, operands, arguments)
    if isinstance(problem, str):
        raise InvalidProblemError(f"{asker}: torch alone can do this call, because {problem}; there is nothing to choose from")
    return problem, place


def _call(asker: str, op: Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]) -> Call:
    name = getattr(op, "__name__", op)
    if not isinstance(name, str) or name not in NAMES:
        got = f"got op {name!r}" if isinstance(name, str) else f"got a {type(name).__name__}"
        compiled = ", or what torch.compile returned" if asker == "explain" else ""
        if isinstance(op, torch.nn.Module):
            raise InvalidProblemError(f"{asker}: {got}, which is no product: {_INSTEAD_OF_A_MODEL[asker]}")
        raise InvalidProblemError(f"{asker}: {got}, expected a Problem, or one of {', '.join(NAMES)} with its tensors{compiled}")
    with raised_as(InvalidProblemError, TypeError, before=f"{asker}: {name}: "):
        return bound_call(name, operands, arguments)


def signature_of(name: str) -> inspect.Signature:
    """Return the parameters of the public function ``name``, by its row and its own argument."""
    row, own = NAMES[name], BROUGHT.get(name)
    optional = [operand.role for operand in row.operands if not operand.required]
    positional = [role for role in row.arguments if role not in optional]
    keywords: dict[str, object] = {**dict.fromkeys(optional), **dict.fromkeys(row.scalars, 1)}
    keywords |= {option: OPTIONS[option] for option in row.options}
    if own is not None:
        positional += [own.argument] * own.required
        keywords |= {} if own.required else {own.argument: None}
    if own is not None or row.names_result:
        keywords |= {"out_dtype": None}
    keywords |= {"out": None} if own is not None and own.required else {"out": None, "epilogue": None, "epilogue_args": ()}
    kind = inspect.Parameter
    return inspect.Signature(
        # A QuantizedWeight brings its scale along.
        [
            kind(role, kind.POSITIONAL_OR_KEYWORD, default=None if role == "scale_b" and not row.grouped else kind.empty)
            for role in positional
        ]
        + [kind(word, kind.KEYWORD_ONLY, default=value) for word, value in keywords.items()]
    )


def bound_call(name: str, operands: Sequence[object], arguments: Mapping[str, Any]) -> Call:
    """Return the call of the public function ``name`` with these arguments. Raises TypeError for unknown or missing ones."""
    row, own = NAMES[name], BROUGHT.get(name)
    bound = signature_of(name).bind(*operands, **arguments)
    bound.apply_defaults()
    given = bound.arguments
    if row.grouped:
        pass  # no grouped weight brings its scales
    elif "encoding" in row.options:
        parts = parts_of(name, given["b"], given["scale_b"], given["zero_b"], given["encoding"])
        given |= dict(zip(("b", "scale_b", "zero_b", "encoding"), parts, strict=True))
    elif row.operand("scale_b") is not None:
        given["b"], given["scale_b"] = float8_parts(name, given["b"], given["scale_b"])
    return call_of(
        name,
        given,
        scalars=[given[scalar] for scalar in row.scalars],
        options=[given[option] for option in row.options],
        brought=given[own.argument] if own is not None else None,
        **{word: given[word] for word in ("out_dtype", "out", "epilogue", "epilogue_args") if word in given},
    )
