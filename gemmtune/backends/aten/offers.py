"""What torch has for a problem. Exactly one choice is the baseline, and it does every problem that there is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...choice import Choice, Claims, Kernel, Offers, Refusal
from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ..scaling import has_plain_bias, mode_of
from . import dense, int8, scaled
from .claims import composed_scaled_claims, dense_claims, int_claims, mixed_claims, scaled_claims, sum_claims
from .dense import gemm_dtype

__all__ = ["NAME", "AtenChoice", "offers"]

NAME = "aten"
COMPOSED_SCALED = "dequantized_mm"
"""The name of scaled_mm by a product in wider floats."""


@dataclass(frozen=True, kw_only=True)
class AtenChoice(Choice):
    """An operation of torch, or a few, named as in ATen, with the arguments that are bound to it. All can write into ``out``."""

    aten_name: str
    kwargs: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Bound keywords: ``bias`` (``vector`` or ``matrix``) for addmm; ``gemm_dtype`` where the product is wider than the inputs."""

    @property
    def content_hash(self) -> str:
        """A hash over the choice's name, the ATen name and the sorted keywords."""
        text = json.dumps([self.name, self.aten_name, sorted(self.kwargs.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002
        """The calls; nothing has to be loaded. ``run_new`` is there where torch's own result has the layout that is asked for."""
        problem = self.problem
        if problem.c is not None:
            return dense.sum_kernel(problem)
        if problem.integers:
            return int8.kernel_of(problem, self.aten_name)
        if problem.widens_b:
            return dense.mixed_kernel(problem)
        if problem.float8:
            return scaled.composed_kernel(problem) if self.aten_name == COMPOSED_SCALED else scaled.kernel_of(problem)
        return dense.kernel_of(self.problem, self.aten_name, self.kwargs)


def offers(problem: Problem, device: DeviceInfo) -> Offers:
    """The operation that the caller would have used, marked as the baseline, and other forms of the same."""
    if problem.c is not None:
        return Offers(choices=(_choice(problem, problem.op, sum_claims(problem, device), baseline=True),))
    if problem.integers:
        return _int_mm(problem)
    if problem.widens_b:
        return Offers(choices=(_choice(problem, problem.op, mixed_claims(problem, device), baseline=True),))
    if problem.float8:
        return _scaled_mm(problem, device)
    return _dense(problem, device)


def _dense(problem: Problem, device: DeviceInfo) -> Offers:
    claims = dense_claims(problem, device)
    if problem.op != "addmm" or device.type == "cpu":
        return Offers(choices=(_choice(problem, problem.op, claims, baseline=True),))
    if problem.beta == "zero":
        refused = "beta is 0: there is no bias to add"
    elif gemm_dtype(problem) != problem.dtype:
        refused = f"a result in {dtype_name(problem.out.dtype)} is not what the fused bias gives"
    elif not _bias_repeats_rows(problem):
        refused = (
            f"inp {problem.inp} is not a row of N={problem.n} elements repeated along M; expected shape [N], [1, N] or stride 0"
        )
    else:
        one_dim = problem.inp is not None and len(problem.inp.size) == 1
        vector = _choice(problem, "bias_addmm", claims, baseline=one_dim, bias="vector")
        return Offers(choices=(vector, _choice(problem, "addmm", claims, baseline=not one_dim, bias="matrix")))
    return Offers(
        choices=(_choice(problem, "addmm", claims, baseline=True),),
        refusals=(Refusal(name=f"{NAME}:bias_addmm", reason=refused),),
    )


def _int_mm(problem: Problem) -> Offers:
    reason = int8.why_not_native(problem)
    if reason is None:
        return Offers(choices=(_choice(problem, "_int_mm", int_claims(problem), baseline=True),))
    return Offers(
        choices=(_choice(problem, "_int_mm_pad", int_claims(problem), baseline=True),),
        refusals=(Refusal(name=f"{NAME}:_int_mm", reason=reason),),
    )


def _scaled_mm(problem: Problem, device: DeviceInfo) -> Offers:
    """What torch has: on a CPU its operation is written for any CPU, and a product of wider floats, often faster, competes."""
    reason = scaled.why_not_native(problem, device)
    composed = _choice(problem, COMPOSED_SCALED, composed_scaled_claims(problem, device), baseline=reason is not None)
    if reason is not None:
        return Offers(choices=(composed,), refusals=(Refusal(name=f"{NAME}:_scaled_mm", reason=reason),))
    fused = has_plain_bias(problem)
    form = {"scales": mode_of(problem)} | ({"bias": "fused"} if fused else {})
    claims = scaled_claims(problem, device, fused=fused)
    native = _choice(problem, "_scaled_mm", claims, baseline=True, eager=not fused, **form)
    return Offers(choices=(native, composed) if device.type == "cpu" else (native,))


def _choice(problem: Problem, name: str, claims: Claims, *, baseline: bool, eager: bool = True, **kwargs: str) -> AtenChoice:
    """``name`` begins with ``bias_`` where the ATen operation has no such prefix; with ``eager`` an epilogue follows eagerly."""
    if problem.dtype.itemsize > 1 and gemm_dtype(problem) != problem.dtype:
        kwargs["gemm_dtype"] = dtype_name(gemm_dtype(problem))
    aten_name = name.removeprefix("bias_")
    return AtenChoice(
        name=f"{NAME}:{name}" + "+eager" * (eager and problem.epilogue is not None),
        backend=NAME,
        problem=problem,
        claims=claims,
        info={"aten": aten_name, **kwargs},
        baseline=baseline,
        aten_name=aten_name,
        kwargs=kwargs,
    )


def _bias_repeats_rows(problem: Problem) -> bool:
    """inp is one row of N elements, added to every row of the result."""
    inp = problem.inp
    if inp is None or inp.size[-1:] != (problem.n,):
        return False
    return problem.m == 1 or inp.expanded(problem.out.size).stride[0] == 0
