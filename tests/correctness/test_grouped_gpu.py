"""Grouped products on a GPU: every choice verified, capture with offsets that change, gradients."""

from __future__ import annotations

import pytest
import torch
from launches import assert_tuned_and_captured

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu
PROBLEMS = {
    "bf16-few-rows": Problem.grouped_mm(16, 384, 512, groups=32, device_type="cuda"),
    "bf16-many-rows": Problem.grouped_mm(1000, 512, 320, groups=5, device_type="cuda"),
    "fp16-row-major-weights": Problem.grouped_mm(300, 200, 256, groups=8, dtype=torch.float16, layout="nn", device_type="cuda"),
    "fp32-unaligned": Problem.grouped_mm(65, 33, 47, groups=4, dtype=torch.float32, device_type="cuda"),
    "int8": Problem.mixed_grouped_mm(100, 384, 512, groups=8, device_type="cuda"),
    "int4": Problem.mixed_grouped_mm(
        40, 256, 512, groups=6, encoding="int4", scales="group_128", dtype=torch.float16, device_type="cuda"
    ),
    "int4-few": Problem.mixed_grouped_mm(16, 328, 1024, groups=20, encoding="int4", scales="group_64", device_type="cuda"),
    "uint4-more": Problem.mixed_grouped_mm(250, 200, 256, groups=5, encoding="uint4", device_type="cuda"),
    "int4-many": Problem.mixed_grouped_mm(2048, 1032, 1024, groups=8, encoding="int4", scales="group_128", device_type="cuda"),
    "fp8-rows-few": Problem.scaled_grouped_mm(40, 384, 512, groups=16, device_type="cuda"),
    "fp8-rows": Problem.scaled_grouped_mm(700, 512, 384, groups=5, device_type="cuda"),
    "fp8-blocks": Problem.scaled_grouped_mm(300, 384, 1024, groups=6, scales="block_128x128", device_type="cuda"),
    "fp8-blocks-unaligned": Problem.scaled_grouped_mm(
        33, 136, 272, groups=3, scales="block_1x128", layout="nn", out_dtype=torch.float32, device_type="cuda"
    ),
    "picked-few": Problem.routed_grouped_mm(64, 384, 512, groups=16, tokens=8, gated="silu", device_type="cuda"),
    "picked-many": Problem.routed_grouped_mm(1000, 256, 320, groups=5, tokens=500, gated="gelu_tanh", device_type="cuda"),
    "gated-row-major-weights": Problem.routed_grouped_mm(
        300, 128, 256, groups=4, gated="silu", dtype=torch.float16, layout="nn", device_type="cuda"
    ),
    "picked-fp32": Problem.routed_grouped_mm(65, 33, 47, groups=4, tokens=20, dtype=torch.float32, device_type="cuda"),
    "added-up-few": Problem.combined_grouped_mm(64, 512, 384, groups=16, tokens=8, device_type="cuda"),
    "added-up-many": Problem.combined_grouped_mm(1000, 320, 256, groups=5, tokens=250, device_type="cuda"),
    "bf16-terms": Problem.grouped_k_mm(256, 384, 700, groups=6, device_type="cuda"),
    "fp16-terms-row-major": Problem.grouped_k_mm(100, 136, 320, groups=4, dtype=torch.float16, layout="nn", device_type="cuda"),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", ["aten", "triton", "cuda"])
def test_every_choice_is_right(backend: str, name: str) -> None:
    problem, device = PROBLEMS[name], detect("cuda")
    verifier = Verifier(problem, device.torch_device)
    search = "default" if problem.widens_b else "quick"
    choices = load(backend).enumerate(problem, device, Settings(search=search)).choices
    found = {choice.name: verifier.check(choice, choice.build()) for choice in choices}
    assert {v.status for v in found.values()} <= {Status.OK}, {n: v.reason for n, v in found.items() if v.status is not Status.OK}


def by_loop(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.cat([a[begin:end] @ b[g] for g, (begin, end) in enumerate(spans(ends, a.shape[0]))])


@pytest.mark.parametrize("backend", ["aten", "triton", "cuda"])
def test_a_captured_call_sees_offsets_that_changed(backend: str, own_store: object) -> None:
    assert_tuned_and_captured(backend)


@pytest.mark.slow
def test_nothing_waits_for_the_device(own_store: object) -> None:
    a = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    b = torch.randn(4, 256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    offs = torch.tensor([16, 16, 50, 64], dtype=torch.int32, device="cuda")
    with settings.patch(search="quick", tune_in_subprocess=False):
        for _ in range(2):
            a.grad = b.grad = None
            gemmtune.grouped_mm(a, b, offs).sum().backward()
        a.grad = b.grad = None
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gemmtune.grouped_mm(a, b, offs).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    other = [x.detach().double().requires_grad_() for x in (a, b)]
    by_loop(*other, [16, 16, 50, 64]).sum().backward()
    for got, want in zip((a.grad, b.grad), (x.grad for x in other), strict=True):
        assert got is not None
        assert want is not None
        assert (got.double() - want).abs().max() <= 6e-2 * (1 + want.abs().max())
