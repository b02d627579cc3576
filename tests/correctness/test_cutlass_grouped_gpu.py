"""CUTLASS kernels for groups of rows on a GPU: every tile, captures with changing offsets, streams, invalid offsets."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from extras import needs
from launches import (
    assert_follows_offsets,
    assert_launched_by_a_new_thread,
    assert_replayable,
    assert_right,
    assert_streams_apart,
    assert_touches_nothing_else,
    assert_tuned_and_captured,
)
from rotation import rotated

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

pytestmark = [
    needs("cutlass"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="operations of SM90 run on SM90 alone"
    ),
]
BF16, F16 = torch.bfloat16, torch.float16


def rows(m: int, n: int, k: int, groups: int, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def fused(problem: Problem) -> Problem:
    """Return silu(a @ b) plus a number for each column, stored in float32."""
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
"""Cases by name: a problem, and a part of an operation's name. Sizes with remainders, dozens of groups, both layouts of b."""

SAMPLED = ("few-rows", "cooperative", "rows-in-clusters")
"""Operations that -m gpu compiles in rotation: rows as columns, two warp groups per tile, clusters of pingpong tiles."""
NAME = rotated(SAMPLED, 3, "cutlass-grouped")[0]


def choice_of(name: str, device: DeviceInfo) -> CutlassChoice:
    problem, regex = CASES[name]
    told = Settings(search="exhaustive", cutlass_op_allowlist_regex=regex)
    [choice] = BACKEND.enumerate(problem, device, told).choices
    assert isinstance(choice, CutlassChoice)
    return choice


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Compile all kernels of this module, with one thread per core."""
    called = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    names = {one.params["name"] for one in called if one is not None and "name" in one.params}
    choices = {(one := choice_of(name, preset("sm90"))).compile_key: one for name in names}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), choices.values()))


@pytest.mark.cutlass_build
@pytest.mark.parametrize("name", CASES)
def test_every_variant_passes_verification(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    assert_right(choice.problem, (choice, *choice.launch_variants()))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME])
def test_runs_in_captures_streams_and_threads(name: str) -> None:
    choice = choice_of(name, detect("cuda"))
    assert_right(choice.problem, [choice])
    assert_replayable(choice)
    assert_streams_apart(choice)
    assert_launched_by_a_new_thread(choice)
    assert_follows_offsets(choice)
    assert_touches_nothing_else(choice.build().run, choice.problem)


@pytest.mark.cutlass_build
def test_named_backend_can_be_tuned_and_captured(own_store: object) -> None:
    assert_tuned_and_captured("cutlass")
