"""The cluster kernel on a GPU: every shape, major and epilogue is verified; sizes with tails; captures, streams, repeats."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart, call

from gemmtune.backends.cuda import BACKEND
from gemmtune.backends.cuda.cluster.build import ClusterChoice
from gemmtune.backends.cuda.cluster.configs import Config
from gemmtune.backends.cuda.compiler import compile_source
from gemmtune.backends.cuda.library import Library
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings
from gemmtune.toolchain.shared_object import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel runs on SM90 alone"
    ),
]

BF16, F16 = torch.bfloat16, torch.float16


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def addmm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = F16, bias: str = "n") -> Problem:
    return Problem.addmm(m, n, k, dtype=dtype, layout=layout, bias=bias, alpha=2, beta=0.5, device_type="cuda")


def gated(m: int, n: int, k: int) -> Problem:
    """silu(a @ b) · x, x a matrix in the operands' type."""
    epilogue = trace(lambda acc, x: torch.nn.functional.silu(acc) * x, torch.float32, [torch.empty(m, n, dtype=BF16)])
    return dataclasses.replace(mm(m, n, k), epilogue=epilogue)


def batched(batch: int, m: int, n: int, k: int, layout: str = "nt") -> Problem:
    return Problem.bmm(batch, m, n, k, dtype=BF16, layout=layout, device_type="cuda")


