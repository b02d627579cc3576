"""CUTLASS 3.x operations on a GPU: verification of tiles, schedules, layouts and epilogues, captures, several streams."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from extras import needs
from rotation import rotated

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.tiles import Tile
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = needs("cutlass")
BF16, F16 = torch.bfloat16, torch.float16
MOST_VARIANTS = 12


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def addmm(m: int, n: int, k: int, layout: str = "nt", dtype: torch.dtype = F16, bias: str = "n") -> Problem:
    return Problem.addmm(m, n, k, dtype=dtype, layout=layout, bias=bias, alpha=2, beta=0.5, device_type="cuda")


def gated(m: int, n: int, k: int) -> Problem:
    """Return silu(a @ b) · x, with a matrix x in the operands' type."""
    epilogue = trace(lambda acc, x: torch.nn.functional.silu(acc) * x, torch.float32, [torch.empty(m, n, dtype=BF16)])
    return dataclasses.replace(mm(m, n, k), epilogue=epilogue)


def batched(batch: int, m: int, n: int, k: int) -> Problem:
    return Problem.bmm(batch, m, n, k, dtype=BF16, layout="nt", device_type="cuda")


CASES: dict[str, tuple[Problem, str]] = {
    "8-columns": (mm(13, 520, 1160), "64x8x4 1x1 pingpong"),
    "few-columns-of-b": (mm(520, 8, 1160), "64x128x2 1x1 pingpong"),
    "8-columns-fused": (addmm(7, 520, 1160), "64x8x4 1x1 pingpong"),
    "16-columns-stream-k": (mm(16, 1032, 4104), "128x16x2 1x1 stream_k"),
    "16-columns-clusters": (mm(16, 1032, 4104, "nn"), "64x16x2 2x1 pingpong"),
    "32-columns": (mm(40, 1032, 1160, "nn", F16), "64x32x2 1x1 pingpong"),
    "64-columns": (addmm(72, 1032, 1160, "nn", F16, "mn"), "64x64x2 1x1 pingpong"),
    "192-columns": (mm(392, 1032, 1160), "64x192x1 1x2 pingpong"),
    "192-rows": (mm(264, 1032, 1160, "tn", F16), "192x128x1 2x1 pingpong"),
    "192-rows-fused": (gated(264, 1032, 1160), "192x128x1 2x1 pingpong"),
    "128x192": (mm(520, 1032, 1160, "tt"), "128x192x1 1x2 pingpong"),
    "128x192-cooperative": (addmm(520, 1032, 1160, "tn", BF16), "128x192x1 2x1 cooperative"),
    "256x192": (mm(776, 1032, 1160, "nn"), "256x192x1 1x2 cooperative"),
    "256x192-fused": (gated(776, 1032, 1160), "256x192x1 1x2 cooperative"),
    "128x256-batched": (batched(3, 520, 1032, 264), "128x256x1 2x1 cooperative"),
    "128x256-stream-k": (mm(520, 1544, 4104), "128x256x1 2x1 stream_k"),
    "128x64-stream-k-fused": (addmm(392, 776, 4104, "nt", BF16), "128x64x1 1x1 stream_k"),
    "128x128-stream-k": (mm(520, 1032, 4104, "tn"), "128x128x1 1x2 stream_k"),
    "128x128-batched-stream-k": (batched(3, 264, 520, 2056), "128x128x1 1x2 stream_k"),
    "96-columns": (mm(392, 1032, 1160, "nn"), "128x96x1 2x1 pingpong"),
}

SAMPLED = ("128x64-stream-k-fused", "8-columns")
"""Operations that -m gpu compiles in rotation: a tile with stream-K and an epilogue, and one that swaps the operands."""


def wanted(text: str) -> Tile:
    sizes, cluster, kind = text.split()
    rows, cols, lines = map(int, sizes.split("x"))
    first, second = map(int, cluster.split("x"))
    return Tile(kind=kind, rows=rows, cols=cols, lines=lines, cluster=(first, second))  # type: ignore[arg-type]


def choice_of(name: str) -> CutlassChoice:
    problem, text = CASES[name]
    offers = BACKEND.enumerate(problem, detect("cuda"), Settings(search="exhaustive"))
    found = [choice for choice in offers.choices if isinstance(choice, CutlassChoice)]
    return next(choice for choice in found if Tile.of(choice.config.operation) == wanted(text))


def every_variant(choice: CutlassChoice) -> Sequence[CutlassChoice]:
    """Return a sample of the variants reachable from the choice, at most about MOST_VARIANTS."""
    found = {choice.name: choice}
    for near in choice.launch_variants():
        found[near.name] = near
        found |= {far.name: far for far in near.launch_variants()}
    step = max(1, len(found) // MOST_VARIANTS)
    return list(found.values())[::step]


needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="operations of SM90 run on SM90 alone"
)


@pytest.mark.gpu
@pytest.mark.slow
@needs_sm90
@pytest.mark.parametrize("name", rotated(SAMPLED, 2))
def test_kernel_passes_verification(name: str) -> None:
    choice = choice_of(name)
    verdict = Verifier(choice.problem, torch.device("cuda")).check(choice, choice.build())
    assert verdict.status is Status.OK, f"{choice.name}: {verdict.reason}"


@pytest.mark.cutlass_build
@needs_sm90
@pytest.mark.parametrize("name", CASES)
def test_every_variant_passes_verification(name: str) -> None:
    choice = choice_of(name)
    verifier = Verifier(choice.problem, torch.device("cuda"))
    for variant in every_variant(choice):
        verdict = verifier.check(variant, variant.build())
        assert verdict.status is Status.OK, f"{variant.name}: {verdict.reason}"


@pytest.mark.gpu
@pytest.mark.slow
@needs_sm90
@pytest.mark.parametrize("name", rotated(SAMPLED, 2))
def test_first_call_can_be_captured_and_replayed(name: str) -> None:
    choice = choice_of(name)
    run = choice.build().run
    x = random_operands(choice.problem, torch.device("cuda"), seed=3)
    eager, outs = torch.empty_like(x.out), [torch.empty_like(x.out) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            run(out, x.tensors, x.scalars)
    run(eager, x.tensors, x.scalars)
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.gpu
@pytest.mark.slow
@needs_sm90
def test_two_streams_do_not_share_a_workspace() -> None:
    choice = choice_of("128x64-stream-k-fused")
    run = choice.build().run
    x = random_operands(choice.problem, torch.device("cuda"), seed=4)
    expected = torch.empty_like(x.out)
    run(expected, x.tensors, x.scalars)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [torch.full_like(x.out, float("nan")) for _ in range(40)]
    torch.cuda.synchronize()  # the streams do not wait for the stream that filled these
    for out, stream in zip(outs, itertools.cycle(streams), strict=False):
        with torch.cuda.stream(stream):
            run(out, x.tensors, x.scalars)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
