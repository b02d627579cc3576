"""Composable Kernel's choices on an AMD GPU, verified against their claims. Nobody has run these yet: docs/rocm.md."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune import settings
from gemmtune.backends.ck import BACKEND
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is None, reason="Composable Kernel needs an AMD GPU, and torch for ROCm"),
]


def fused() -> Problem:
    x = torch.empty(512, dtype=torch.bfloat16, device="meta")
    problem = Problem.mm(384, 512, 768, device_type="cuda")
    epilogue = trace(lambda acc, x: torch.nn.functional.gelu(acc + x), problem.accumulator, (x,))
    return dataclasses.replace(problem, epilogue=epilogue)


PROBLEMS = {
    "mm-bf16": Problem.mm(512, 512, 512, device_type="cuda"),
    "mm-f16-odd": Problem.mm(500, 504, 1001, dtype=torch.float16, layout="nn", device_type="cuda"),
    "mm-f32": Problem.mm(256, 256, 256, dtype=torch.float32, layout="tn", device_type="cuda"),
    "mm-bf16-gelu": fused(),
    "mm-bf16-few": Problem.mm(16, 4096, 4096, device_type="cuda"),
    "baddbmm-bf16": Problem.baddbmm(3, 100, 120, 1000, alpha=2.0, beta=0.5, device_type="cuda"),
    "mm-bf16-split": Problem.mm(128, 128, 8192, device_type="cuda"),
    "scaled_mm-row": Problem.scaled_mm(256, 512, 1024, scales="row", device_type="cuda"),
    "scaled_mm-e5m2": Problem.scaled_mm(
        256, 512, 1024, dtype=torch.float8_e4m3fn, dtype_b=torch.float8_e5m2, scales="row", device_type="cuda"
    ),
    "scaled_mm-e4m3fnuz": Problem.scaled_mm(256, 512, 1024, dtype=torch.float8_e4m3fnuz, scales="row", device_type="cuda"),
    "scaled_mm-e5m2fnuz": Problem.scaled_mm(256, 512, 1024, dtype=torch.float8_e5m2fnuz, device_type="cuda"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_choice_of_a_search_is_right(name: str) -> None:
    problem, device = PROBLEMS[name], detect("cuda")
    offers = BACKEND.enumerate(problem, device, settings.current())
    if not offers.choices:
        assert name.startswith("scaled_mm"), offers.refusals
        pytest.skip(offers.refusals[0].reason)
    verifier = Verifier(problem, device.torch_device)
    for choice in offers.choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, f"{choice.name}: {verdict.reason}"
