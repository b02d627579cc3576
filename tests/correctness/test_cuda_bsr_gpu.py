"""The cuda family for block-sparse weights on a GPU: every shape, small and large, is verified; captures, streams, calls."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_cases import BF16, F16, biased, blocked, bsr_shape, choice, gated, legal_choices
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart, call, operands_for
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.backends.cuda.backend import BSR
from gemmtune.backends.cuda.bsr.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.choice import CudaChoice, offers
from gemmtune.device import detect
from gemmtune.dispatch.plan import forget_plans
from gemmtune.errors import ErrorFromChoice
from gemmtune.numerics.block_sparse import sparse_of
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.sparse import create_blocked_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Sparse BSR tensor support", "ignore:Sparse invariant checks"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernels run on SM90 alone"
    ),
]
ADDED = Problem.bsr_addmm(
    200, 448, 512, block=64, alpha=2, beta=0.5, bias="mn", imbalance="skewed", device_type="cuda", prepacked=True
)
SMALL: dict[str, Problem] = {
    "one-unit": blocked(64, 64, 64, density=1),
    "one-token": blocked(1, 256, 192),
    "tails": blocked(77, 320, 576, density=0.3),
    "tokens-contiguous": blocked(136, 320, 576, density=0.5, layout="tt"),
    "blocks-of-128": blocked(300, 384, 640, block=128, dtype=F16),
    "blocks-of-256": blocked(129, 512, 512, block=256),
    "joined": blocked(100, 224, 272, block=(32, 16), density=0.2),
    "cut": blocked(70, 260, 576, block=(65, 96)),
    "skewed": blocked(260, 1024, 1024, density=0.1, imbalance="skewed", wide_index=True),
    "many-rows": blocked(64, 2112, 256, density=0.4),
    "nothing": blocked(100, 256, 256, density=0),
    "added": ADDED,
    "gated": gated(blocked(131, 320, 512, density=0.3)),
    "float32-biased": biased(blocked(131, 320, 512, density=0.3)),
    "gated-tokens-contiguous": gated(blocked(136, 320, 512, layout="tt", dtype=F16)),
}
LARGE: dict[str, Problem] = {
    "4096": blocked(4096, 4096, 4096, density=0.5),
    "4096-sparse": blocked(4096, 4096, 4096, density=0.1, imbalance="skewed"),
    "4096-blocks-of-128": blocked(4096, 4096, 4096, block=128, density=0.5),
    "4000-tokens-contiguous": blocked(4000, 4032, 4160, density=0.3, layout="tt"),
    "16": blocked(16, 14336, 4096, density=0.3),
    "256": blocked(256, 4096, 4096, density=0.5),
}
PAIRS = rotated(tuple(itertools.product(SMALL, SHAPES)), 5)
"""A fifth of them for each commit: their kernels differ little."""
WAYS: list[dict[str, Any]] = [
    {"pdl": pdl, "blocks": blocks, "strip": strip, "promotion": 256 if pdl else 128}
    for blocks, strip in ((0, 8), (6, 2), (132, 4))
    for pdl in (False, True)
]


def choices_of(problem: Problem, shape: Shape) -> list[CudaChoice]:
    """Every way to tell a launch that is legal; none for a shape that is not."""
    if BSR.why_not_config(problem, detect("cuda"), Config(shape=shape)):
        return []
    found: list[CudaChoice] = legal_choices(problem, shape, WAYS, detect("cuda"))
    return found


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels of this module, compiled by as many threads as there are cores."""
    if not torch.cuda.is_available():
        return
    pairs = [(SMALL[name], shape) for name, shape in PAIRS] + list(itertools.product(LARGE.values(), SHAPES))
    made = [one for problem, shape in pairs for one in choices_of(problem, shape)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), {one.compile_key: one for one in made}.values()))


@pytest.mark.parametrize(("name", "shape"), PAIRS, ids=str)
def test_small_products_are_right_in_every_way(name: str, shape: Shape) -> None:
    assert_right(SMALL[name], choices_of(SMALL[name], shape))


@pytest.mark.parametrize("name", LARGE)
def test_large_products_are_right(name: str) -> None:
    """With a block for each tile, and with as many as there are multiprocessors."""
    found = [choices_of(LARGE[name], shape) for shape in SHAPES]
    assert_right(LARGE[name], [one for ways in found for one in (*ways[-1:], *ways[:1])])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.warp_groups > 1], ids=str)
