"""Choices of torch for a problem, exactly one of them the baseline, and the claims of its operations for the recorded flags."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...choice import Choice, Claims, Kernel, Offers, Refusal
from ...declaration.traits import TORCH_SPLITS
from ...device import DeviceInfo
from ...numerics.block_sparse import dense_problem
from ...numerics.routed import grouped_problem
from ...problem import Problem
from ...problem.compositions import scaled_product
from ...problem.dtypes import accumulator_dtype, dtype_name
from ..around import BY_INDEX, DensifiedChoice, RoutedChoice
from ..scaling import mode_of
from . import blocks, dense, grouped, int8, scaled
from .dense import gemm_dtype

NAME = "aten"
COMPOSED_SCALED = "dequantized_mm"
"""Name of scaled_mm by a product in wider floats."""
_SLICE_K = 64
"""Assumed length of the shortest slice of cuBLAS's split of K, which it does not report."""
_FLOAT32_BITS = 24


@dataclass(frozen=True, kw_only=True)
class AtenChoice(Choice):
    """One or several operations of torch, named as in ATen, with bound arguments. All can write into ``out``."""

    aten_name: str
    kwargs: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Bound keywords: ``bias`` (``vector`` or ``matrix``) for addmm, and ``gemm_dtype`` if the product is wider than the inputs."""

    @property
    def content_hash(self) -> str:
        text = json.dumps([self.name, self.aten_name, sorted(self.kwargs.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """Return the operation for the problem, or the baseline if this is the baseline."""
        offered = offers(problem, device).choices
        found = next((c for c in offered if (c.baseline if self.baseline else c.name == self.name)), None)
        return found or f"{self.name} is not offered for {problem}"

    @property
    def legal_between(self) -> bool:
        """True, because some operations require a few rows at least, or aligned ones."""
        return True

    @property
    def one_kernel(self) -> bool:
        """True, because torch's operations have no ``compile_key``."""
        return True

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002
        """Return the kernel of the calls, which load nothing. ``run_new`` exists if torch's result has the requested layout."""
        problem = self.problem
        if problem.c is not None:
            return dense.sum_kernel(problem)
        if problem.integers:
            return int8.kernel_of(problem, self.aten_name)
        if problem.widens_b:
            return dense.mixed_kernel(problem)
        if problem.float8:
            if self.aten_name != COMPOSED_SCALED:
                return scaled.kernel_of(problem)
            # Wider floats are multiplied, and the sums scaled or, for block scales, the operands.
            return dense.of_sums(lambda tensors, _: scaled_product(*tensors), problem)
        return dense.kernel_of(self.problem, self.aten_name, self.kwargs)


def offers(problem: Problem, device: DeviceInfo) -> Offers:
    """Return the operation that the caller would have used, marked as the baseline, and other forms of it."""
    if problem.sparsity is not None:
        return _blocks(problem, device)
    if problem.op in BY_INDEX:
        return _routed(problem, device)
    if problem.groups:
        return _grouped(problem, device)
    if problem.c is not None:
        # c @ d, rounded to the products' dtype, plus a @ b: two partial sums, or those of either product.
        claims, dtype = dense_claims(problem, device), gemm_dtype(problem)
        splits = 2 if claims.partials != dtype else sum(_splits(k, device) for k in problem.summed)
        claims = dataclasses.replace(claims, partials=dtype, splits=splits)
        return Offers(choices=(_choice(problem, problem.op, claims, baseline=True),))
    if problem.integers:
        return _int_mm(problem)
    if problem.widens_b:
        # b is converted to a's dtype: exactly without a scale, else with one rounding of each weight.
        claims = dense_claims(problem, device, weights=None if problem.scale_b is None else problem.dtype)
        return Offers(choices=(_choice(problem, problem.op, claims, baseline=True),))
    if problem.float8:
        return _scaled_mm(problem, device)
    return _dense(problem, device)


def _dense(problem: Problem, device: DeviceInfo) -> Offers:
    claims, inp = dense_claims(problem, device), problem.inp
    if problem.op != "addmm" or device.type == "cpu":
        return Offers(choices=(_choice(problem, problem.op, claims, baseline=True),))
    if problem.beta == "zero":
        refused = "beta is 0: there is no bias to add"
    elif gemm_dtype(problem) != problem.dtype:
        refused = f"the fused bias supports no result in {dtype_name(problem.out.dtype)}"
    elif inp is None or inp.size[-1:] != (problem.n,) or (problem.m != 1 and inp.expanded(problem.out.size).stride[0] != 0):
        refused = f"inp {inp} is not a row of N={problem.n} elements repeated along M; expected shape [N], [1, N] or stride 0"
    else:
        one_dim = len(inp.size) == 1
        vector = _choice(problem, "bias_addmm", claims, baseline=one_dim, bias="vector")
        return Offers(choices=(vector, _choice(problem, "addmm", claims, baseline=not one_dim, bias="matrix")))
    return Offers(
        choices=(_choice(problem, "addmm", claims, baseline=True),),
        refusals=(Refusal(name=f"{NAME}:bias_addmm", reason=refused),),
    )


