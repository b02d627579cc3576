"""Launch variants that make a difference: orders of tiles, divisions of K."""

from __future__ import annotations

import dataclasses

import pytest

from gemmtune.backends.cutlass import BACKEND
from gemmtune.backends.cutlass.operation import Operation
from gemmtune.backends.cutlass.variants import Grid, Variant, legal_variants, most_splits, neighbours
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import orient

OPERATION = Operation(
    name="gemm", modern=True, introduced=90, a="bf16", b="bf16", c="void", d="bf16", accumulator="f32",
    layout_a="t", layout_b="n", layout_d="n", alignment_a=8, alignment_b=8, alignment_d=8,
    tile=(128, 128, 64), cluster=(1, 1, 1), stages=0, warps=(4, 1, 1), instruction=(64, 128, 16), opcode="TensorOp",
    math="multiply_add", kernel_schedule="KernelTmaWarpSpecializedCooperative",
    epilogue_schedule="TmaWarpSpecializedCooperative", scheduler="Default",
)  # fmt: skip
STREAM_K = dataclasses.replace(OPERATION, scheduler="StreamK")


def grid(rows: int, cols: int, steps: int = 64, batch: int = 1, cluster: tuple[int, int] = (1, 1)) -> Grid:
    return Grid(rows=rows, cols=cols, batch=batch, steps=steps, multiprocessors=132, tile=(128, 128), cluster=cluster)


def orders(of: Grid) -> list[str]:
    return [f"{variant.raster}{variant.swizzle}" for variant in legal_variants(OPERATION, of)]


def divided(of: Grid) -> list[str]:
    found = dict.fromkeys((variant.decomposition, variant.splits) for variant in legal_variants(STREAM_K, of))
    return [f"{name}{splits}" if name == "splitk" else name for name, splits in found]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (grid(1, 40), ["m1"]),
        (grid(40, 1), ["n1"]),
        (grid(2, 40, cluster=(2, 1)), ["m1"]),
        (grid(2, 40), ["m1", "n1", "m2", "n2"]),
        (grid(40, 2), ["n1", "m1", "n2", "m2"]),
        (grid(5, 5), ["n1", "m1", "n2", "m2", "n4", "m4"]),
        (grid(6, 7), ["m1", "n1", "m2", "n2", "m4", "n4", "m8", "n8"]),
    ],
)
def test_orders_start_with_shorter_side(of: Grid, expected: list[str]) -> None:
    assert orders(of) == expected


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (grid(12, 11), ["heuristic"]),  # one whole wave
        (grid(7, 8, steps=8), ["heuristic"]),  # nothing to divide
        (grid(10, 8), ["heuristic", "streamk", "splitk2", "splitk3"]),  # more than half a wave: the heuristic divides nothing
        (grid(7, 8), ["heuristic", "splitk2", "splitk3", "splitk4"]),  # the heuristic is stream-K
        (grid(4, 11), ["heuristic", "streamk", *(f"splitk{s}" for s in (2, 4, 5, 6))]),  # the heuristic is split-K by 3
        (grid(12, 12), ["heuristic", "dataparallel"]),
        (grid(20, 10), ["heuristic", "streamk"]),
        (
            grid(1, 8, steps=32),
            ["heuristic", "streamk", *(f"splitk{s}" for s in (2, 3, 5, 6, 8))],
        ),  # by 4, as its least steps allow
    ],
)
def test_legal_divisions_of_k(of: Grid, expected: list[str]) -> None:
    assert divided(of) == expected


def test_only_stream_k_divides_k() -> None:
    assert {variant.decomposition for variant in legal_variants(OPERATION, grid(1, 8))} == {"heuristic"}


def test_neighbours_differ_in_order_or_division() -> None:
    every = legal_variants(STREAM_K, grid(2, 8))
    found = neighbours(every[0], every)
    assert every[0] not in found
    assert Variant(raster="n") in found
    assert Variant(decomposition="splitk", splits=2) in found
    assert Variant(raster="n", decomposition="splitk", splits=2) not in found


def test_every_variant_is_reachable_from_the_first() -> None:
    every = legal_variants(STREAM_K, grid(2, 8))
    reached = {every[0]}
    for _ in range(2):
        reached |= {n for variant in reached for n in neighbours(variant, every)}
    assert reached == set(every)


@pytest.mark.parametrize(
    ("operation", "variant", "expected"),
    [
        (OPERATION, Variant(), 1),
        (STREAM_K, Variant(decomposition="dataparallel"), 1),
        (STREAM_K, Variant(decomposition="splitk", splits=4), 4),
        (STREAM_K, Variant(), 64),
        (STREAM_K, Variant(decomposition="streamk"), 64),
    ],
)
def test_most_splits_of_a_result(operation: Operation, variant: Variant, expected: int) -> None:
    assert most_splits(variant, operation, grid(1, 8)) == expected


def test_grid_has_whole_clusters() -> None:
    problem = Problem.mm(300, 1000, 640, device_type="cuda")
    wide = dataclasses.replace(OPERATION, cluster=(2, 1, 1))
    made = Grid.of(wide, orient(problem, swap_ab=False), 3, 132)
    assert (made.rows, made.cols, made.batch, made.steps, made.tiles, made.at_once) == (4, 8, 3, 10, 96, 132)


def test_column_major_2x_kernel_transposes_tile() -> None:
    problem = Problem.mm(512, 1024, 640, device_type="cuda")
    older = dataclasses.replace(OPERATION, modern=False, tile=(64, 256, 32))
    assert older.transposes
    made = Grid.of(older, orient(problem, swap_ab=False), 1, 132)
    assert (made.rows, made.cols) == (2, 16)


def test_offers_first_variant_that_a_regex_allows() -> None:
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    problem = Problem.mm(128, 512, 16384, device_type="cuda")
    found = BACKEND.enumerate(problem, preset("sm90"), Settings(cutlass_op_allowlist_regex="_splitk(4|6)$")).choices
    assert found
    assert all(choice.name.endswith("_splitk4") for choice in found)
