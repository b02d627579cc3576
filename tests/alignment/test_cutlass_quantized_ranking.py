"""Ranking of mixed_mm operations: a search compiles few, prepacked ones first, and the measured fastest among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.rank import estimate_us
from gemmtune.backends.cutlass.tiles import SHARED_CONVERTING, SLICED, TILES, Tile, is_shared
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import orient

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
MOST = 6
"""Operations that a default search compiles for one problem."""
N = K = 8192
MEASURED: dict[int, dict[str, float]] = {
    16: {"64x16x128 1x1 sliced3": 18.3, "64x16x128 1x1 sliced2": 18.8},
    64: {"64x64x128 1x1 sliced2": 21.3, "64x64x128 1x1 pingpong as it is": 30.3},
    256: {
        "128x128x64 2x1 cooperative": 52.5, "128x128x64 1x2 stream_k": 53.2, "64x256x64 2x1 pingpong": 53.3,
        "128x256x64 2x1 stream_k": 58.6, "128x256x64 2x1 stream_k as it is": 58.9, "128x128x64 2x1 pingpong": 60.5,
        "128x128x64 1x2 stream_k as it is": 63.9, "64x64x128 1x1 sliced2": 86.4, "64x64x128 1x1 pingpong as it is": 118.3,
    },
    4096: {
        "64x256x64 2x1 pingpong": 827.4, "128x128x64 2x1 cooperative": 830.0, "128x256x64 2x1 stream_k as it is": 838.1,
        "128x256x64 2x1 stream_k": 849.5, "128x128x64 1x2 stream_k": 860.5, "128x128x64 2x1 pingpong": 956.2,
        "128x128x64 1x2 stream_k as it is": 1009.4,
    },
}  # fmt: skip
"""Times in µs on an H200 by rows of a (float16): operations with int8 weights, prepacked and unpacked. N = K = 8192."""


def mixed_mm(m: int, n: int = N, k: int = K, *, prepacked: bool = True, **fields: Any) -> Problem:
    problem = Problem.mixed_mm(m, n, k, device_type="cuda", dtype=torch.float16, **fields)
    return dataclasses.replace(problem, prepacked=prepacked)


def int4(m: int, n: int = N, k: int = K) -> Problem:
    return mixed_mm(m, n, k, encoding="int4", scales="group_128")


def offered(problem: Problem, **settings: Any) -> list[CutlassChoice]:
    found = BACKEND.enumerate(problem, preset("sm90"), Settings(**settings)).choices
    return [choice for choice in found if isinstance(choice, CutlassChoice)]


def label(choice: CutlassChoice) -> str:
    operation = choice.config.operation
    tile = Tile.of(operation)
    assert tile is not None
    sizes = f"{'x'.join(map(str, operation.tile))} {tile.cluster[0]}x{tile.cluster[1]} {tile.kind}"
    return sizes if operation.shuffled else f"{sizes} as it is"


@pytest.mark.parametrize("m", MEASURED)
def test_tries_fastest_operation(m: int) -> None:
    found = [label(choice) for choice in offered(mixed_mm(m, scales="none"))]
    assert min(MEASURED[m].get(name, float("inf")) for name in found) == min(MEASURED[m].values())


@pytest.mark.parametrize("m", MEASURED)
def test_model_is_near_measured_times(m: int) -> None:
    problem, device = mixed_mm(m, scales="none"), preset("sm90")
    by_label = {label(choice): choice for choice in offered(problem, search="exhaustive")}
    for name, time_us in MEASURED[m].items():
        choice = by_label[name]
        oriented = orient(problem, swap_ab=choice.swap_ab)
        estimated_us = estimate_us(choice.config.operation, oriented, problem, device)
        assert estimated_us == pytest.approx(time_us, rel=0.17), name


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("prepacked", [False, True])
def test_compiles_few_operations(m: int, *, prepacked: bool) -> None:
    found = offered(mixed_mm(m, prepacked=prepacked, encoding="int4", scales="group_128"))
    assert len(found) == MOST
    assert {choice.config.operation.shuffled for choice in found} == {prepacked}
    assert len(offered(mixed_mm(m, prepacked=prepacked), search="quick")) < MOST


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_try_sliced_k_first(m: int) -> None:
    assert offered(int4(m))[0].config.operation.slices > 1


def test_many_rows_do_not_try_sliced_k_first() -> None:
    assert offered(int4(256))[0].config.operation.slices == 1


def test_problems_share_compilations() -> None:
    sizes = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
    found = [choice for m in (1, 4, 16, 64, 256, 1024, 4096) for n, k in sizes for choice in offered(int4(m, n, k))]
    assert len({choice.compile_key for choice in found}) <= len(found) // MOST
    assert sum(is_shared(choice.config.operation) for choice in found) > len(found) // 2


def test_shared_tiles_are_tiles() -> None:
    assert set(SLICED) <= SHARED_CONVERTING <= {*SLICED, *TILES}
