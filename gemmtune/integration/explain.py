"""``gemmtune.explain`` for a call or a compiled model."""

from typing import Any

from ..errors import InvalidProblemError
from ..problem import Problem
from ..tuning import explain as calls
from ..tuning.named import Operand, Operation
from .compile.report import CompiledExplanation, explain_compiled, is_compiled


def explain(what: Problem | Operation | object, *operands: Operand, **arguments: Any) -> calls.Explanation | CompiledExplanation:
    """Report which choice a call would run, its origin and the other measured choices. Measures and runs nothing.

        explain("mm", a, b)    explain(gemmtune.scaled_mm, a, b, scale_a, scale_b)    explain(Problem.mm(16, 4096, 4096))
        explain(torch.compile(model, backend="gemmtune"))

    For a compiled function or module that has been called, report each GEMM of its graphs: its epilogue and the choice that runs,
    or why torch's node stays.

    Args:
        what: a Problem, an operation or its name such as ``"mm"``, or the result of ``torch.compile``.
        operands: the operation's tensors, in the order of its arguments.
        arguments: the operation's keyword arguments.

    Raises:
        InvalidProblemError: an unknown operation, or operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
        UnavailableError: a Problem for a device that this machine lacks.
    """
    if not is_compiled(what):
        return calls.explain(what, *operands, **arguments)  # type: ignore[arg-type]
    if operands or arguments:
        raise InvalidProblemError(
            "explain: got operands in addition to a compiled function, expected it alone; call the function before explain"
        )
    return explain_compiled(what)