def test_a_row_that_waits_for_another_holds_no_room(shape: Shape) -> None:
    """Seven rows have the first and the last step, nine those between: they cannot all be grouped with their like."""
    problem, columns = blocked(512, 1024, 4096), 64
    mask = torch.zeros(16, columns, dtype=torch.bool, device=GPU)
    mask[:, 1 : columns - 1] = True
    mask[:14:2] = False
    mask[:14:2, [0, columns - 1]] = True
    assert problem.sparsity is not None
    g = torch.Generator(GPU).manual_seed(1)
    dense, x = (torch.randint(-4, 5, size, generator=g, device=GPU).to(BF16) for size in ((1024, 4096), (512, 4096)))
    weight, out = sparse_of(dense, mask, problem.sparsity), torch.empty(512, 1024, dtype=BF16, device=GPU)
    expected = (x.double() @ weight.to_dense().double().t()).to(BF16)
    for one in choices_of(problem, shape):
        one.build().run(out.fill_(float("nan")), (x, one.pack(weight)), ())
        assert torch.equal(out, expected), one.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repeats_give_the_same_bits_with_other_sizes_in_between(shape: Shape) -> None:
    """One cubin, two problems, launches that follow each other without a pause; what is stored is all of the result."""
    made = [choices_of(blocked(m, n, k, density=0.3), shape)[-1] for m, n, k in ((512, 1024, 1024), (328, 320, 512))]
    assert made[0].compile_key == made[1].compile_key
    runs = []
    for one in made:
        runs.append((one.build().run, operands_for(one, seed=5)))
    expected = [call(run, torch.empty_like(x.out), x) for run, x in runs]
    for _ in range(50):
        again = [call(run, torch.full_like(x.out, float("nan")), x) for run, x in runs]
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


OF_EACH = [bsr_shape(128, 256, 5, units=8), bsr_shape(256, 128, 7, 1, 2, units=14), bsr_shape(64, 64, 6, 4)]


@pytest.mark.parametrize("shape", OF_EACH, ids=str)
def test_captures_streams_and_threads(shape: Shape) -> None:
    one = choices_of(blocked(1024, 2048, 1024, density=0.3), shape)[-1]
    assert_replayable(one)
    assert_streams_apart(one)
    assert_launched_by_a_new_thread(one)


def test_an_address_that_is_not_aligned_is_refused() -> None:
    one = choice(blocked(128, 256, 256), bsr_shape(128, 64, 4), detect("cuda"))
    x = operands_for(one, seed=7)
    moved = torch.empty(x.a.numel() + 1, dtype=x.a.dtype, device=GPU)[1:].view(x.a.shape)
    with pytest.raises(ErrorFromChoice, match="an operand is not aligned as planned"):
        call(one.build().run, x.out, dataclasses.replace(x, a=moved))


@pytest.mark.parametrize("problem", [LARGE["4096"], LARGE["16"], LARGE["256"]], ids=str)
def test_what_a_search_tries_is_right(problem: Problem) -> None:
    found = offers(BSR, problem, detect("cuda"), Settings(search="exhaustive")).choices
    assert found
    assert_right(problem, found)


def test_calls_by_the_kernels_alone(own_store: object) -> None:
    """Tuned for a call, then told a weight that was changed in place, and a linear layer."""
    forget_plans()
    bsr = create_blocked_tensor(512, 768, block=64, density=0.3, dtype=BF16, device="cuda")
    packed, x = gemmtune.prepack(bsr), torch.randn(768, 200, device="cuda").bfloat16()
    with settings.patch(
        search="exhaustive",
        max_profiling_configs=2,
        backends=("cuda",),
        choice_allowlist_regex="^cuda:bsr_",
        tune_in_subprocess=False,
    ):
        [found] = gemmtune.tune(gemmtune.bsr_mm, packed, x, progress=False)
        assert found.pick is not None
        assert found.pick.startswith("cuda:bsr_")
        for _ in range(2):
            want = bsr.to_dense().double() @ x.double()
            got = gemmtune.bsr_mm(packed, x).double()
            assert ((got - want).abs() <= 1e-2 * want.abs().max()).all()
            bsr.values().mul_(-2)
