"""Epilogues of CUTLASS operations on a GPU: results, and one launch for product and epilogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from extras import needs
from torch.profiler import ProfilerActivity, profile

from gemmtune.backends.cutlass import BACKEND
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = [
    needs("cutlass"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="operations of SM90 run on SM90 alone"
    ),
]

F16 = torch.float16
M, N, K = 264, 520, 1160


def fused(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Problem:
    problem = Problem.mm(M, N, K, dtype=F16, layout="nt", device_type="cuda")
    return dataclasses.replace(problem, epilogue=trace(function, torch.float32, list(operands)))


EPILOGUES: dict[str, Problem] = {
    "scaled": fused(lambda acc: acc * 3.0),
    "relu": fused(lambda acc: torch.relu(acc * 3.3 - 1.234)),
    "relu6": fused(lambda acc: torch.clamp(acc, 0, 6)),
    "cast-then-scale": fused(lambda acc: acc.to(F16) * 3.3),
    "over-a-size": fused(lambda acc: acc / N),
    "bias-gelu": fused(lambda acc, bias: F.gelu(acc + bias), torch.empty(N, dtype=F16)),
    "linear": Problem.addmm(M, N, K, dtype=F16, layout="nt", bias="n", alpha=1, beta=1, device_type="cuda"),
    "addmm": Problem.addmm(M, N, K, dtype=F16, layout="nt", bias="m1", alpha=2.0, beta=0.4, device_type="cuda"),
}


SAMPLED = "bias-gelu"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gpu, pytest.mark.slow] if name == SAMPLED else [pytest.mark.cutlass_build])
        for name in EPILOGUES
    ],
)
def test_product_and_epilogue_take_one_launch(name: str) -> None:
    problem, device = EPILOGUES[name], torch.device("cuda")
    tile = Settings(search="exhaustive", cutlass_op_allowlist_regex="64x64x128_1x1x1_.*pingpong")
    choice = BACKEND.enumerate(problem, detect("cuda"), tile).choices[0]
    kernel = choice.build()
    verdict = Verifier(problem, device).check(choice, kernel)
    assert verdict.status is Status.OK, f"{choice.name}: {verdict.reason}"

    x = random_operands(problem, device, seed=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        kernel.run(x.out, x.tensors, x.scalars)
        torch.cuda.synchronize()
    launched = [event.name for event in profiled.events() if event.device_type.name == "CUDA"]
    assert len(launched) == 1, launched
