"""What gemmtune is measured against: torch's own operation, and torch.compile with its autotuner."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemmtune.backends import load
from gemmtune.choice import Choice, Kernel
from gemmtune.device import DeviceInfo
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem
from gemmtune.settings import current

__all__ = ["REFERENCES", "Reference", "inductor", "plain_torch", "torch_operation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A kernel to compare with. ``choice`` is torch's own, which tells how the operands have to lie: as they are."""

    choice: Choice
    kernel: Kernel
    tuning_s: float


def torch_operation(problem: Problem) -> Callable[..., torch.Tensor]:
    """f(a, b, inp, alpha, beta) as a caller without gemmtune writes it."""
    operation = getattr(torch, problem.op)
    if problem.inp is None:
        return lambda a, b, _inp, _alpha, _beta: operation(a, b)
    return lambda a, b, inp, alpha, beta: operation(inp, a, b, alpha=alpha, beta=beta)


def plain_torch(problem: Problem, device: DeviceInfo) -> Reference:
    """torch.mm, addmm, bmm or baddbmm."""
    choice = _baseline(problem, device)
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
        compiled = torch.compile(torch_operation(problem), mode="max-autotune-no-cudagraphs", dynamic=False)
        begun = time.perf_counter()
        with torch.no_grad():
            compiled(*_arguments(operands))
        if gpu:
            torch.cuda.synchronize(device.torch_device)
    tuning_s = time.perf_counter() - begun
    return Reference(choice=_baseline(problem, device), kernel=_kernel(compiled, problem, device), tuning_s=tuning_s)


REFERENCES: dict[str, Callable[[Problem, DeviceInfo], Reference]] = {"torch": plain_torch, "inductor": inductor}


def _kernel(compiled: Callable[..., torch.Tensor], problem: Problem, device: DeviceInfo) -> Kernel:
    """The compiled function makes its result itself. Results are kept for a while, so that each call writes to other memory as the
    kernels with ``out`` do, rather than to one result that stays in the cache."""
    out_bytes = problem.out.numel * problem.out.dtype.itemsize
    count = min(64, math.ceil(2 * device.last_level_cache_bytes / max(out_bytes, 1)))
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=max(count, 1))

    def run(
        _out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        inp: torch.Tensor | None,
        alpha: float,
        beta: float,
        _extra: tuple[torch.Tensor, ...],
    ) -> None:
        kept.append(compiled(a, b, inp, alpha, beta))

    def run_new(
        a: torch.Tensor, b: torch.Tensor, inp: torch.Tensor | None, alpha: float, beta: float, _extra: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return compiled(a, b, inp, alpha, beta)

    return Kernel(run=run, run_new=run_new)


def _arguments(operands: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]:
    return operands.a, operands.b, operands.inp, operands.alpha, operands.beta


def _baseline(problem: Problem, device: DeviceInfo) -> Choice:
    return next(c for c in load("aten").enumerate(problem, device, current()).choices if c.baseline)
