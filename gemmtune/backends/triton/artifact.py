"""Properties of compiled Triton kernels, compared with their predictions."""

from dataclasses import dataclass
from typing import Any

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import FLOAT8
from ...problem.operations import DENSE_OPS
from ...toolchain.compiled import Artifact, Usage, amdgcn_usage, cubin_usage, find_cuobjdump
from ...toolchain.triton_kernels import assembly
from .configs import Config
from .hip import HipConfig
from .legality import Predicate

_TYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.int8: "s8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "bf8",
}  # fmt: skip
"""Name of each dtype in PTX, or in the assembly of AMD's CDNA 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Predictions of legality for a kernel; ``Artifact`` describes the fields."""

    instruction: str | None = None
    smem_bytes: int | None = None
    slack_bytes: int | None = None


NOTHING = Expected()
"""Prediction for a kernel without products."""


def expected_of(predicate: Predicate, config: Config) -> Expected:
    problem, device = predicate.problem, predicate.device
    tile_bytes = config.block_m * config.block_n * problem.accumulator.itemsize
    return Expected(
        instruction=instruction(predicate, config),
        smem_bytes=predicate.resources(config).smem_bytes,
        # The tile's change of layout before the store: some kernels need no such step. The prediction for quantized operations does
        # not claim to be close.
        slack_bytes=tile_bytes if device.type == "cuda" and problem.op in DENSE_OPS else None,
    )


def artifact(compiled: Any, expected: Expected = NOTHING) -> Artifact:
    metadata = compiled.metadata
    code = assembly(compiled)
    usage: Usage | None
    if "cubin" in compiled.asm:
        tool = find_cuobjdump()
        usage = cubin_usage(compiled.asm["cubin"], tool) if tool else None
    else:
        usage = amdgcn_usage(code)
    return Artifact(
        kernel=metadata.name,
        threads=metadata.num_warps * metadata.target.warp_size,
        shared_bytes=metadata.shared,
        registers=usage.registers if usage else None,
        stack_bytes=usage.stack_bytes if usage else None,
        code=code,
        spilled_share=usage.spilled_share if usage else 0.0,
        expected=expected.instruction,
        predicted_bytes=expected.smem_bytes,
        slack_bytes=expected.slack_bytes,
    )


def vector_instruction(problem: Problem, device: DeviceInfo) -> str:
    """Return the instruction of a kernel that multiplies without tensor cores."""
    total = "f64" if problem.accumulator == torch.float64 else "f32"
    return f"v_*fma*_{total}*" if device.type == "hip" else f"fma.rn*.{total}*"


def words_instruction(problem: Problem, *, warp_group: bool) -> str:
    """Return the instruction of a CUDA kernel that multiplies weights read as words."""
    operand = _TYPES[problem.dtype]
    if warp_group:
        return f"wgmma.mma_async.sync.aligned.m64n*k*.f32.{operand}.{operand}"
    return f"mma.sync.aligned.m*n*k*.row.col.f32.{operand}.{operand}.f32"


def instruction(predicate: Predicate, config: Config) -> str:
    """Return the multiply instruction, ``*`` for its shape, by the PTX ISA (fma to tcgen05.mma) and AMD's CDNA 3 ISA (v_mfma)."""
    problem, device = predicate.problem, predicate.device
    how, operand = predicate.instruction(config), _operand(predicate, config, 0)
    total = {torch.float64: "f64", torch.int32: "s32"}.get(problem.accumulator, "f32")
    if device.type == "hip":
        side = f"{config.matrix_instr_nonkdim}x{config.matrix_instr_nonkdim}x" if isinstance(config, HipConfig) else ""
        # The operands may be different 8-bit floats, and Triton may exchange them.
        kind = {"tf32": "xf32", "s8": "i8", "fp8": "[bf]*8", "bf8": "[bf]*8"}.get(operand, operand)
        # CDNA 2 writes v_mfma_f32_16x16x16bf16_1k, CDNA 3 v_mfma_f32_16x16x16_bf16.
        return f"v_mfma_{total.replace('s32', 'i32')}_{side}*[0-9_]{kind}" + "*" * (operand == "bf16")
    if how == "fma":
        return f"fma.rn*.{'f32' if total == 's32' else total}*"
    types = f"{operand}.{_operand(predicate, config, 1)}"
    if how == "mma":
        return f"mma.sync.aligned.m*n*k*.row.col.{'satfinite.' if total == 's32' else ''}{total}.{types}.{total}"
    if device.capability < 100:
        return f"wgmma.mma_async.sync.aligned.m64n*k*.{total}.{types}"
    return f"tcgen05.mma.cta_group::*.kind::{_KINDS.get(operand, 'f16')}"


WIDENING = (90, 100)
"""Compute capabilities for which Triton has no mma.sync of 8-bit floats."""
_KINDS = {"tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}
"""PTX names of operand types in the ``.kind`` of tcgen05.mma."""


def _operand(predicate: Predicate, config: Config, which: int) -> str:
    """Return PTX's name for the type in which a (0) or b (1) is multiplied."""
    problem, product = predicate.problem, predicate.product
    if problem.precision.input_mode == "tf32":
        return "tf32" if predicate.arch.tf32 else "f32"
    own = (problem.a.dtype, problem.b.dtype)[which]
    # sm90 supports 8-bit floats only in wgmma: for mma.sync Triton converts them to float16.
    widened = product in FLOAT8 and predicate.device.capability in WIDENING and predicate.instruction(config) == "mma"
    return _TYPES[torch.float16 if widened else own if product.itemsize == 1 else product]
