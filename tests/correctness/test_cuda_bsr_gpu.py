"""Cuda families for block-sparse weights on a GPU: verification of every shape, captures, streams, calls."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from cuda_cases import BF16, F16, biased, blocked, choice, config, family_of, gated
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart, call, operands_for
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.backends.cuda.bsr.configs import SHAPES
from gemmtune.backends.cuda.bsr_skinny.family import SHAPES as SKINNY
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.problem import Problem
from gemmtune.sparse import create_blocked_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Sparse BSR tensor support", "ignore:Sparse invariant checks"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernels run on SM90 alone"
    ),
]
PROBLEMS: dict[str, Problem] = {
    "one-block": blocked(16, 16, 16, density=1),
    "tails": blocked(77, 336, 592, density=0.3),
    "tokens-contiguous": blocked(136, 336, 592, density=0.5, layout="tt"),
    "blocks-of-32": blocked(300, 416, 672, block=32, density=0.2, dtype=F16),
    "skewed": blocked(260, 1040, 1040, imbalance="skewed", wide_index=True),
    "nothing": blocked(100, 256, 256, density=0),
    "added": Problem.bsr_addmm(
        200, 448, 512, block=16, alpha=2, beta=0.5, bias="mn", imbalance="skewed", device_type="cuda", prepacked=True
    ),
    "gated": gated(blocked(131, 320, 512, block=32, density=0.3)),
    "float32-biased": biased(blocked(131, 320, 512, density=0.3)),
    "long": blocked(64, 512, 16384),
    "4096": blocked(4096, 4096, 4096),
    "4000-of-32-tokens-contiguous": blocked(4000, 4032, 4160, block=32, layout="tt"),
}
APART = blocked(5, 336, 592, density=0.3)
FEW_TOKENS: dict[str, Problem] = {
    "one-token": blocked(1, 16, 16, density=1),
    "seven-tokens": blocked(7, 336, 592, density=0.3),
    "five-tokens-with-gaps": dataclasses.replace(APART, a=dataclasses.replace(APART.a, stride=(604, 1), offset=4)),
    "fourteen-tokens-contiguous": blocked(14, 336, 592, density=0.5, layout="tt"),
    "32-tokens-contiguous": blocked(32, 1040, 2048, layout="tt", dtype=F16),
    "blocks-of-32-few-tokens": blocked(13, 416, 672, block=32, density=0.2, dtype=F16),
    "blocks-of-32-tokens-contiguous": blocked(30, 416, 672, block=32, density=0.4, layout="tt"),
    "skewed-few-tokens": blocked(8, 1040, 4112, imbalance="skewed", wide_index=True),
    "nothing-for-few-tokens": blocked(16, 256, 256, density=0),
    "added-to-few-tokens": Problem.bsr_addmm(
        7, 448, 512, block=16, alpha=2, beta=0.5, bias="mn", imbalance="skewed", device_type="cuda", prepacked=True
    ),
    "gated-few-tokens": gated(blocked(11, 320, 512, block=32, density=0.3)),
    "float32-biased-few-tokens": biased(blocked(31, 320, 512, density=0.3)),
    "14336": blocked(16, 14336, 4096, density=0.5),
}
PAIRS = rotated((*itertools.product(PROBLEMS, SHAPES), *itertools.product(FEW_TOKENS, SKINNY)), 3)
"""Cases of which each commit tests a third."""


def choices_of(problem: Problem, shape: Any) -> list[CudaChoice]:
    """Return choices with persistent blocks, with one block per tile or panel, and with and without PDL.

    Return an empty list for an illegal shape.
    """
    device = detect("cuda")
    launched: list[dict[str, Any]] = [{"blocks": 12}, {"blocks": 2**20, "pdl": True}, {"pdl": True}]
    if shape in SKINNY:
        launched = [{"pdl": False}, {"pdl": True}]
    if family_of(shape).why_not_config(problem, device, config(shape)):
        return []
    return [choice(problem, shape, device, **way) for way in launched]


@pytest.mark.parametrize(("name", "shape"), PAIRS, ids=str)
def test_all_launch_variants_pass_verification(name: str, shape: Any) -> None:
    problem = (PROBLEMS | FEW_TOKENS)[name]
    assert_right(problem, choices_of(problem, shape))


@pytest.mark.parametrize("shape", [*SHAPES, *SKINNY], ids=str)
def test_repeated_launches_give_equal_bits_with_other_sizes_between(shape: Any) -> None:
    """Check one cubin with two problems in back-to-back launches that write the whole result."""
    sizes = ((8, 1024, 4096), (5, 320, 512)) if shape in SKINNY else ((512, 1024, 1024), (328, 320, 512))
    made = [choices_of(blocked(*size, density=0.3), shape)[-1] for size in sizes]
    assert made[0].compile_key == made[1].compile_key
    runs = [(one.build().run, operands_for(one, seed=5)) for one in made]
    expected = [call(run, torch.empty_like(x.out), x) for run, x in runs]
    for _ in range(50):
        again = [call(run, torch.full_like(x.out, float("nan")), x) for run, x in runs]
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


@pytest.mark.parametrize(("shape", "tokens"), [*((SHAPES[i], 1024) for i in (1, 5, 10)), (SKINNY[0], 8)], ids=str)
def test_runs_in_captures_streams_and_threads(shape: Any, tokens: int) -> None:
    one = choices_of(blocked(tokens, 2048, 1024, density=0.3), shape)[-1]
    assert_replayable(one)
    assert_streams_apart(one)
    assert_launched_by_a_new_thread(one)


@pytest.mark.parametrize(("family", "tokens"), [("bsr_[0-9]", 200), *(("bsr_skinny", tokens) for tokens in (1, 16, 32))])
def test_calls_use_only_these_kernels(own_store: object, family: str, tokens: int) -> None:
    """Check a tuned call with contiguous tokens, then with a weight that was changed in place."""
    forget_plans()
    bsr = create_blocked_tensor(512, 768, block=16, density=0.1, dtype=BF16, device="cuda")
    packed, x = gemmtune.prepack(bsr), torch.randn(768, tokens, device=GPU).bfloat16()
    with settings.patch(backends=("cuda",), choice_allowlist_regex=f"^cuda:{family}", search="quick", tune_in_subprocess=False):
        [found] = gemmtune.tune(gemmtune.bsr_mm, packed, x, progress=False)
        assert found.pick is not None
        for _ in range(2):
            want = bsr.to_dense().double() @ x.double()
            got = gemmtune.bsr_mm(packed, x).double()
            assert ((got - want).abs() <= 1e-2 * want.abs().max()).all()
            bsr.values().mul_(-2)
