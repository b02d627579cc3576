"""The aten backend: torch's own operations as choices.

==================  ================================================================  =====================
choice              call                                                              for
==================  ================================================================  =====================
aten:mm             torch.mm(a, b)                                                    mm
aten:addmm          torch.addmm(inp, a, b, beta=beta, alpha=alpha), inp as M×N        addmm
aten:bias_addmm     the same with inp as a vector of N: cuBLASLt adds it by itself    addmm on a GPU
aten:bmm            torch.bmm(a, b)                                                   bmm
aten:baddbmm        torch.baddbmm(inp, a, b, beta=beta, alpha=alpha)                  baddbmm
==================  ================================================================  =====================

With an epilogue each of them is the unfused way: the operation, then the function applied eagerly (``aten:mm+eager``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..choice import Availability, Choice, Claims, Kernel, Offers, Refusal
from ..device import DeviceInfo
from ..problem import Epilogue, Layout, Problem
from ..problem.dtypes import accumulator_dtype, dtype_name
from ..problem.epilogue import evaluate
from ..problem.rules import why_not_dense
from ..settings import Settings

__all__ = ["BACKEND", "AtenChoice"]

NAME = "aten"
_MAX_SPLITS = 16
_SLICE_K = 64
"""How cuBLAS may have split K, which it does not tell: into at most 16 slices of at least 64."""


@dataclass(frozen=True, kw_only=True)
class AtenChoice(Choice):
    """One operation of torch, named as in ATen, with the arguments that are bound to it. All of them have an ``out=`` variant."""

    aten_name: str
    kwargs: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Bound keywords: ``bias`` (``vector`` or ``matrix``) for addmm; ``gemm_dtype`` where the product is wider than the inputs."""

    @property
    def content_hash(self) -> str:
        """A hash over the choice's name, the ATen name and the sorted keywords."""
        text = json.dumps([self.name, self.aten_name, sorted(self.kwargs.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self) -> Kernel:
        """The calls; nothing has to be loaded. ``run_new`` is there where torch's own result has the layout that is asked for."""
        problem = self.problem
        if _gemm_dtype(problem) != problem.dtype:
            kernel = _wide(problem)
        elif self.aten_name in ("mm", "bmm"):
            kernel = _product(getattr(torch, self.aten_name))
        else:
            kernel = _scaled(getattr(torch, self.aten_name), self._bias_view())
        if problem.epilogue is not None:
            kernel = _then_eager(kernel, problem, problem.epilogue)
        contiguous = problem.out == Layout.contiguous(problem.out.size, problem.out.dtype)
        return kernel if contiguous else Kernel(run=kernel.run)

    def _bias_view(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        match self.kwargs.get("bias"):
            case "vector":
                return lambda inp: inp if inp.dim() == 1 else inp[0]
            case "matrix":
                size = self.problem.out.size
                return lambda inp: inp.expand(size)
        return None


def _product(function: Callable[..., torch.Tensor]) -> Kernel:
    """a @ b by torch.mm or torch.bmm."""

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        function(a, b, out=out)

    def run_new(a: torch.Tensor, b: torch.Tensor, *_: object) -> torch.Tensor:
        return function(a, b)

    return Kernel(run=run, run_new=run_new)


def _scaled(function: Callable[..., torch.Tensor], view: Callable[[torch.Tensor], torch.Tensor] | None) -> Kernel:
    """alpha · a @ b + beta · view(inp) by torch.addmm or torch.baddbmm."""

    def run(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, *_: object
    ) -> None:
        function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha, out=out)  # type: ignore[arg-type]

    def run_new(a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, *_: object) -> torch.Tensor:
        return function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha)  # type: ignore[arg-type]

    return Kernel(run=run, run_new=run_new)


def _wide(problem: Problem) -> Kernel:
    """The product in a dtype wider than the inputs': torch's ``out_dtype`` where cuBLAS has that, else on converted inputs."""
    dtype = _gemm_dtype(problem)
    function: Callable[..., torch.Tensor] = torch.bmm if problem.batched else torch.mm
    direct = _has_out_dtype(problem)

    def run_new(a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, *_: object) -> torch.Tensor:
        result = function(a, b, out_dtype=dtype) if direct else function(a.to(dtype), b.to(dtype))
        if inp is not None and alpha != 1:
            result *= alpha
        if inp is not None and beta != 0:
            result.add_(inp, alpha=beta)
        return result

    def run(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, *_: object
    ) -> None:
        out.copy_(run_new(a, b, inp, alpha, beta))

    return Kernel(run=run, run_new=run_new)


def _then_eager(gemm: Kernel, problem: Problem, epilogue: Epilogue) -> Kernel:
    """``gemm``, then the epilogue by torch, one call for each node; the last one writes into ``out`` where it can."""
    out_dtype, fresh = problem.out.dtype, gemm.run_new
    in_place = _gemm_dtype(problem) == problem.dtype == out_dtype and problem.out.row_major
    assert fresh is not None

    def run(
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> None:
        if in_place:
            gemm.run(out, a, b, inp, alpha, beta, ())
            evaluate(epilogue, out, extra, out=out)
        else:
            evaluate(epilogue, fresh(a, b, inp, alpha, beta, ()), extra, out=out)

    def run_new(
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        extra: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        return evaluate(epilogue, fresh(a, b, inp, alpha, beta, ()), extra).to(out_dtype).contiguous()

    return Kernel(run=run, run_new=run_new)


def _gemm_dtype(problem: Problem) -> torch.dtype:
    """The dtype of the product before the epilogue: the inputs', unless the result is wanted with more bytes than they have."""
    wanted = problem.out.dtype
    return wanted if wanted.itemsize > problem.dtype.itemsize else problem.dtype


def _has_out_dtype(problem: Problem) -> bool:
    """cuBLAS multiplies 16-bit inputs into float32 (torch.mm's and torch.bmm's ``out_dtype``)."""
    return problem.device_type == "cuda" and torch.version.hip is None and _gemm_dtype(problem) == torch.float32


def _claims(problem: Problem, device: DeviceInfo) -> Claims:
    """What torch promises for the flags that the problem recorded; see ``_flushes_subnormals`` for where it promises less."""
    dtype, accumulate = _gemm_dtype(problem), accumulator_dtype(_gemm_dtype(problem))
    on_gpu = device.type != "cpu"
    reduced = problem.precision.reduced_partials and dtype == problem.dtype
    tf32 = dtype == problem.dtype and problem.precision.input_mode == "tf32"
    return Claims(
        accumulate=accumulate,
        partials=dtype if reduced else accumulate,
        epilogue_input=accumulate if problem.epilogue is None else dtype,
        splits=max(1, min(_MAX_SPLITS, problem.k // _SLICE_K)) if on_gpu else 1,
        input_mode="tf32" if tf32 else "ieee",
        flush_subnormals=tf32 or _flushes_subnormals(dtype, device),
    )


def _flushes_subnormals(dtype: torch.dtype, device: DeviceInfo) -> bool:
    """Whether subnormal inputs and results may become zero.

    The CPU instructions that multiply bfloat16 do so whatever the control register says (Intel SDM, VDPBF16PS and TDPBF16PS); so do
    the 16-bit matrix instructions of some AMD GPUs (PyTorch notes, "Numerical accuracy", on MI200).
    """
    if device.type == "cpu":
        return dtype == torch.bfloat16 and not {"avx512_bf16", "amx_bf16"}.isdisjoint(device.isa)
    return device.type == "hip" and dtype in (torch.float16, torch.bfloat16)


def _bias_repeats_rows(problem: Problem) -> bool:
    """inp is one row of N elements, added to every row of the result."""
    inp = problem.inp
    if inp is None or inp.size[-1:] != (problem.n,):
        return False
    return problem.m == 1 or inp.expanded(problem.out.size).stride[0] == 0


class AtenBackend:
    """torch itself, on every device."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Yes where torch sees the device."""
        if device.type != "cpu" and not torch.cuda.is_available():
            return Availability(ok=False, detail=f"torch {torch.__version__} sees no GPU here")
        return Availability(ok=True, detail=f"torch {torch.__version__}")

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - every device
        """Yes."""
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:  # noqa: ARG002 - nothing to tune
        """The operation that the caller would have used, marked as the baseline, and other forms of the same."""
        reason = why_not_dense(problem)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        if problem.op != "addmm" or device.type == "cpu":
            return Offers(choices=(_choice(problem, device, problem.op, baseline=True),))
        if problem.beta == "zero":
            refused = "beta is 0: there is no bias to add"
        elif _gemm_dtype(problem) != problem.dtype:
            refused = f"a result in {dtype_name(problem.out.dtype)} is not what the fused bias gives"
        elif not _bias_repeats_rows(problem):
            refused = (
                f"inp {problem.inp} is not a row of N={problem.n} elements repeated along M; expected shape [N], [1, N] or stride 0"
            )
        else:
            one_dim = problem.inp is not None and len(problem.inp.size) == 1
            vector = _choice(problem, device, "bias_addmm", baseline=one_dim, bias="vector")
            return Offers(choices=(vector, _choice(problem, device, "addmm", baseline=not one_dim, bias="matrix")))
        return Offers(
            choices=(_choice(problem, device, "addmm", baseline=True),),
            refusals=(Refusal(name=f"{NAME}:bias_addmm", reason=refused),),
        )


def _choice(problem: Problem, device: DeviceInfo, name: str, *, baseline: bool, **kwargs: str) -> AtenChoice:
    if _gemm_dtype(problem) != problem.dtype:
        kwargs["gemm_dtype"] = dtype_name(_gemm_dtype(problem))
    aten_name = name.removeprefix("bias_")
    return AtenChoice(
        name=f"{NAME}:{name}" + "+eager" * (problem.epilogue is not None),
        backend=NAME,
        problem=problem,
        claims=_claims(problem, device),
        info={"aten": aten_name, **kwargs},
        baseline=baseline,
        aten_name=aten_name,
        kwargs=kwargs,
    )


BACKEND = AtenBackend()