def _blocks(problem: Problem, device: DeviceInfo) -> Offers:
    """Return torch's sparse products, and its dense ones, which are the baseline if there is no sparse one."""
    sparse = blocks.choices(problem, device)
    native = any(choice.baseline for choice in sparse)
    dense = offers(dense_problem(problem), device).choices
    wrapped = [DensifiedChoice.around(problem, choice, baseline=choice.baseline and not native) for choice in dense]
    reason = None if device.type == "cpu" else blocks.why_not_triton(problem)
    refusals = () if reason is None else (Refusal(name=f"{NAME}:bsr_triton", reason=reason),)
    return Offers(choices=(*sparse, *wrapped), refusals=refusals)


def _grouped(problem: Problem, device: DeviceInfo) -> Offers:
    made, reason = grouped.choices(problem, device)
    refused = () if reason is None else (Refusal(name=f"{NAME}:{grouped.native_name(problem)}", reason=reason),)
    return Offers(choices=tuple(made), refusals=refused)


def _routed(problem: Problem, device: DeviceInfo) -> Offers:
    plain = _grouped(grouped_problem(problem), device)
    choices = [RoutedChoice.around(problem, choice, baseline=choice.baseline) for choice in plain.choices]
    return Offers(choices=tuple(choices), refusals=plain.refusals)


def _int_mm(problem: Problem) -> Offers:
    reason = int8.why_not_native(problem)
    claims = Claims(accumulate=torch.int32, epilogue_input=torch.int32 if problem.epilogue is None else torch.float32)
    choice = _choice(problem, "_int_mm" if reason is None else "_int_mm_pad", claims, baseline=True)
    return Offers(choices=(choice,), refusals=() if reason is None else (Refusal(name=f"{NAME}:_int_mm", reason=reason),))


def _scaled_mm(problem: Problem, device: DeviceInfo) -> Offers:
    """Return torch's scaled products. A product of wider floats competes on a CPU, where it is often faster than generic code."""
    reason = scaled.why_not_native(problem, device)
    sums = Claims(accumulate=torch.float32, splits=_splits(problem.k, device), accumulator_bits=_FLOAT32_BITS)
    composed = _choice(problem, COMPOSED_SCALED, sums, baseline=reason is not None)
    if reason is not None:
        return Offers(choices=(composed,), refusals=(Refusal(name=f"{NAME}:_scaled_mm", reason=reason),))
    fused, product = scaled.fuses_bias(problem), scaled.product_dtype(problem)
    form = {"scales": mode_of(problem)} | ({"bias": "fused"} if fused else {})
    form |= {"product": dtype_name(product)} if product != problem.out.dtype else {}
    before = torch.float32 if problem.epilogue is None or fused else product
    claims = Claims(accumulate=torch.float32, epilogue_input=before, splits=_splits(problem.k, device))
    native = _choice(problem, "_scaled_mm", claims, baseline=True, eager=not fused, **form)
    return Offers(choices=(native, composed) if device.type == "cpu" else (native,))


def _choice(problem: Problem, name: str, claims: Claims, *, baseline: bool, eager: bool = True, **kwargs: str) -> AtenChoice:
    """Build a choice. ``name`` has a prefix ``bias_`` that the ATen operation lacks. ``eager`` applies an epilogue eagerly."""
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


def dense_claims(problem: Problem, device: DeviceInfo, *, weights: torch.dtype | None = None) -> Claims:
    """Return the claims of a product in ``gemm_dtype``. ``_flushes_subnormals`` says where torch promises less than the flags."""
    dtype, accumulate = gemm_dtype(problem), accumulator_dtype(gemm_dtype(problem))
    reduced = problem.precision.reduced_partials and dtype == problem.dtype
    tf32 = dtype == problem.dtype and problem.precision.input_mode == "tf32"
    return Claims(
        accumulate=accumulate,
        partials=dtype if reduced else accumulate,
        epilogue_input=accumulate if problem.epilogue is None else dtype,
        splits=_splits(problem.k, device),
        weights=weights,
        input_mode="tf32" if tf32 else "ieee",
        flush_subnormals=tf32 or _flushes_subnormals(dtype, device),
    )


def _splits(k: int, device: DeviceInfo) -> int:
    return max(1, min(TORCH_SPLITS, k // _SLICE_K)) if device.type != "cpu" else 1


def _flushes_subnormals(dtype: torch.dtype, device: DeviceInfo) -> bool:
    """Return True if subnormal inputs and results may become zero.

    The CPU instructions that multiply bfloat16 flush them regardless of the control register (Intel SDM, VDPBF16PS and
    TDPBF16PS). So do the 16-bit matrix instructions of some AMD GPUs (PyTorch notes, "Numerical accuracy", on MI200).
    """
    if device.type == "cpu":
        return dtype == torch.bfloat16 and not {"avx512_bf16", "amx_bf16"}.isdisjoint(device.isa)
    return device.type == "hip" and dtype in (torch.float16, torch.bfloat16)