CASES: dict[str, tuple[Problem, str]] = {
    "one-tile": (mm(64, 56, 16384), "64x64x64_s12_k2"),
    "two-tiles": (mm(64, 100, 65536), "64x64x64_s12_k2"),
    "three-tiles": (mm(64, 136, 16392), "64x64x64_s12_k2"),
    "shared": (mm(128, 128, 65536), "64x64x128_s6_k2_2x2"),
    "shared-tails": (mm(100, 72, 16392, dtype=F16), "64x64x128_s6_k2_2x2"),
    "shared-two-blocks": (mm(128, 128, 16384), "64x64x64_s6_k2_2x2"),
    "shared-beyond-the-edge": (mm(136, 264, 8200), "64x64x64_s6_k2_2x2"),
    "shared-short": (mm(136, 100, 520), "128x64x64_s8_k1_2x2"),
    "shared-two-steps": (mm(100, 100, 256), "64x64x128_s6_k2_2x2"),
    "shared-and-divided": (mm(128, 128, 65536), "64x64x64_s6_k2_2x2"),
    "shared-and-divided-tails": (addmm(136, 200, 8200), "64x64x64_s6_k2_2x2"),
    "beside": (mm(256, 256, 16384), "128x64x64_s8_k2_1x2"),
    "beside-tails": (addmm(200, 136, 8200, "nt", BF16, "mn"), "128x64x64_s8_k2_1x2"),
    "shared-both-not-by-k": (mm(104, 136, 8200, "tn"), "64x64x128_s6_k2_2x2"),
    "shared-a-not-by-k": (mm(104, 100, 8200, "tt", F16), "64x64x128_s6_k2_2x2"),
    "shared-b-not-by-k": (mm(100, 136, 8200, "nn"), "64x64x64_s6_k2_2x2"),
    "beside-both-not-by-k": (mm(200, 136, 8200, "tn"), "128x64x64_s8_k2_1x2"),
    "beside-b-not-by-k": (mm(200, 136, 8200, "nn", F16), "128x64x64_s8_k2_1x2"),
    "four-tiles": (mm(256, 256, 16384), "128x64x64_s8_k1_2x2"),
    "four-tiles-tails": (addmm(200, 264, 8200, "nt", BF16, "mn"), "128x64x64_s8_k1_2x2"),
    "four-tiles-both-not-by-k": (mm(200, 136, 8200, "tn", F16), "128x64x64_s8_k1_2x2"),
    "four-tiles-a-not-by-k": (mm(136, 72, 8200, "tt"), "128x64x64_s8_k1_2x2"),
    "four-tiles-batched": (batched(2, 136, 200, 4104, "nn"), "128x64x64_s8_k1_2x2"),
    "shared-batched": (batched(3, 100, 72, 4104), "64x64x64_s6_k2_2x2"),
    "shared-batched-not-by-k": (batched(2, 104, 136, 2056, "tn"), "64x64x64_s6_k2_2x2"),
    "shared-fused": (gated(100, 136, 16392), "64x64x128_s6_k2_2x2"),
    "shared-matrix-added": (addmm(128, 128, 16392, "tn", BF16, "mn"), "64x64x64_s6_k2_2x2"),
    "small": (mm(64, 64, 65536), "64x64x64_s6_k8"),
    "small-of-4": (mm(13, 100, 16392, dtype=F16), "64x64x64_s6_k4"),
    "few-rows": (mm(64, 4096, 4104), "64x64x64_s12_k2"),
    "96-columns": (mm(96, 96, 32768), "64x96x64_s10_k4_2x1"),
    "96-columns-tails": (addmm(100, 100, 16392), "64x96x64_s10_k4_2x1"),
    "16-columns": (mm(1, 136, 16392), "64x16x128_s5_k2"),
    "16-columns-long": (mm(13, 4096, 8200), "64x16x128_s5_k2"),
    "32-columns": (mm(13, 264, 16392), "64x32x128_s4_k2"),
    "32-columns-tails": (addmm(24, 264, 8200, "nt", BF16, "mn"), "64x32x128_s4_k2"),
    "weights-of-16": (mm(16, 4096, 4096), "128x16x64_s6_k2"),
    "weights-of-16-tails": (addmm(13, 1000, 2056, "nt", BF16, "mn"), "128x16x64_s6_k2"),
    "weights-of-32": (mm(32, 2048, 4104, dtype=F16), "128x32x64_s5_k2"),
    "weights-of-32-batched": (batched(2, 24, 264, 2056), "128x32x64_s5_k2"),
    "weights-not-by-k": (mm(32, 1032, 4104, "nn"), "128x32x64_s5_k2"),
    "weights-fused": (gated(16, 264, 4104), "128x16x64_s6_k2"),
    "short": (mm(100, 100, 520), "64x64x64_s6_k8"),
    "both-not-by-k": (mm(104, 136, 8200, "tn"), "64x64x64_s12_k2"),
    "b-not-by-k": (mm(100, 136, 8200, "nn"), "64x64x64_s12_k2"),
    "a-not-by-k": (mm(104, 100, 8200, "tt", F16), "64x64x64_s6_k4"),
    "few-rows-not-by-k": (mm(8, 264, 8200, "nn"), "64x16x128_s5_k2"),
    "fused": (gated(100, 136, 16392), "64x64x64_s12_k2"),
    "fused-few-rows": (gated(16, 264, 8200), "64x32x128_s4_k2"),
    "matrix-added": (addmm(128, 128, 16392, "tn", BF16, "mn"), "64x64x64_s6_k8"),
    "batched": (batched(3, 40, 72, 4104), "64x64x64_s6_k4"),
    "batched-not-by-k": (batched(3, 40, 72, 2056, "tn"), "64x64x64_s12_k2"),
}


def choices_of(name: str) -> list[ClusterChoice]:
    """Both ways round, as far as they are legal."""
    problem, shape = CASES[name]
    offers = BACKEND.enumerate(problem, detect("cuda"), Settings(search="exhaustive"))
    found = [choice for choice in offers.choices if isinstance(choice, ClusterChoice) and str(choice.config.shape) == shape]
    assert found, offers.refusals
    return found


def with_variants(choice: ClusterChoice) -> list[ClusterChoice]:
    """Those that differ from it in one respect, and in two."""
    found = {choice.name: choice}
    for near in choice.launch_variants():
        found |= {near.name: near} | {far.name: far for far in near.launch_variants()}
    return list(found.values())


@pytest.mark.parametrize("name", CASES)
def test_every_variant_is_right(name: str) -> None:
    first, *others = choices_of(name)
    assert_right(CASES[name][0], [*with_variants(first), *others])


@pytest.mark.parametrize(
    "name", ["one-tile", "small", "fused", "batched", "shared", "shared-and-divided", "shared-batched", "four-tiles"]
)
def test_a_capture_may_have_the_first_call_and_can_be_replayed(name: str) -> None:
    assert_replayable(choices_of(name)[0])


