"""What Triton's compiled kernels say of themselves, and what they were expected to be."""

from __future__ import annotations

from typing import Any

import torch

from ..compiled import Artifact, Usage, amdgcn_usage, cubin_usage, find_cuobjdump
from .configs import Config
from .kernels import assembly
from .legality import Predicate

__all__ = ["copy_artifact", "instruction", "mm_artifact"]

_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "tf32": "tf32", "float64": "f64"}
"""dtype label to its name in PTX."""


def mm_artifact(compiled: Any, predicate: Predicate, config: Config) -> Artifact:
    """The mm kernel of ``config``, with what the predicate said of it."""
    problem, device = predicate.problem, predicate.device
    return _artifact(
        compiled,
        expected=instruction(predicate, config),
        predicted_bytes=predicate.resources(config).smem_bytes,
        # The tile on its way from the layout of the accumulator to that of the store: some kernels need no such step.
        slack_bytes=config.block_m * config.block_n * problem.accumulator.itemsize if device.type == "cuda" else None,
    )


def copy_artifact(compiled: Any) -> Artifact:
    """The kernel that copies operands."""
    return _artifact(compiled)


def _artifact(
    compiled: Any, *, expected: str | None = None, predicted_bytes: int | None = None, slack_bytes: int | None = None
) -> Artifact:
    metadata = compiled.metadata
    code = assembly(compiled)
    usage = _cuda_usage(compiled) if "cubin" in compiled.asm else amdgcn_usage(code)
    return Artifact(
        kernel=metadata.name,
        threads=metadata.num_warps * metadata.target.warp_size,
        shared_bytes=metadata.shared,
        registers=usage.registers if usage else None,
        stack_bytes=usage.stack_bytes if usage else None,
        code=code,
        spilled_share=usage.spilled_share if usage else 0.0,
        expected=expected,
        predicted_bytes=predicted_bytes,
        slack_bytes=slack_bytes,
    )


def instruction(predicate: Predicate, config: Config) -> str:
    """The instruction that multiplies, with the types of its operands and of its sum, and ``*`` for its shape.

    PTX ISA: fma, mma.sync, wgmma.mma_async, tcgen05.mma; AMD CDNA 3 ISA: v_mfma, which takes float32 and float64 too.
    """
    problem, device = predicate.problem, predicate.device
    how, operand = predicate.instruction(config), _TYPES[problem.dtype_label]
    total = "f64" if problem.accumulator == torch.float64 else "f32"
    if device.type == "hip":
        return f"v_mfma_{total}_*_{operand.replace('tf32', 'xf32')}" + "*" * (operand == "bf16")
    if how == "fma":
        return f"fma.rn*.{total}*"
    if how == "mma":
        return f"mma.sync.aligned.m*n*k*.row.col.{total}.{operand}.{operand}.{total}"
    if device.capability < 100:
        return f"wgmma.mma_async.sync.aligned.m64n*k*.{total}.{operand}.{operand}"
    return f"tcgen05.mma.cta_group::*.kind::{'tf32' if operand == 'tf32' else 'f16'}"


def _cuda_usage(compiled: Any) -> Usage | None:
    """None where there is no cuobjdump."""
    tool = find_cuobjdump()
    return cubin_usage(compiled.asm["cubin"], tool) if tool else None
