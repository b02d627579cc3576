"""What becomes of a sum before it is stored, scalars, inp and the graph of an epilogue, as what templates are given."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from ...toolchain.render import epilogue_functions
from ..cpp.printer import STORAGE_TYPES, print_epilogue

__all__ = ["epilogue_values"]


def epilogue_values(problem: Problem) -> dict[str, Any]:
    """What ``epilogue.cuh.jinja`` and ``pointwise.cuh.jinja`` are given.

    ``fused``: more than the bare sum is stored. ``first_operand`` counts what the kernel reads before the epilogue's operands. Only
    the dtypes of operands matter: their sizes are in the problem, and change nothing.
    """
    inp, epilogue = problem.inp_read, problem.epilogue
    extra = epilogue.operands if epilogue else ()
    operands = [STORAGE_TYPES[x.dtype] for x in (*((inp,) if inp is not None else ()), *extra)]
    names = [f"x{i}" for i in range(int(inp is not None), len(operands))]
    return {
        "operands": operands,
        "first_operand": len(problem.scales),
        "fused": problem.alpha != "one" or bool(operands) or epilogue is not None,
        "alpha": problem.alpha,
        "beta": problem.beta if inp is not None else "zero",
        "added": inp is not None,
        "statements": print_epilogue(epilogue, "acc", names, "result") if epilogue else ["result = acc;"],
        "functions": epilogue_functions("float"),
    }
