"""``gemmtune.explain``: of a call, or of a compiled model."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidProblemError
from ..problem import Problem
from ..tuning import explain as calls
from ..tuning.named import Operand, Operation
from .compile.report import CompiledExplanation, explain_compiled, is_compiled


def explain(what: Problem | Operation | object, *operands: Operand, **arguments: Any) -> calls.Explanation | CompiledExplanation:
    """Tell which choice a call would run, where that comes from, and what else was measured. Measures and runs nothing.

        explain("mm", a, b)    explain(gemmtune.scaled_mm, a, b, scale_a, scale_b)    explain(Problem.mm(16, 4096, 4096))
        explain(torch.compile(model, backend="gemmtune"))

    Of a compiled function or module that has been called: each GEMM of its graphs, what it was fused with and what runs, or why
    torch's was left.

    Args:
        what: a Problem; the name of an operation, such as ``"mm"``, or the operation itself; or what ``torch.compile`` returned.
        operands: the operation's tensors, in the order in which it takes them.
        arguments: its keyword arguments.

    Raises:
        InvalidProblemError: an unknown operation, or operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
        UnavailableError: a Problem for a device that is not here.
    """
    if not is_compiled(what):
        return calls.explain(what, *operands, **arguments)  # type: ignore[arg-type]
    if operands or arguments:
        raise InvalidProblemError("explain: got operands beside a compiled function, expected it alone; call it before")
    return explain_compiled(what)
