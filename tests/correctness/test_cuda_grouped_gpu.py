"""Cuda kernels of grouped products on a GPU: every shape, captures with changing offsets, streams, invalid offsets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_cases import (
    BF16,
    F16,
    INT4,
    SM90,
    UINT4,
    biased,
    choice,
    config,
    family_of,
    gated,
    grouped_shape,
    mixed_groups,
    wgmma_shape,
)
from launches import (
    GPU,
    assert_follows_offsets,
    assert_launched_by_a_new_thread,
    assert_replayable,
    assert_right,
    assert_streams_apart,
    assert_touches_nothing_else,
)

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.grouped.configs import SHAPES, Shape
from gemmtune.backends.cuda.mixed.weights import weights_of
from gemmtune.backends.cuda.wgmma import configs as wgmma
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
    "int4": mixed_groups(1000, 520, 1056, 5, **INT4, scales="group_32"),
    "int4-model": mixed_groups(2048, 4096, 14336, 8, **INT4, scales="group_128"),
    "uint4-many-groups": mixed_groups(3000, 267, 416, 70, **UINT4, dtype=F16),
    "int8": mixed_groups(700, 333, 4112, 3, dtype=F16),
    "int8-gated": gated(mixed_groups(700, 520, 448, 4, scales="group_64")),
    "int8-float32-result": biased(mixed_groups(700, 523, 256, 4)),
}
"""Cases with remainders, dozens of groups, both layouts of b, an epilogue, a float32 result, groups of terms, narrow weights."""
WAYS: list[dict[str, Any]] = [
    {"swap_ab": swap_ab, **told} for swap_ab in (False, True) for told in ({"strip": 16}, {"strip": 1, "blocks": 6, "pdl": True})
]


NARROW_WAYS: list[dict[str, Any]] = [{}, {"cluster_k": 2, "pdl": True}, {"cluster_k": 3, "interleaved_k": True}]


def shapes_of(problem: Problem) -> Sequence[Any]:
    """Return the family's shapes for the problem."""
    return wgmma.SHAPES_FOR_GROUPS[weights_of(problem).bits] if problem.widens_b else SHAPES


def choices_of(problem: Problem, shape: Any, device: DeviceInfo) -> list[CudaChoice]:
    """Return every legal launch variant."""
    family = family_of(shape)
    assert family.why_not(problem, device) is None
    told = (config(shape, **way) for way in (NARROW_WAYS if problem.widens_b else WAYS))
    return [CudaChoice.of(family, one, problem, device) for one in told if family.why_not_config(problem, device, one) is None]


CASES = {
    f"{name}-{shape}": (one, shape) for name, one in PROBLEMS.items() for shape in shapes_of(one) if choices_of(one, shape, SM90)
}


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Compile all kernels of this module, with one thread per core."""
    called = (getattr(item, "callspec", None) for item in request.session.items)
    cases = {one.params["case"] for one in called if one is not None and "case" in one.params}
    sources = {one.compile_key: one for case in cases & CASES.keys() for one in choices_of(*CASES[case], SM90)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), sources.values()))


@pytest.mark.parametrize("case", CASES)
def test_all_launch_variants_pass_verification(case: str) -> None:
    problem, shape = CASES[case]
    assert_right(problem, choices_of(problem, shape, detect("cuda")))


@pytest.mark.parametrize("shape", [*SHAPES, *wgmma.SHAPES_FOR_GROUPS[8]], ids=str)
def test_invalid_offsets_write_only_the_result(shape: Any) -> None:
    problem = PROBLEMS["rows"] if isinstance(shape, Shape) else mixed_groups(1000, 523, 336, 5)
    for one in choices_of(problem, shape, detect("cuda")):
        assert_touches_nothing_else(one.build().run, one.problem)


SAMPLE = {
    "few-rows": ("few-rows", grouped_shape(16, 11)),
    "rows-in-clusters": ("more-rows", grouped_shape(256, 4, cluster_m=2)),
    "fitted": ("more-rows", grouped_shape(256, 4, cluster_n=2, fitted=32)),
    "terms": ("terms", grouped_shape(256, 4)),
    "narrow": ("int4", wgmma_shape(128, 2, 1, 64, 4)),
}


def sample(name: str) -> CudaChoice:
    problem, shape = SAMPLE[name]
    told = {"swap_ab": True} if name in ("few-rows", "fitted") else {}
    return choice(PROBLEMS[problem], shape, detect("cuda"), pdl=True, **told)


@pytest.mark.parametrize("name", SAMPLE)
def test_runs_in_captures_streams_and_threads(name: str) -> None:
    assert_replayable(sample(name))
    assert_streams_apart(sample(name))
    assert_launched_by_a_new_thread(sample(name))
    if name != "terms":
        assert_follows_offsets(sample(name))


@pytest.mark.parametrize("case", ["up", "down"])
def test_many_rows_pass_verification_in_repeated_launches(case: str) -> None:
    """Check rings that wrap around for hundreds of steps, next to the previous launch."""
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
