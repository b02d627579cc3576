"""What a shared object of nvcc says of its kernel, and what it was expected to be."""

from __future__ import annotations

from pathlib import Path

from ..compiled import Artifact, binary_usage, find_cuobjdump
from .launch import Library
from .operation import Operation, bits_of

__all__ = ["gemm_artifact", "instruction"]

_SUFFIX = {"bf16": ".BF16", "tf32": ".TF32", "e4m3": ".E4M3", "e5m2": ".E5M2"}
"""What follows the type of the sum in the name of an instruction, by the element of the operands."""


def gemm_artifact(path: Path, library: Library, operation: Operation) -> Artifact:
    """The only kernel of ``path``."""
    tool = find_cuobjdump()
    usage = binary_usage(path, tool) if tool else None
    return Artifact(
        kernel=operation.name,
        threads=library.threads,
        shared_bytes=library.shared_bytes,
        registers=usage.registers if usage else None,
        stack_bytes=usage.stack_bytes if usage else None,
        code=usage.code if usage else "",
        spilled_share=usage.spilled_share if usage else 0.0,
        expected=instruction(operation) if usage else None,
    )


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
