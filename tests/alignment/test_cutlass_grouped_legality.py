"""CUTLASS operations for groups of rows: offers, refusals and sources."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune.backends.cutlass import CutlassBackend
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.routed import RoutedChoice
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import legal_offers
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import letter, orient

pytest.importorskip("cutlass_library", reason="compiles with nvidia-cutlass")
F16, BF16 = torch.float16, torch.bfloat16


def rows(m: int = 1000, n: int = 512, k: int = 320, groups: int = 5, layout: str = "nt", dtype: torch.dtype = BF16) -> Problem:
    return Problem.grouped_mm(m, n, k, groups=groups, layout=layout, dtype=dtype, device_type="cuda")


def adding(problem: Problem, *operands: torch.Tensor, out: torch.dtype = BF16) -> Problem:
    epilogue = trace(lambda acc, *x: sum(x, torch.relu(acc)), torch.float32, operands)
    return dataclasses.replace(problem, epilogue=epilogue, out=dataclasses.replace(problem.out, dtype=out))


def offers(problem: Problem, arch: str = "sm90", search: str = "exhaustive") -> Offers:
    return CutlassBackend().enumerate(problem, preset(arch), Settings(search=search))  # type: ignore[arg-type]


def choices(problem: Problem, search: str = "exhaustive") -> list[CutlassChoice]:
    found = offers(problem, search=search).choices
    assert found
    return [choice for choice in found if isinstance(choice, CutlassChoice)]


def described(choice: CutlassChoice) -> str:
    operation = choice.config.operation
    kind = "cooperative" if operation.cooperative else "pingpong"
    return f"{'x'.join(map(str, operation.tile))} {kind} {'x'.join(map(str, operation.cluster[:2]))}"


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_offers_rows_as_rows_and_as_columns(layout: str, dtype: torch.dtype) -> None:
    found = choices(problem := rows(layout=layout, dtype=dtype))
    ways: dict[bool, set[str]] = {swap_ab: {described(c) for c in found if c.swap_ab == swap_ab} for swap_ab in (False, True)}
    assert {"64x128x64 pingpong 1x1", "128x128x64 pingpong 2x1", "128x256x64 cooperative 2x1"} <= ways[False]
    assert {"64x16x128 pingpong 1x1"} <= ways[True]
    assert len({choice.name for choice in found}) == len(found) == 10
    for choice in found:
        how, op = orient(problem, swap_ab=choice.swap_ab), choice.config.operation
        assert (op.layout_a, op.layout_b, op.layout_d) == (letter(how.a), letter(how.b), letter(how.out))
        assert not op.overlaps  # it reads group descriptions from the kernel just before
        assert (choice.claims.accumulate, choice.claims.splits) == (torch.float32, 1)


@pytest.mark.parametrize(
    ("problem", "arch", "reason"),
    [
        (rows(dtype=torch.float32), "sm90", "a is float32, expected float16 or bfloat16 for groups of rows"),
        (rows(), "sm80", "grouped_mm is served only on sm90, not on sm80"),
        (rows(layout="tn"), "sm90", "a is n, expected t"),
        (rows(n=508), "sm90", "out is aligned to 4 elements, expected 8"),
        (rows(k=316), "sm90", "a is aligned to 4 elements, expected 8"),
        (
            dataclasses.replace(rows(), b=Layout(size=(5, 320, 512), stride=(640 * 512, 2, 640), dtype=BF16)),
            "sm90",
            "b is strided, expected n",
        ),
        (
            adding(rows(), torch.empty(1000, 512, dtype=BF16)),
            "sm90",
            "operand 0 of the epilogue is bfloat16[1000x512](512,1), expected one row for all: an epilogue cannot tell",
        ),
        (
            Problem.grouped_k_mm(256, 384, 700, groups=6, device_type="cuda"),
            "sm90",
            "grouped_k_mm is not an operation of this backend",
        ),
    ],
    ids=["float32", "sm80", "a-of-columns", "n-unaligned", "k-unaligned", "b-strided", "rows-added", "terms"],
)
def test_refuses_with_reason(problem: Problem, arch: str, reason: str) -> None:
    found = offers(problem, arch)
    assert not found.choices
    assert any(reason in refusal.reason for refusal in found.refusals), found.refusals


def test_small_groups_try_rows_as_columns_first() -> None:
    few, many = choices(rows(m=64, n=4096, k=4096, groups=8))[0], choices(rows(m=8192, n=4096, k=4096, groups=8))[0]
    assert few.swap_ab
    assert few.config.operation.tile[1] <= 32
    assert not many.swap_ab
    assert many.config.operation.tile[0] >= 128


def test_launch_variants_change_raster_but_not_swizzle() -> None:
    [choice, *_] = choices(rows())
    assert {choice.config.variant.raster, *(x.config.variant.raster for x in choice.launch_variants())} == {"m", "n"}
    assert {x.config.variant.swizzle for x in (choice, *choice.launch_variants())} == {1}
    assert {x.source for x in choice.launch_variants()} == {choice.source}


def test_choice_serves_other_sizes_with_same_source() -> None:
    for choice in choices(rows(), "quick"):
        other = choice.at(rows(m=17), preset("sm90"))
        assert isinstance(other, CutlassChoice)
        assert other.compile_key == choice.compile_key
        assert choice.at(rows(k=316), preset("sm90")) == "a is aligned to 4 elements, expected 8"


def test_offsets_come_before_epilogue_operands() -> None:
    problem = adding(rows(layout="nn"), torch.empty(512, dtype=BF16), out=torch.float32)
    for choice in (next(c for c in choices(problem) if c.swap_ab == swap_ab) for swap_ab in (False, True)):
        text = choice.source.text
        assert choice.source.operands == (torch.int32, BF16)
        assert "GroupProblemShape" in text
        assert "cutlass::gemm::GroupScheduler" in text
        assert choice.config.operation.epilogue_schedule in text
        assert choice.config.operation.epilogue_schedule == "cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong"
        assert "static_cast<int const*>(launch.x[0])[group]" in text
        assert "launch.x[1]" in text
        assert "cudaMemcpy" not in text
        assert ("begin * launch.out_strides.col" in text) == choice.swap_ab


def test_routed_rows_are_composed_with_torch_steps() -> None:
    problem = Problem.routed_grouped_mm(64, 384, 512, groups=16, tokens=8, gated="silu", device_type="cuda")
    settings = Settings(backends=("cutlass",))
    found = legal_offers(problem, preset("sm90"), settings, on_this_machine=False).choices
    assert found
    assert all(isinstance(choice, RoutedChoice) and choice.name.startswith("cutlass:") for choice in found)
