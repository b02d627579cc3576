"""The machine instruction that an operation multiplies with."""

from __future__ import annotations

from .operation import Operation, bits_of

__all__ = ["instruction"]

_SUFFIX = {"bf16": ".BF16", "tf32": ".TF32", "e4m3": ".E4M3", "e5m2": ".E5M2"}
"""What follows the type of the sum in the name of an instruction, by the element of the operands."""


def instruction(operation: Operation) -> str:
    """The SASS instruction that multiplies, with ``*`` for its shape. CUDA Binary Utilities, instruction sets of sm75 to sm90."""
    if operation.opcode == "Simt":
        return "DFMA*" if operation.a == "f64" else "FFMA*"
    if operation.a == "f64":
        return "DMMA*"
    group = "G" if operation.modern else ""
    if operation.multiplied == "s8":
        return f"I{group}MMA.*.S8.S8*"
    letter = "Q" if bits_of(operation.multiplied) == 8 else "H"
    suffix = [_SUFFIX.get(x, "") for x in ((operation.a, operation.b) if letter == "Q" else (operation.multiplied,))]
    return f"{letter}{group}MMA.*.F32{''.join(suffix)}"
