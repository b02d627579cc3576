"""Tiles of our own, and agreement of the time model with measured times."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.configs import MOST_ACCUMULATORS
from gemmtune.backends.cutlass.tiles import KINDS, SHARED, SHARED_CONVERTING, TILES, Tile, is_shared, own_operations
from gemmtune.backends.cutlass.toolkit import find_toolkit, operations
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
MEASURED = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "cutlass-operations.json").read_text()
)["shapes"]
"""Times in µs by shape, for operations such as ``64x16x256 1x1 pingpong``."""
SEARCHED = 8
MOST_COMPILED = 42
"""Maximum operations for all shapes together. 16 cores compile these in two to three minutes."""


def tried(shape: str) -> list[CutlassChoice]:
    m, n, k = map(int, shape.split("x"))
    problem = Problem.mm(m, n, k, dtype=torch.bfloat16, layout="nt", device_type="cuda")
    return list(BACKEND.enumerate(problem, preset("sm90"), Settings()).choices)


def label(choice: CutlassChoice) -> str:
    """Return the name of the operation in the file of times. All operations there swap their operands."""
    operation = choice.config.operation
    tile = Tile.of(operation)
    cluster = "{}x{}".format(*operation.cluster[:2])
    kind = tile.kind if tile and choice.swap_ab else "other"
    return f"{'x'.join(map(str, operation.tile))} {cluster} {kind}"


@pytest.mark.parametrize("shape", MEASURED)
def test_tries_one_of_the_fastest_operations(shape: str) -> None:
    times = MEASURED[shape]["operations"]
    found = [label(choice) for choice in tried(shape)]
    assert len(found) == SEARCHED
    best = min(times.get(name, float("inf")) for name in found)
    assert best <= 1.02 * min(times.values())


def test_problems_share_compilations() -> None:
    found = {shape: tried(shape) for shape in MEASURED}
    keys = {choice.compile_key for choices in found.values() for choice in choices}
    assert len(keys) <= MOST_COMPILED
    for choices in found.values():
        assert sum(is_shared(choice.config.operation) for choice in choices) >= SEARCHED // 4


def test_limited_search_repeats_no_kind_of_operation() -> None:
    found = Counter(label(choice) for choice in tried("512x6144x4096"))
    assert found.most_common(1)[0][1] == 1


def test_shared_tiles_are_offered() -> None:
    offered = {Tile.of(op) for op in operations(find_toolkit(None), 90, "bf16")}
    assert offered >= SHARED
    assert offered >= set(TILES)


@pytest.mark.parametrize("element", ["f16", "tf32", "s8"])
def test_tile_depth_in_bytes_is_independent_of_element(element: str) -> None:
    itemsize = {"f16": 2, "tf32": 4, "s8": 1}[element]
    found = operations(find_toolkit(None), 90, element)
    ours = list(own_operations(found))
    assert ours
    assert {op.tile[2] * itemsize for op in ours} == {128, 256, 512}
    assert all(Tile.of(op) in TILES for op in ours)
    assert len({op.name for op in found}) == len(found)


def test_tiles_respect_schedule_limits() -> None:
    for tile in TILES:
        groups = 2 if tile.kind in ("cooperative", "stream_k") else 1
        assert tile.rows % (64 * groups) == 0
        assert tile.cols % 8 == 0
        assert tile.rows * tile.cols / (128 * groups) <= MOST_ACCUMULATORS
    assert set(KINDS) == {tile.kind for tile in TILES}
    assert set(TILES) >= SHARED_CONVERTING
