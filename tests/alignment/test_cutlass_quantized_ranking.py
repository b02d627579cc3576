"""Ranking of mixed_mm operations: a search compiles few, and the measured fastest among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.backend import estimate_us
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.tiles import Tile, is_shared
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import orient

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
MOST = 6
"""Operations that a default search compiles for one problem."""
N = K = 8192
MEASURED: dict[int, dict[str, float]] = {
    64: {"64x64x128 1x1 pingpong": 30.3},
    256: {"128x256x64 2x1 stream_k": 58.9, "128x128x64 1x2 stream_k": 63.9, "64x64x128 1x1 pingpong": 118.3},
    4096: {"128x256x64 2x1 stream_k": 838.1, "128x128x64 1x2 stream_k": 1009.4},
}
"""Times in µs on an H200 by rows of a (float16): operations with int8 weights. N = K = 8192."""


def mixed_mm(m: int, n: int = N, k: int = K) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", dtype=torch.float16, scales="none")


def offered(problem: Problem, **settings: Any) -> list[CutlassChoice]:
    found = BACKEND.enumerate(problem, preset("sm90"), Settings(**settings)).choices
    return [choice for choice in found if isinstance(choice, CutlassChoice)]


def label(choice: CutlassChoice) -> str:
    operation = choice.config.operation
    tile = Tile.of(operation)
    assert tile is not None
    return f"{'x'.join(map(str, operation.tile))} {tile.cluster[0]}x{tile.cluster[1]} {tile.kind}"


@pytest.mark.parametrize("m", MEASURED)
def test_tries_fastest_operation(m: int) -> None:
    found = [label(choice) for choice in offered(mixed_mm(m))]
    assert min(MEASURED[m].get(name, float("inf")) for name in found) == min(MEASURED[m].values())


@pytest.mark.parametrize("m", MEASURED)
def test_model_is_near_measured_times(m: int) -> None:
    problem, device = mixed_mm(m), preset("sm90")
    by_label = {label(choice): choice for choice in offered(problem, search="exhaustive")}
    for name, time_us in MEASURED[m].items():
        choice = by_label[name]
        oriented = orient(problem, swap_ab=choice.swap_ab)
        estimated_us = estimate_us(choice.config.operation, oriented, problem, device)
        assert estimated_us == pytest.approx(time_us, rel=0.17), name


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
def test_compiles_few_operations(m: int) -> None:
    assert len(offered(mixed_mm(m))) == MOST
    assert len(offered(mixed_mm(m), search="quick")) < MOST


def test_problems_share_compilations() -> None:
    sizes = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
    found = [choice for m in (1, 4, 16, 64, 256, 1024, 4096) for n, k in sizes for choice in offered(mixed_mm(m, n, k))]
    assert len({choice.compile_key for choice in found}) <= len(found) // MOST
    assert sum(is_shared(choice.config.operation) for choice in found) > len(found) // 2
