"""The cuda kernels of grouped products on a GPU: every shape, captures with offsets that change, streams, offsets that are none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_cases import BF16, F16, FAMILY, SM90, biased, choice, config, gated, grouped_shape
from launches import GPU, assert_launched_by_a_new_thread, assert_replayable, assert_right, assert_streams_apart

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.grouped.configs import SHAPES, Shape
from gemmtune.device import DeviceInfo, detect
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernels run on SM90 alone"
    ),
]


def rows(m: int, n: int, k: int, groups: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def terms(m: int, n: int, k: int, groups: int, dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_k_mm(m, n, k, groups=groups, dtype=dtype, device_type="cuda")


PROBLEMS: dict[str, Problem] = {
    "few-rows": rows(16, 768, 2048, 128),
    "many-groups": rows(1000, 264, 200, 300, "nn"),
    "rows": rows(1000, 520, 328, 5),
    "more-rows": rows(5000, 1544, 1032, 7, "nn", F16),
    "columns-unaligned": rows(700, 333, 256, 3),
    "one-group": rows(3000, 1024, 512, 1),
    "short": rows(600, 512, 8, 4),
    "gated": gated(rows(700, 520, 256, 4)),
    "float32-result": biased(rows(700, 523, 256, 4)),
    "terms": terms(520, 776, 3000, 9),
    "terms-few": terms(264, 200, 77, 20, F16),
}
"""Sizes with tails, groups by the dozen, both layouts of b, an epilogue, a result in float32, groups of terms."""
WAYS: list[dict[str, Any]] = [
    {"swap_ab": swap_ab, **told} for swap_ab in (False, True) for told in ({"strip": 16}, {"strip": 1, "blocks": 6, "pdl": True})
]


def choices_of(problem: Problem, shape: Shape, device: DeviceInfo) -> list[CudaChoice]:
    """Every way to tell a launch that is legal."""
    family = FAMILY["grouped"]
    assert family.why_not(problem, device) is None
    told = (config(shape, **way) for way in WAYS)
    return [CudaChoice.of(family, one, problem, device) for one in told if family.why_not_config(problem, device, one) is None]


CASES = {f"{name}-{shape}": (one, shape) for name, one in PROBLEMS.items() for shape in SHAPES if choices_of(one, shape, SM90)}


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """All kernels of this module, compiled by as many threads as there are cores."""
    called = (getattr(item, "callspec", None) for item in request.session.items)
    cases = {one.params["case"] for one in called if one is not None and "case" in one.params}
    sources = {one.compile_key: one for case in cases & CASES.keys() for one in choices_of(*CASES[case], SM90)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), sources.values()))


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_tell_a_launch_is_right(case: str) -> None:
    problem, shape = CASES[case]
    assert_right(problem, choices_of(problem, shape, detect("cuda")))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_offsets_that_are_no_offsets_touch_nothing_else(shape: Shape) -> None:
    for one in choices_of(PROBLEMS["rows"], shape, detect("cuda")):
        problem, run = one.problem, one.build().run
        a = torch.ones(problem.m, problem.k, dtype=BF16, device=GPU)
        b = torch.ones(problem.groups, problem.n, problem.k, dtype=BF16, device=GPU).mT
        for ends in ([9, 3, 4000, 12, 7], [-7, 5, 2, 99, 10**9], [2**31 - 1, -(2**31), 40, 41, 1000]):
            memory = torch.full((problem.m + 512, problem.n), -1.0, dtype=BF16, device=GPU)
            run(memory[256:-256], (a, b, torch.tensor(ends, dtype=torch.int32, device=GPU)), ())
            assert (memory[:256] == -1).all()
            assert (memory[-256:] == -1).all()
            assert {*memory.unique().tolist()} <= {-1.0, float(problem.k)}


SAMPLE = {
    "few-rows": ("few-rows", grouped_shape(16, 11)),
    "rows-in-clusters": ("more-rows", grouped_shape(256, 4, cluster_m=2)),
    "fitted": ("more-rows", grouped_shape(256, 4, cluster_n=2, fitted=True)),
    "terms": ("terms", grouped_shape(256, 4)),
}


def sample(name: str) -> CudaChoice:
    problem, shape = SAMPLE[name]
    return choice(PROBLEMS[problem], shape, detect("cuda"), swap_ab=name == "few-rows" or shape.fitted, pdl=True)


@pytest.mark.parametrize("name", SAMPLE)
def test_launches_stand_captures_streams_and_new_threads(name: str) -> None:
    assert_replayable(sample(name))
    assert_streams_apart(sample(name))
    assert_launched_by_a_new_thread(sample(name))


@pytest.mark.parametrize("fitted", [False, True])
def test_a_captured_launch_sees_offsets_that_changed(fitted: bool) -> None:
    shape = grouped_shape(128, 6, cluster_n=2, fitted=fitted)
    one = choice(rows(512, 256, 320, 4), shape, detect("cuda"), pdl=True, swap_ab=fitted)
    a = torch.randn(512, 320, dtype=BF16, device=GPU)
    b = torch.randn(4, 256, 320, dtype=BF16, device=GPU).mT
    offs, out = torch.tensor([128, 256, 384, 512], dtype=torch.int32, device=GPU), torch.empty(512, 256, dtype=BF16, device=GPU)
    run = one.build().run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out, (a, b, offs), ())
    for ends in ([0, 0, 512, 512], [1, 2, 3, 512], [511, 511, 512, 512]):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        want = torch.cat([a[begin:end].double() @ b[g].double() for g, (begin, end) in enumerate(spans(ends, 512))])
        assert (out.double() - want).abs().max() <= 1e-2 * want.abs().max()


@pytest.mark.parametrize("case", ["up", "down"])
def test_many_rows_of_a_model_are_right_launch_after_launch(case: str) -> None:
    """Rings that go round for hundreds of steps, beside the launch before."""
    n, k = (14336, 4096) if case == "up" else (4096, 14336)
    problem = rows(8192, n, k, 8)
    a = torch.randn(problem.m, k, device=GPU).to(BF16)
    b = torch.randn(8, n, k, device=GPU, dtype=BF16).mT
    offs = torch.tensor([1, 1000, 1000, 3072, 3333, 8000, 8191, 8192], dtype=torch.int32, device=GPU)
    want = torch.cat([a[i:j] @ b[g] for g, (i, j) in enumerate(spans(offs.tolist(), problem.m))])
    for one in (one for shape in SHAPES for one in choices_of(problem, shape, detect("cuda"))):
        run, outs = one.build().run, [torch.empty_like(want) for _ in range(5)]
        for out in outs:
            run(out, (a, b, offs), ())
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert (outs[0].double() - want.double()).abs().max() <= 2e-2 * want.double().abs().max(), one.name