@pytest.mark.parametrize("name", ["one-tile", "small", "shared", "shared-two-blocks", "beside", "four-tiles"])
def test_calls_of_two_streams_do_not_share_a_workspace(name: str) -> None:
    """Nor wait for each other's blocks, of which all do not fit the GPU at a time."""
    assert_streams_apart(choices_of(name)[0])


def test_the_first_use_of_cuda_in_a_thread_may_be_a_launch() -> None:
    assert_launched_by_a_new_thread(choices_of("one-tile")[0])


@pytest.mark.parametrize("name", ["two-tiles", "small-of-4", "batched", "shared", "shared-and-divided-tails", "four-tiles-tails"])
def test_repeats_give_the_same_bits_with_other_sizes_in_between(name: str) -> None:
    """One shared object, two problems, launches that follow each other without a pause."""
    choice = choices_of(name)[0]
    problem = choice.problem
    shorter = dataclasses.replace(
        choice, problem=_with_k(problem, problem.k // 2), config=dataclasses.replace(choice.config, groups=3)
    )
    assert shorter.compile_key == choice.compile_key
    runs = [(one.build().run, random_operands(one.problem, GPU, seed=5)) for one in (choice, shorter)]
    expected = [call(run, torch.empty_like(x.out), x) for run, x in runs]
    for _ in range(20):
        again = [call(run, torch.full_like(x.out, float("nan")), x) for run, x in runs]
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


def _with_k(problem: Problem, k: int) -> Problem:
    if problem.batched:
        return batched(problem.batch, problem.m, problem.n, k // 8 * 8)
    if problem.inp is not None:
        return addmm(problem.m, problem.n, k // 8 * 8, dtype=problem.dtype)
    return mm(problem.m, problem.n, k // 8 * 8, dtype=problem.dtype)


@pytest.mark.parametrize(
    "name", ["one-tile", "two-tiles", "small-of-4", "shared", "shared-two-blocks", "shared-and-divided", "beside", "four-tiles"]
)
def test_what_a_warp_leaves_is_finished_by_the_last(name: str) -> None:
    """Warps that look for other clusters' sums but once, so that most of them leave, give the same bits as those that wait."""
    choice = choices_of(name)[0]
    hasty = dataclasses.replace(choice.source, patience=0)
    run = choice.bind(load(Library, compile_source(hasty, choice.name)))
    x = random_operands(choice.problem, GPU, seed=6)
    expected = call(choice.build().run, torch.empty_like(x.out), x)
    for _ in range(50):
        assert torch.equal(call(run, torch.full_like(x.out, float("nan")), x), expected)


@pytest.mark.parametrize("ahead", [0, 6])
@pytest.mark.parametrize("name", ["shared", "shared-two-blocks", "shared-and-divided", "beside", "four-tiles", "small"])
def test_launches_that_begin_early_read_what_the_one_before_writes(name: str, ahead: int) -> None:
    """Two operands in turn: a launch writes over the beginning of the other, which the next one may have asked into L2 already."""
    first = choices_of(name)[0]
    x = random_operands(first.problem, GPU, seed=8)
    # So that the results neither grow nor vanish.
    b = x.b / 1024

    def chain(config: Config, *, waits: bool) -> list[torch.Tensor]:
        run = ClusterChoice.of(config, first.problem, first.device).build().run
        operands = [x.a.clone(), x.a.clone()]
        for i in range(12):
            out = operands[(i + 1) % 2].view(-1)[: x.out.numel()].view(x.out.shape)
            run(out, (operands[i % 2], b), ())
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return operands

    alone = chain(dataclasses.replace(first.config, pdl=False, ahead=0), waits=True)
    assert not torch.equal(alone[0], x.a)
    for _ in range(5):
        early = chain(dataclasses.replace(first.config, pdl=True, ahead=ahead), waits=False)
        assert all(torch.equal(one, other) for one, other in zip(early, alone, strict=True))


def test_an_address_that_is_not_aligned_is_refused() -> None:
    choice = choices_of("small")[0]
    x = random_operands(choice.problem, GPU, seed=7)
    moved = torch.empty(x.a.numel() + 1, dtype=x.a.dtype, device=GPU)[1:].view(x.a.shape)
    with pytest.raises(Exception, match="an operand is not aligned as planned"):
        choice.build().run(x.out, (moved, x.b), ())
