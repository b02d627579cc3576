"""CUTLASS's kernels for groups of rows on a GPU: every tile, captures with offsets that change, streams, offsets that are none."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="operations of SM90 run on SM90 alone"
)
BF16, F16 = torch.bfloat16, torch.float16


def rows(m: int, n: int, k: int, groups: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def fused(problem: Problem) -> Problem:
    """silu(a @ b) + a number for each column, stored in float32."""
    x = torch.empty(problem.n, dtype=problem.dtype)
    epilogue = trace(lambda acc, x: torch.nn.functional.silu(acc) + x, torch.float32, [x])
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=torch.float32))


CASES: dict[str, tuple[Problem, str]] = {
    "few-rows": (rows(16, 768, 2048, 128), "_64x16x128_1x1x1_"),
    "few-rows-row-major": (rows(200, 520, 328, 9, "nn", F16), "_64x32x128_1x1x1_"),
    "columns": (rows(700, 520, 328, 5), "_128x64x64_1x1x1_"),
    "columns-fused": (fused(rows(700, 520, 328, 5, "nn")), "_128x64x64_1x1x1_"),
    "many-groups": (rows(1000, 264, 200, 300, "nn"), "_64x128x64_1x1x1_"),
    "rows-in-clusters": (rows(1000, 520, 328, 5), "_64x128x64_2x1x1_"),
    "fused": (fused(rows(700, 520, 256, 4)), "_64x128x64_2x1x1_"),
    "pingpong": (rows(3000, 1024, 512, 1, "nt", F16), "_128x128x64_1x1x1_"),
    "pingpong-in-clusters": (rows(5000, 1544, 1032, 7, "nn"), "_128x128x64_2x1x1_"),
    "short": (rows(600, 512, 8, 4), "_128x256x64_1x1x1_"),
    "cooperative": (rows(5000, 1544, 1032, 7), "_128x256x64_2x1x1_"),
    "cooperative-256": (rows(5000, 1544, 1032, 40, "nn", F16), "_256x128x64_2x1x1_"),
}
"""By name: a problem, and what to find in the name of an operation. Sizes with tails, groups by the dozen, both layouts of b."""

SAMPLED = ("few-rows", "cooperative", "rows-in-clusters")
"""What -m gpu compiles in turn: rows as columns, two warp groups for a tile, clusters of tiles of one each."""
NAME = rotated(SAMPLED, 3, "cutlass-grouped")[0]


def choice_of(name: str, device: DeviceInfo) -> CutlassChoice:
    problem, regex = CASES[name]
    told = Settings(search="exhaustive", cutlass_op_allowlist_regex=regex)
    [choice] = BACKEND.enumerate(problem, device, told).choices
    assert isinstance(choice, CutlassChoice)
    return choice


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """All kernels of this module, compiled by as many threads as there are cores."""
    called = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    names = {one.params["name"] for one in called if one is not None and "name" in one.params}
    choices = {(one := choice_of(name, preset("sm90"))).compile_key: one for name in names}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), choices.values()))


@pytest.mark.cutlass_build
@pytest.mark.parametrize("name", CASES)
def test_every_variant_is_right(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    assert_right(choice.problem, (choice, *choice.launch_variants()))


def patterns(m: int, groups: int) -> dict[str, list[int]]:
    """The ends of groups."""
    uneven = sorted((7919 * (g + 1)) % (m + 1) for g in range(groups - 1))
    return {
        "even": [m * (g + 1) // groups for g in range(groups)],
        "uneven": [*uneven, m],
        "empty": [m * ((g + 1) // 2) // (groups // 2) for g in range(groups)],
        "all-in-one": [0] * (groups // 2) + [m] * (groups - groups // 2),
        "end-early": [m // 3 * (g + 1) // groups for g in range(groups)],
        "no-rows": [0] * groups,
    }


def assert_by_loop(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: list[int], name: str) -> None:
    """Each group against its own float32 product, and rows behind the last group are as they were."""
    for g, (begin, end) in enumerate(spans(ends, a.shape[0])):
        want = a[begin:end].float() @ b[g].float()
        torch.testing.assert_close(out[begin:end].float(), want, rtol=1e-2, atol=5e-3 * a.shape[1] ** 0.5, msg=f"{name}, group {g}")
    assert out[ends[-1] :].isnan().all(), f"{name}: rows of no group were written"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME])
def test_launch_after_launch_and_replay_after_replay_follow_the_offsets(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    problem, run = choice.problem, choice.build().run
    a = torch.randn(problem.m, problem.k, device=GPU).to(problem.dtype)
    b = torch.randn(problem.groups, problem.n, problem.k, device=GPU).to(problem.dtype).mT
    offs = torch.zeros(problem.groups, dtype=torch.int32, device=GPU)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out, (a, b, offs), ())
    found = patterns(problem.m, problem.groups)
    for pattern in (*found, *reversed(found)):
        ends = found[pattern]
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        for launch in (lambda: run(out, (a, b, offs), ()), graph.replay):
            out.fill_(torch.nan)
            launch()
            assert_by_loop(out, a, b, ends, pattern)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME])
def test_launches_stand_captures_streams_and_new_threads(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    assert_right(choice.problem, [choice])
    assert_replayable(choice)
    assert_streams_apart(choice)
    assert_launched_by_a_new_thread(choice)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME])
def test_offsets_that_are_no_offsets_touch_nothing_else(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    problem, run = choice.problem, choice.build().run
    a = torch.ones(problem.m, problem.k, dtype=BF16, device=GPU)
    b = torch.ones(problem.groups, problem.n, problem.k, dtype=BF16, device=GPU).mT
    last = [problem.m] * (problem.groups - 5)
    for ends in ([9, 3, 4000, 12, 7], [-7, 5, 2, 99, 10**9], [2**31 - 1, -(2**31), 40, 41, 1000]):
        memory = torch.full((problem.m + 512, problem.n), -1.0, dtype=BF16, device=GPU)
        run(memory[256:-256], (a, b, torch.tensor(ends + last, dtype=torch.int32, device=GPU)), ())
        assert (memory[:256] == -1).all()
        assert (memory[-256:] == -1).all()
        assert {*memory.unique().tolist()} <= {-1.0, float(BF16_K[problem.k])}


BF16_K = {k: torch.tensor(float(k), dtype=BF16).item() for k in {problem.k for problem, _ in CASES.values()}}
"""Sums of so many ones as bfloat16 has them."""


@pytest.mark.cutlass_build
def test_a_named_backend_is_tuned_and_captured(own_store: object) -> None:
    a = torch.randn(64, 256, dtype=BF16, device=GPU)
    b = torch.randn(4, 128, 256, dtype=BF16, device=GPU).mT
    offs = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device=GPU)
    out = torch.empty(64, 128, dtype=BF16, device=GPU)
    with settings.patch(backends=("cutlass",), search="quick", cutlass_max_profiling_configs=1, tune_in_subprocess=False):
        gemmtune.grouped_mm(a, b, offs, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemmtune.grouped_mm(a, b, offs, out=out)
        for ends in ([0, 0, 64, 64], [1, 2, 3, 64], [64, 64, 64, 64]):
            offs.copy_(torch.tensor(ends, dtype=torch.int32))
            out.fill_(torch.nan)
            graph.replay()
            assert_by_loop(out, a, b, ends, str(ends))
