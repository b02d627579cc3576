"""float32 by parts in Triton: values in the interpreter, offers, and code for architectures that this machine lacks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from rotation import rotated

from gemmtune.backends.by_parts import why_not_parts
from gemmtune.backends.triton.parts import INTERPRETER_CONFIGS, PartsChoice, parts_choices
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.numerics.bounds import accumulation_bound
from gemmtune.problem import Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import offers_for
from gemmtune.settings import Settings

pytest.importorskip("triton", reason="the interpreter is Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(8)

VERIFIED = {
    "mm-nt": Problem.mm(33, 20, 70, dtype=torch.float32, layout="nt", device_type="cpu"),
    "addmm-tn": Problem.addmm(17, 35, 128, dtype=torch.float32, layout="tn", bias="n", alpha=2.0, beta=0.5, device_type="cpu"),
    "bmm-nn": Problem.bmm(2, 20, 17, 65, dtype=torch.float32, layout="nn", device_type="cpu"),
    "baddbmm-tt": Problem.baddbmm(2, 18, 16, 64, dtype=torch.float32, layout="tt", device_type="cpu"),
    "mm-relu": dataclasses.replace(
        Problem.mm(33, 20, 64, dtype=torch.float32, device_type="cpu"), epilogue=trace(torch.relu, torch.float32, [])
    ),
}
LARGE = Problem.mm(4096, 4096, 4096, dtype=torch.float32, layout="nt", device_type="cuda", precision=Precision())


@pytest.mark.parametrize("name", rotated(list(VERIFIED), 3, "values by parts"))
def test_verification_accepts_it_with_its_own_claims(interpreted: Run, name: str) -> None:
    legal = [choice.config for choice in parts_choices(VERIFIED[name], preset("portable"), None)]
    assert legal
    verdicts = interpreted(triton_jobs.verdicts, VERIFIED[name], legal, family=triton_jobs.by_parts)
    assert [verdict.status for verdict in verdicts] == [Status.OK] * len(verdicts), verdicts
    assert all(0 < verdict.error_over_bound < 0.1 for verdict in verdicts)


def test_hard_to_split_numbers_match_torch(interpreted: Run) -> None:
    most = torch.finfo(torch.float32).max
    hard = torch.tensor(
        [math.inf, -math.inf, math.nan, most, -most, 2.0**-126, 1.17e-38, 2.0**-149, -0.0, 1 + 2.0**-23, 16777215.0, 3.3e38]
    )
    a = torch.zeros(len(hard), 64)
    a[:, 5] = hard
    a[:, 6] = torch.where(hard.isfinite(), 0.0, 1.0)
    b = torch.zeros(64, 16)
    b[5] = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 3.0, 1.5, 1 + 2.0**-7, 2.0**-100, -4.0, 8.0, 0.25, 1.0, 2.0, -0.5, 7.0])
    b[6] = 3.0
    problem = Problem.mm(len(hard), 16, 64, dtype=torch.float32, layout="nn", device_type="cpu")
    got = interpreted(triton_jobs.result_by_parts, problem, INTERPRETER_CONFIGS[0], a, b)
    expected = a @ b
    assert torch.equal(got.isnan(), expected.isnan())
    small = 2.0**-126 * 8  # subnormal numbers may be flushed to 0
    same = got == expected
    assert bool((same | got.isnan() | ((got - expected).abs() <= small)).all())
    assert bool(same[:5][~expected[:5].isnan()].all())


def test_its_error_is_no_larger_than_torchs(interpreted: Run) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(size, generator=generator) for size in ((48, 512), (512, 32)))
    problem = Problem.mm(48, 32, 512, dtype=torch.float32, layout="nn", device_type="cpu")
    got = interpreted(triton_jobs.result_by_parts, problem, INTERPRETER_CONFIGS[0], a, b)
    right, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    one_by_one = torch.zeros(48, 32)
    for k in range(512):
        one_by_one += a[:, k, None] * b[k]
    errors = [float(((x.double() - right).abs() / magnitude).max()) for x in (got, one_by_one)]
    assert errors[0] <= errors[1]


def test_the_claimed_bound_of_a_long_sum_is_tighter_than_that_of_float32_in_any_order() -> None:
    [choice, *_] = parts_choices(LARGE, preset("sm90"), 2)
    ieee = dataclasses.replace(choice.claims, input_mode="ieee", promoted_every=None, flush_subnormals=False)
    assert choice.claims.promoted_every == choice.config.block_k
    bounds = [accumulation_bound(LARGE, claims, alpha=1.0).relative for claims in (choice.claims, ieee)]
    assert bounds[0] < bounds[1] / 4
    short = dataclasses.replace(LARGE, a=VERIFIED["mm-nt"].a, b=VERIFIED["mm-nt"].b, out=VERIFIED["mm-nt"].out)
    assert accumulation_bound(short, choice.claims, alpha=1.0).relative > 2.0**-21


def test_it_is_offered_for_ieee_float32_on_tensor_cores() -> None:
    def names(problem: Problem, arch: str, **changes: bool) -> set[str]:
        offers = offers_for(problem, preset(arch), Settings(backends=("aten", "triton"), **changes), on_this_machine=False)
        return {choice.name.partition("_")[0] for choice in offers.choices}

    assert "triton:parts" in names(LARGE, "sm90")
    assert "triton:parts" not in names(LARGE, "sm90", float32_by_parts=False)
    assert "triton:parts" in names(LARGE, "sm80")
    assert "triton:parts" not in names(LARGE, "sm75")
    assert "triton:parts" not in names(dataclasses.replace(LARGE, precision=Precision(input_mode="tf32")), "sm90")
    assert "no CUDA tensor cores" in str(why_not_parts(LARGE, preset("gfx942")))
    few_terms = Problem.mm(512, 512, 48, dtype=torch.float32, device_type="cuda", precision=Precision())
    assert "more exact without parts" in str(why_not_parts(few_terms, preset("sm90")))
    assert all(choice.claims.deterministic for choice in parts_choices(LARGE, preset("sm90"), 6))


@pytest.mark.turn(6, 8)
@pytest.mark.parametrize(("arch", "layout"), rotated([(a, x) for a in ("sm80", "sm90") for x in ("nn", "nt", "tn")], 6, "parts"))
def test_it_compiles_within_the_predicted_resources_to_the_instruction_of_bfloat16(arch: str, layout: str) -> None:
    device = preset(arch)
    problem = Problem.mm(2048, 1024, 1000, dtype=torch.float32, layout=layout, device_type="cuda", precision=Precision())
    for choice in rotated(parts_choices(problem, device, 6), 3, f"parts {arch}"):
        [artifact] = choice.artifacts(device)
        assert artifact.shared_bytes <= artifact.predicted_bytes <= artifact.shared_bytes + artifact.slack_bytes
        assert artifact.expected.endswith(("bf16.bf16", "bf16.bf16.f32"))
        assert artifact.spilled_share < 0.1, choice.name


def test_names_identify_the_family() -> None:
    [choice] = [c for c in parts_choices(VERIFIED["mm-nt"], preset("portable"), None) if c.config.split_k == 1]
    assert isinstance(choice, PartsChoice)
    assert (choice.name, choice.info["template"]) == ("triton:parts_16x16x32_s1_w1", "parts")
