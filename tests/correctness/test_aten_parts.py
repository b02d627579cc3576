"""float32 by torch's products of bfloat16 parts: the same calls on a CPU, where parts are multiplied as float32."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gemmtune.backends.aten.offers import by_parts
from gemmtune.backends.by_parts import parts_of
from gemmtune.choice import Status
from gemmtune.device import detect, preset
from gemmtune.problem import Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import offers_for
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

F32 = torch.float32
PROBLEMS = {
    "mm-nt": Problem.mm(33, 20, 70, dtype=F32, device_type="cpu"),
    "mm-nt-prepacked": Problem.mm(33, 20, 70, dtype=F32, device_type="cpu", prepacked=True),
    "addmm-nn in pieces": Problem.addmm(17, 40, 2500, dtype=F32, layout="nn", bias="n", alpha=2.5, beta=0.5, device_type="cpu"),
    "bmm-tn": Problem.bmm(2, 20, 17, 64, dtype=F32, layout="tn", device_type="cpu"),
    "baddbmm-tt": Problem.baddbmm(2, 20, 17, 72, dtype=F32, layout="tt", device_type="cpu"),
    "mm-relu": dataclasses.replace(Problem.mm(9, 20, 64, dtype=F32, device_type="cpu"), epilogue=trace(torch.relu, F32, [])),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_verification_accepts_it_with_its_own_claims(problem: Problem) -> None:
    choice = by_parts(problem, preset("avx512"))
    verdict = Verifier(problem, torch.device("cpu")).check(choice, choice.build())
    assert (verdict.status, verdict.error_over_bound < 0.1) == (Status.OK, True), verdict
    assert (choice.packed_format is not None) == problem.prepacked


def test_parts_are_bfloat16_and_their_sum_is_what_was_split() -> None:
    most = torch.finfo(F32).max
    x = torch.cat([torch.randn(500), torch.randn(500) * 2.0**100, torch.tensor([most, -most, 0.0, -0.0, 1 + 2.0**-23, 2.0**-100])])
    made = parts_of(x)
    assert all(torch.equal(part.bfloat16().float(), part) for part in made)
    assert torch.equal(sum(part.double() for part in made), x.double())
    assert all(bool((part * x.sign() >= 0).all()) for part in made)
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(F32)
    special = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), signalling])
    high, middle, low = parts_of(special)
    assert torch.equal(low[:2], special[:2])
    assert torch.equal(high[:2], torch.tensor([1.0, -1.0]))
    assert bool(low[2:].isnan().all())
    assert bool((high[2:].isfinite() & (high[2:] != 0)).all())
    assert not middle.any()


def test_infinities_and_the_largest_numbers_come_out_as_in_torch() -> None:
    problem = Problem.mm(4, 3, 64, dtype=F32, layout="nn", device_type="cpu")
    a, b = torch.zeros(4, 64), torch.zeros(64, 3)
    a[:, 1] = torch.tensor([math.inf, math.nan, torch.finfo(F32).max, -math.inf])
    b[1] = torch.tensor([2.0, 1.0, -0.5])
    out = torch.empty(4, 3)
    by_parts(problem, preset("avx512")).build().run(out, (a, b), ())
    assert torch.equal(out.nan_to_num(nan=7.0), (a @ b).nan_to_num(nan=7.0))


def test_it_is_offered_on_a_gpu_unless_the_setting_or_torch_says_otherwise() -> None:
    def names(problem: Problem, arch: str, **changes: bool) -> list[str]:
        chosen = Settings(backends=("aten",), **changes)
        return [choice.name for choice in offers_for(problem, preset(arch), chosen, on_this_machine=False).choices]

    problem = Problem.mm(512, 512, 512, dtype=F32, device_type="cuda", precision=Precision())
    tf32 = dataclasses.replace(problem, precision=Precision(input_mode="tf32"))
    assert names(problem, "sm90") == ["aten:mm", "aten:by_parts"]
    assert names(problem, "sm75") == names(tf32, "sm90") == ["aten:mm"]
    assert names(problem, "sm90", float32_by_parts=False) == ["aten:mm"]


@pytest.mark.gpu
def test_it_is_right_on_a_gpu_and_no_less_exact_than_torch() -> None:
    device = detect("cuda")
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    right, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    problem = Problem.mm(4096, 4096, 4096, dtype=F32, device_type="cuda", precision=Precision())
    kernel = by_parts(problem, device).build()
    verdict = Verifier(problem, device.torch_device).check(by_parts(problem, device), kernel)
    assert verdict.status is Status.OK, verdict
    out = torch.empty(4096, 4096, device="cuda")
    kernel.run(out, (a, b.t()), ())
    errors = [((x.double() - right).abs() / magnitude).max() for x in (out, torch.mm(a, b.t()))]
    assert errors[0] <= errors[1]
