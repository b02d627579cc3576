"""GEMMs for the conformance suite, made of a product and an epilogue in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conformance_gemms import CPU, subject_of

from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.labels import BIASES
from gemmtune.declaration.layouts import KINDS
from gemmtune.declaration.subject import Subject
from gemmtune.problem.dtypes import accumulator_dtype

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Epilogue = Callable[[torch.Tensor, torch.Tensor | None, float, float], torch.Tensor]
"""Function of (product, added operand in the accumulator's dtype or None, alpha, beta) that returns the unrounded result."""
EVERYTHING: dict[str, Any] = {
    "ops": ("mm", "addmm", "bmm", "baddbmm", "int_mm", "scaled_mm"),
    "dtypes": ("float32", "float16", "bfloat16", "float64", "int8", "float8_e4m3fn"), "layouts": tuple(KINDS),
    "out": True, "alpha": True, "beta": True, "bias": BIASES, "empty": True, "scales": ("tensor", "row"), "flush_subnormals": False,
}  # fmt: skip


def apply_epilogue(acc: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """Return alpha · acc + beta · inp. inp is not read if beta is 0."""
    acc = acc if alpha == 1 else acc * alpha
    return acc if inp is None or beta == 0 else acc + inp * beta


def made(
    product: Product = torch.matmul,
    epilogue: Epilogue = apply_epilogue,
    *,
    read: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = lambda a, b: (a, b),
    store: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ignores: str = "",
    **traits: Any,
) -> Subject:
    """Return a GEMM that is right apart from the given steps. ``read`` gets the operands, and ``store`` writes the result.

    ``ignores`` names a scale that is taken for 1.
    """

    def gemm(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        alpha: float = 1,
        beta: float = 1,
        out: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dtype = torch.float64 if a.dtype == torch.int8 else accumulator_dtype(a.dtype)
        if out is None:
            out_dtype = out_dtype or (torch.int32 if a.dtype == torch.int8 else a.dtype)
            out = torch.full((*a.shape[:-1], b.shape[-1]), 0, dtype=out_dtype)
        x, y = read(a, b)
        acc = product(x.to(dtype), y.to(dtype))
        if scale_a is not None and scale_b is not None:
            acc = acc * (1 if ignores == "scale_a" else scale_a) * (1 if ignores == "scale_b" else scale_b)
        store(out, epilogue(acc, None if bias is None else bias.to(dtype), alpha, beta))
        return out

    return subject_of(gemm, **(EVERYTHING | traits))


def judged(subject: Subject, case_id: str) -> Outcome:
    """Return the outcome of one case on the CPU."""
    return judge(subject, Case.parse(case_id), CPU)


def diagnosis(subject: Subject, case_id: str) -> str:
    """Return the diagnosis under the case's own property, for a GEMM that fails it."""
    outcome = judged(subject, case_id)
    own = [failure for failure in outcome.failures if failure.property_name == outcome.case.property_name]
    assert outcome.status is CaseStatus.FAILED, f"{case_id}: {outcome.status}, {outcome.failures}"
    assert own, f"{case_id}: {outcome.failures}"
    return own[0].diagnosis
