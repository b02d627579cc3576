"""Configs of the CUTLASS backend: an operation with a launch variant, and the legality predicate."""

from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from ...problem import Problem
from ...problem.operations import DENSE_OPS, QUANTIZED_OPS
from ...problem.rules import why_not, why_not_fnuz
from ...toolchain.orientation import Oriented, letter, orient
from ...toolchain.structs import MOST_OPERANDS, why_not_epilogue
from .operation import ELEMENTS, Operation
from .quantized import why_not_quantized
from .variants import Variant

INT32_LIMIT = 2**31
MOST_ACCUMULATORS = 208
"""Maximum accumulators of a thread. With more, its 255 registers spill, because everything else needs a share."""
MOST_SATURATED = (2**31 - 1) >> 14
"""Maximum K of a saturating int8 product: the sum of so many int8 products always fits int32."""
OPERAND_ELEMENTS: dict[torch.dtype, str] = {
    torch.float16: "cutlass::half_t", torch.bfloat16: "cutlass::bfloat16_t", torch.float32: "float", torch.float64: "double",
}  # fmt: skip
"""C++ types of operands that an epilogue can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Operation with a launch variant. Its ``name`` combines CUTLASS's own name and the variant."""

    operation: Operation
    variant: Variant

    @property
    def name(self) -> str:
        """Name in tables and regexes, such as ``cutlass3x_sm90_tensorop_gemm_…_rasterm_swizzle2``."""
        return f"{self.operation.name}_{self.variant}"


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no operation can serve the problem on this device, or None."""
    if device.type != "cuda" or device.capability < 75:
        return f"works on CUDA devices of compute capability 7.5 and newer, not on {device.arch}"
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if max(problem.m, problem.n, problem.k, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    if problem.op in DENSE_OPS and problem.out.dtype != problem.dtype:
        return f"the result is {problem.out.dtype}, expected the operands' own {problem.dtype}"
    reason = (
        why_not(problem, (*DENSE_OPS, *QUANTIZED_OPS))
        or why_not_fnuz(problem)
        or why_not_quantized(problem, device)
        or why_not_epilogue(problem, MOST_OPERANDS - max(1, len(problem.scales)), OPERAND_ELEMENTS)
    )
    if reason is not None:
        return reason
    if device.capability < 80 and problem.dtype == torch.bfloat16:
        return "bfloat16 needs compute capability 8.0"
    return None


def elements_of(problem: Problem) -> tuple[str, ...]:
    """Return the element names of operations that compute the problem in its own precision."""
    if problem.dtype == torch.float32:
        return ("tf32", "f32") if problem.precision.input_mode == "tf32" else ("f32",)
    return tuple(name for name, dtype in ELEMENTS.items() if dtype == problem.dtype)


class Legality:
    """Legality of operations for one problem on one device, cached across thousands of operations."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self._problem = problem
        self._device = device
        self._orientations = [orient(problem, swap_ab=swap_ab) for swap_ab in (True, False)]
        self._known: dict[tuple[object, ...], Oriented | str] = {}

    def orientation(self, operation: Operation) -> Oriented | str:
        """Return the orientation in which ``operation`` computes the problem, or the reason why it cannot."""
        reason = _arithmetic(operation, self._problem, self._device)
        if reason is not None:
            return reason
        op = operation
        key = (op.a, op.b, op.layout_a, op.layout_b, op.layout_d, op.alignment_a, op.alignment_b, op.alignment_d)
        if key not in self._known:
            fits = [(oriented, _why_not_operands(op, oriented)) for oriented in self._orientations]
            self._known[key] = next((oriented for oriented, reason in fits if reason is None), str(fits[0][1]))
        return self._known[key]


def _arithmetic(operation: Operation, problem: Problem, device: DeviceInfo) -> str | None:
    accumulator = ELEMENTS[operation.accumulator]
    if accumulator != problem.accumulator:
        return f"accumulates in {operation.accumulator}"
    if operation.math not in ("multiply_add", "multiply_add_saturate"):
        return f"{operation.math} rounds its operands in ways that the problem does not allow"
    if operation.math == "multiply_add_saturate" and problem.k > MOST_SATURATED:
        return f"its sums saturate at the limits of int32, which more than {MOST_SATURATED} products can reach"
    if ELEMENTS.get(operation.d) != problem.out.dtype or operation.d == "tf32" or operation.c not in ("void", operation.d):
        return f"stores {operation.d}"
    if operation.kernel_schedule.endswith("Auto"):
        return "CUTLASS chooses its schedule: the operation with that schedule is listed too"
    if operation.modern and device.capability != operation.introduced:
        return f"runs only on sm{operation.introduced}"
    if operation.mainloop_bytes > device.smem_per_block_bytes:
        return f"its tiles take {operation.mainloop_bytes} bytes of shared memory, a block has {device.smem_per_block_bytes}"
    if operation.accumulators_per_thread > MOST_ACCUMULATORS:
        return f"{operation.accumulators_per_thread} accumulators of a thread would spill"
    fused = problem.alpha != "one" or problem.inp_read is not None or bool(problem.scales) or problem.epilogue is not None
    if fused and operation.modern and not operation.tma_store:
        return "its epilogue stores without shared memory and cannot be a visitor tree"
    return None


def _why_not_operands(operation: Operation, oriented: Oriented) -> str | None:
    """Return the reason why the operation cannot read the operands or store the result in this orientation, or None."""
    if (ELEMENTS[operation.a], ELEMENTS[operation.b]) != (oriented.a.dtype, oriented.b.dtype):
        order = "swap_ab" if oriented.swap_ab else "as they are"
        return f"reads {operation.a} and {operation.b}, which does not fit a and b {order}"
    for name, layout, wanted, alignment in (
        ("a", oriented.a, operation.layout_a, operation.alignment_a),
        ("b", oriented.b, operation.layout_b, operation.alignment_b),
        ("out", oriented.out, operation.layout_d, operation.alignment_d),
    ):
        if not (layout.row_major if wanted == "t" else layout.column_major):
            return f"{name} is {letter(layout) or 'strided'}, expected {wanted}"
        if layout.alignment < alignment:
            return f"{name} is aligned to {layout.alignment} elements, expected {alignment}"
    return None
