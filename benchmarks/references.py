"""What gemmtune is measured against: torch's own operation, torch.compile with its autotuner, and a dense product of the same size.

torch's own operation is ``_int_mm`` for int_mm, ``_scaled_mm`` for scaled_mm, and for grouped_mm ``_grouped_mm`` where that does
not read offsets on the host; for mixed_mm it is a cast and a product, and for mm_plus_mm a product and an addmm; for bsr_mm its
sparse product, or where there is none the dense one of a matrix made anew. ``torch-default`` is torch's Triton kernel for
block-sparse weights as it is called without parameters, ``torch-best`` with the best of several that are measured first.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable

import torch
from calls import arguments, torch_call
from reference import Reference
from references_sparse import sparse_best, sparse_default, sparse_torch

from gemmtune.backends.aten.blocks import has_sparse_mm
from gemmtune.backends.table import load
from gemmtune.choice import Choice, Kernel, Tensors
from gemmtune.device import DeviceInfo
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans, widened
from gemmtune.problem.operations import GROUPED_OPS, QUANTIZED_OPS, SPARSE_OPS
from gemmtune.settings import current
from gemmtune.timing.rotation import SEED, Rotation, cache_bytes

__all__ = ["REFERENCES", "Reference", "allocating", "baseline", "dense", "inductor", "loop", "plain_torch"]


def plain_torch(problem: Problem, device: DeviceInfo) -> Reference:
    """torch's own operation, with copies where it does not take the operands as they are."""
    if problem.op == "bsr_mm" and has_sparse_mm(problem):
        return sparse_torch(problem, device)
    choice = baseline(problem, device)
    return Reference(choice=choice, kernel=choice.build(), tuning_s=0.0)


def inductor(problem: Problem, device: DeviceInfo) -> Reference:
    """The operation through torch.compile with max-autotune, tuned now. CUDA graphs are the measurement's, not the compiler's."""
    from torch._inductor import config, select_algorithm  # noqa: PLC0415 - slow to import, and its cache folder must be set before

    torch._dynamo.reset()
    gpu = device.type != "cpu"
    changes = {"max_autotune_gemm_backends": "ATEN,TRITON" if gpu else "ATEN,CPP", "max_autotune_report_choices_stats": False}
    select_algorithm.PRINT_AUTOTUNE = False
    operands = random_operands(problem, device.torch_device, seed=1)
    with config.patch(changes):
        compiled = torch.compile(torch_call(problem), mode="max-autotune-no-cudagraphs", dynamic=False)
        begun = time.perf_counter()
        compiled(*arguments(operands))  # in the grad mode of the measurement, which would compile again in another
        if gpu:
            torch.cuda.synchronize(device.torch_device)
    tuning_s = time.perf_counter() - begun
    return Reference(choice=baseline(problem, device), kernel=allocating(compiled, problem, device), tuning_s=tuning_s)


def dense(problem: Problem, device: DeviceInfo) -> Reference:
    """torch.mm of dense operands of the same size, the result in their dtype: what a caller has who does not quantize, or who keeps
    the zeros of a block-sparse weight.

    The operands are made beforehand and taken in turn, as those of the other contenders are.
    """
    if problem.op not in (*QUANTIZED_OPS, *SPARSE_OPS):
        raise RuntimeError(f"dense: expected one of {', '.join((*QUANTIZED_OPS, *SPARSE_OPS))}, got {problem.op}")
    own = problem.op == "mixed_mm" or (problem.sparsity is not None and problem.dtype.is_floating_point)
    dtype = problem.dtype if own else torch.bfloat16
    twin = Problem.mm(problem.m, problem.n, problem.k, dtype=dtype, device_type=problem.device_type)
    sets = itertools.cycle(Rotation(twin, device).sets)

    def run(*_: object) -> None:
        s = next(sets)
        torch.mm(s.a, s.b, out=s.out)

    def run_new(*_: object) -> torch.Tensor:
        s = next(sets)
        return torch.mm(s.a, s.b)

    return Reference(choice=baseline(problem, device), kernel=Kernel(run=run, run_new=run_new), tuning_s=0.0)


def loop(problem: Problem, device: DeviceInfo) -> Reference:
    """torch.mm for each group, whose sizes the host knows beforehand: what cannot be captured once the sizes change."""
    if not problem.groups:
        raise RuntimeError(f"loop: expected one of {', '.join(GROUPED_OPS)}, got {problem.op}")
    operands = random_operands(problem, device.torch_device, seed=SEED)
    assert operands.offs is not None
    pieces = [
        (g, *piece) for g, piece in enumerate(spans(operands.offs.tolist(), problem.k if problem.divides_terms else problem.m))
    ]

    def run(out: torch.Tensor, tensors: Tensors, _: object) -> None:
        a, b = tensors[:2]
        if problem.scale_b is not None:
            b = widened(b, tensors[2], problem.encoding, a.dtype)
        for g, begin, end in pieces:
            if problem.divides_terms:
                torch.mm(a[:, begin:end], b[begin:end], out=out[g])
            elif begin < end:
                torch.mm(a[begin:end], b[g], out=out[begin:end])

    return Reference(choice=baseline(problem, device), kernel=Kernel(run=run), tuning_s=0.0)


REFERENCES: dict[str, Callable[[Problem, DeviceInfo], Reference]] = {
    "torch": plain_torch,
    "inductor": inductor,
    "dense": dense,
    "loop": loop,
    "torch-default": sparse_default,
    "torch-best": sparse_best,
}


def allocating(compiled: Callable[..., torch.Tensor], problem: Problem, device: DeviceInfo) -> Kernel:
    """The compiled function makes its result itself. Results are kept for a while, so that each call writes to other memory as the
    kernels with ``out`` do, rather than to one result that stays in the cache."""
    out_bytes = problem.out.numel * problem.out.dtype.itemsize
    count = min(64, math.ceil(2 * cache_bytes(device) / max(out_bytes, 1)))
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=max(count, 1))

    def run(_out: torch.Tensor, *given: object) -> None:
        kept.append(compiled(*given))

    return Kernel(run=run, run_new=compiled)


def baseline(problem: Problem, device: DeviceInfo) -> Choice:
    return next(c for c in load("aten").enumerate(problem, device, current()).choices if c.baseline)
