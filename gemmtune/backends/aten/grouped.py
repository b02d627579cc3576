"""Grouped products by torch: its operation if that leaves the offsets on the device, else a composition that does."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...choice import Choice, Claims, Kernel, Scalars, Tensors
from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem import grouped_compositions as compositions
from ...problem.layout import ALIGNED_BYTES
from .dense import as_stated, copied, of_sums, with_epilogue

Tensor = torch.Tensor
NAME = "aten"
NATIVE = "_grouped_mm"
COMPOSED = "grouped_composed"
NATIVE_SCALED = "_scaled_grouped_mm"
NATIVE_MAJORS = (9, 10)
"""Major compute capabilities with a kernel of torch. Other devices read the offsets on the host."""
SCALED_CAPABILITY = 90
"""Compute capability on which torch's grouped product of 8-bit floats is tried."""


@dataclass(frozen=True, kw_only=True)
class GroupedChoice(Choice):
    """``torch._grouped_mm``, ``torch._scaled_grouped_mm``, or one product for each group."""

    way: str

    @property
    def content_hash(self) -> str:
        """Hash of the call. The machine's fingerprint covers torch's implementation."""
        return hashlib.sha256(json.dumps([NAME, self.name, self.problem.epilogue is not None]).encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        reason = why_not_native(problem, device) if self.way != COMPOSED else None
        return reason or dataclasses.replace(self, problem=problem)

    def bind(self, loaded: Any) -> Kernel:  # noqa: ARG002 - nothing is loaded
        if self.problem.float8:
            native = functools.partial(_native_scaled, fast=self.problem.fast_accum)
            scaled: Callable[..., Tensor] = native if self.way == NATIVE_SCALED else compositions.scaled_grouped
            one, other = self.problem.a, self.problem.b
            return of_sums(lambda x, _: scaled(as_stated(x[0], one), as_stated(x[1], other), *x[2:]), self.problem)
        on_host = self.problem.device_type == "cpu"
        by_terms = compositions.grouped_by_terms if on_host else compositions.masked_by_terms
        by_rows = compositions.grouped_product if on_host else compositions.masked_product
        composed = by_terms if self.problem.divides_terms else by_rows
        function: Callable[..., Tensor] = _native if self.way == NATIVE else composed
        problem, dtype, encoding, narrow = self.problem, self.problem.dtype, self.problem.encoding, self.problem.widens_b

        def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
            if not narrow:
                a, b, offs = tensors
                return function(as_stated(a, problem.a), as_stated(b, problem.b), offs)
            a, b, scale, offs = tensors
            return function(a, compositions.widened(b, scale, encoding, dtype), offs)

        return with_epilogue(copied(run_new), self.problem)


def _native_scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, *, fast: bool) -> Tensor:
    """Call torch's operation, which takes scales as vectors."""
    vector, matrix = scale_a.reshape(-1).contiguous(), scale_b.reshape(scale_b.shape[0], -1)
    result = torch._scaled_grouped_mm(a, b, vector, matrix, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return result.contiguous()


def _native(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return the result of torch's operation, whose rows may be padded, as a contiguous tensor."""
    return torch._grouped_mm(a, b, offs=offs).contiguous()


def choices(problem: Problem, device: DeviceInfo) -> tuple[list[GroupedChoice], str | None]:
    """Return torch's choices, the baseline first, and why its own operation is not among them."""
    reason = why_not_native(problem, device)
    made = [] if reason is not None else [_choice(problem, native_name(problem), device, baseline=True)]
    if reason is not None or device.type == "cpu":
        made.append(_choice(problem, COMPOSED, device, baseline=reason is not None))
    return made, reason


def native_name(problem: Problem) -> str:
    return NATIVE_SCALED if problem.float8 else NATIVE


def _choice(problem: Problem, way: str, device: DeviceInfo, *, baseline: bool) -> GroupedChoice:
    return GroupedChoice(
        name=f"{NAME}:{way}" + "+eager" * (problem.epilogue is not None),
        backend=NAME,
        problem=problem,
        claims=_claims(problem, device, native=way != COMPOSED),
        info={"aten": way},
        baseline=baseline,
        way=way,
    )


def why_not_native(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why torch's operation does not support the problem or would read offsets on the host, or None."""
    if problem.float8:
        return _why_not_scaled(problem, device)
    # Narrow weights are converted to a contiguous matrix for each group.
    b = Layout.contiguous((problem.groups, problem.k, problem.n), problem.dtype) if problem.widens_b else problem.b
    for role, layout in (("a", problem.a), ("b", b)):
        if layout.offset or not compositions.grouped_by_torch(layout.size[-2:], layout.stride[-2:], layout.dtype.itemsize):
            return f"{role} {layout}: torch._grouped_mm takes rows or columns that begin at multiples of {ALIGNED_BYTES} bytes"
    if device.type == "cpu":
        return None
    a, b = problem.a, problem.b
    inside = a.stride[-2] == 1 and b.stride[-1] == 1 if problem.divides_terms else a.stride[-1] == 1
    if not inside:  # the groups divide the contiguous dimension
        return f"groups may begin at any address, and torch._grouped_mm expects multiples of {ALIGNED_BYTES} bytes for this layout"
    if device.type != "cuda" or device.capability // 10 not in NATIVE_MAJORS or problem.dtype != torch.bfloat16:
        return f"torch._grouped_mm has a kernel for bfloat16 on SM90 and SM100: on {device.arch} for {problem.dtype_label} it " + (
            "reads the offsets on the host"
        )
    return None


def _why_not_scaled(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why ``torch._scaled_grouped_mm`` does not support the problem, or None."""
    if device.capability != SCALED_CAPABILITY:
        return f"torch._scaled_grouped_mm is tried on SM90 only, got {device.arch}"
    if {problem.a.dtype, problem.b.dtype} != {torch.float8_e4m3fn} or problem.out.dtype != torch.bfloat16:
        return "torch._scaled_grouped_mm multiplies float8_e4m3fn into bfloat16"
    if len(problem.scales) != 2 or any(problem.scale_block(x)[x == "scale_a"] < problem.k for x in ("scale_a", "scale_b")):
        return "torch._scaled_grouped_mm has one scale for each row and column"
    for role, layout in (("a", problem.a), ("b", problem.b.transposed)):
        row, along = layout.stride[-2:]
        if layout.offset or along != 1 or row < problem.k or row % ALIGNED_BYTES or problem.n % ALIGNED_BYTES:
            return f"{role} {layout}: torch._scaled_grouped_mm takes a row-major a and column-major matrices of b, aligned"
    return None


def _claims(problem: Problem, device: DeviceInfo, *, native: bool) -> Claims:
    """Return claims of sums in float32, rounded to the operands' dtype before an epilogue."""
    if problem.float8:
        rounded = problem.epilogue is not None and native
        return Claims(
            accumulate=torch.float32,
            epilogue_input=torch.bfloat16 if rounded else torch.float32,
            splits=1 if native or device.type == "cpu" else 16,
            accumulator_bits=None if native else 24,
        )
    tf32 = problem.precision.input_mode == "tf32"
    return Claims(
        accumulate=problem.accumulator,
        partials=problem.dtype if problem.precision.reduced_partials else problem.accumulator,
        epilogue_input=problem.accumulator if problem.epilogue is None else problem.dtype,
        splits=16 if device.type != "cpu" else 1,
        input_mode="tf32" if tf32 else "ieee",
        weights=problem.dtype if problem.widens_b else None,
        flush_subnormals=True,
    )
