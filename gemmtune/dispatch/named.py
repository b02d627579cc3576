"""What ``explain`` and ``tune`` are asked about: a Problem, or an operation by its name with the operands of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidProblemError
from ..problem import Problem
from ..problem.fused import NAMES
from .arguments import Call
from .calls import bound_call
from .checks import check_operands, why_not_ours
from .prepack import PackedOperand
from .statement import epilogue_of, problem_of
from .weights import QuantizedWeight

Operation = str | Callable[..., object]
"""The name of an operation, such as ``"mm"``, or the operation itself, such as ``gemmtune.scaled_mm``."""
Operand = torch.Tensor | PackedOperand | QuantizedWeight


def stated(
    asker: str, op: Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]
) -> tuple[Problem | str, torch.device]:
    """The problem that a call would state, or why torch alone can do it; and its device. ``asker`` begins the message of an error.

    Raises:
        InvalidProblemError: an unknown operation, or operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    call = _call(asker, op, operands, arguments)
    check_operands(call.name, call.inputs)
    reason = why_not_ours([x for _, x in call.inputs], floats=not call.operation.quantized)
    return problem_of(call, epilogue_of(call)) if reason is None else reason, call.a.device


def _call(asker: str, op: Operation, operands: Sequence[Operand], arguments: Mapping[str, Any]) -> Call:
    name = getattr(op, "__name__", op)
    if not isinstance(name, str) or name not in NAMES:
        raise InvalidProblemError(f"{asker}: got op {name!r}, expected a Problem, or one of {', '.join(NAMES)} with its tensors")
    try:
        return bound_call(name, operands, arguments)
    except TypeError as error:
        raise InvalidProblemError(f"{asker}: {name}: {error}") from error
