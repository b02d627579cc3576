"""Legality of CUTLASS operations: layouts, alignment, arithmetic, and the order of offers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune.backends.cutlass import CutlassBackend
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.configs import Legality
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.orientation import letter, orient

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
TF32 = Precision(input_mode="tf32")


def offers(problem: Problem, arch: str = "sm90", **changes: object) -> Offers:
    return CutlassBackend().enumerate(problem, preset(arch), Settings(**changes))  # type: ignore[arg-type]


def choices(problem: Problem, arch: str = "sm90", **changes: object) -> list[CutlassChoice]:
    found = offers(problem, arch, **changes).choices
    assert found
    return [choice for choice in found if isinstance(choice, CutlassChoice)]


def mm(m: int = 512, n: int = 512, k: int = 512, dtype: torch.dtype = BF16, layout: str = "nt", **fields: object) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_offers_read_layouts_of_problem(arch: str, layout: str) -> None:
    problem = mm(dtype=F16, layout=layout)
    for choice in choices(problem, arch):
        how, op = orient(problem, swap_ab=choice.swap_ab), choice.config.operation
        assert (op.layout_a, op.layout_b, op.layout_d) == (letter(how.a), letter(how.b), letter(how.out))


@pytest.mark.parametrize(
    ("shape", "most"), [((512, 512, 512), 8), ((512, 508, 516), 4), ((510, 512, 514), 2), ((512, 511, 512), 1)]
)
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_operation_alignment_is_at_most_operand_alignment(shape: tuple[int, int, int], most: int, arch: str) -> None:
    problem = mm(*shape, dtype=F16, layout="nn")
    found = choices(problem, arch, search="exhaustive")
    for choice in found:
        how, op = orient(problem, swap_ab=choice.swap_ab), choice.config.operation
        assert op.alignment_a <= how.a.alignment
        assert op.alignment_b <= how.b.alignment
        assert op.alignment_d <= how.out.alignment
    assert max(max(c.config.operation.alignment_a, c.config.operation.alignment_b) for c in found) >= most


def test_no_tma_for_rows_unaligned_to_16_bytes() -> None:
    for choice in choices(mm(512, 512, 508), search="exhaustive"):
        assert "Tma" not in choice.config.operation.kernel_schedule


def test_offset_lowers_alignment() -> None:
    problem = mm()
    shifted = dataclasses.replace(problem, a=dataclasses.replace(problem.a, offset=4))
    assert max(c.config.operation.alignment_b for c in choices(shifted)) == 4


def test_refuses_strided_operands() -> None:
    problem = dataclasses.replace(mm(64, 64, 64), a=Layout(size=(64, 64), stride=(128, 2), dtype=BF16))
    found = offers(problem)
    assert not found.choices
    assert any("strided, expected" in refusal.reason for refusal in found.refusals)


@pytest.mark.parametrize(("dtype", "precision", "elements"), [
    (F32, Precision(), {"f32"}), (F32, TF32, {"tf32", "f32"}), (F64, Precision(), {"f64"}), (F16, Precision(), {"f16"}),
])  # fmt: skip
def test_operand_precision_follows_problem(dtype: torch.dtype, precision: Precision, elements: set[str]) -> None:
    found = choices(mm(dtype=dtype, precision=precision), search="exhaustive")
    assert {c.config.operation.a for c in found} == elements
    for choice in found:
        tf32 = choice.config.operation.a == "tf32"
        assert choice.claims.input_mode == ("tf32" if tf32 else "ieee")


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
def test_accumulator_follows_problem(arch: str) -> None:
    assert {c.config.operation.accumulator for c in choices(mm(dtype=F16), arch, search="exhaustive")} == {"f32"}


def test_sm80_gets_2x_and_sm90_also_3x() -> None:
    assert not any(c.config.operation.modern for c in choices(mm(), "sm80", search="exhaustive"))
    assert {c.config.operation.modern for c in choices(mm(), "sm90", search="exhaustive")} == {True, False}


def test_3x_operation_runs_only_on_its_architecture() -> None:
    operation = next(c.config.operation for c in choices(mm()) if c.config.operation.modern)
    assert Legality(mm(), preset("sm100")).orientation(operation) == "runs only on sm90"


def test_few_rows_get_narrow_tiles_with_swapped_operands() -> None:
    found = choices(mm(16, 6144, 4096))
    assert all(c.swap_ab for c in found)
    assert {c.config.operation.tile[1] for c in found} >= {8, 16, 32}


def test_epilogue_needs_visitor_tree() -> None:
    problem = Problem.addmm(512, 512, 512, bias="n", alpha=2, beta=0.5, device_type="cuda")
    assert all(c.config.operation.tma_store for c in choices(problem) if c.config.operation.modern)


def test_accumulators_never_spill() -> None:
    assert all(c.config.operation.accumulators_per_thread <= 208 for c in choices(mm(), search="exhaustive"))


def test_names_are_unique_cutlass_names_with_variant() -> None:
    found = choices(mm(4096, 4096, 4096))
    names = [c.name for c in found]
    assert len(set(names)) == len(names)
    for choice in found:
        assert choice.name.startswith("cutlass:cutlass")
        assert choice.config.operation.name in choice.name


def test_enumeration_is_deterministic() -> None:
    assert [c.content_hash for c in choices(mm(777, 1024, 512))] == [c.content_hash for c in choices(mm(777, 1024, 512))]


def test_wider_search_includes_narrower_search() -> None:
    quick, default, whole = ({c.name for c in choices(mm(), search=search)} for search in ("quick", "default", "exhaustive"))
    assert quick <= default <= whole


def test_claims_state_splits() -> None:
    for choice in choices(mm(64, 64, 4096)):
        for each in (choice, *choice.launch_variants()):
            variant, steps = each.config.variant, 4096 // each.config.operation.tile[2]
            divided = each.config.operation.stream_k and variant.decomposition != "dataparallel"
            most = variant.splits if variant.decomposition == "splitk" else min(steps, 132)
            assert each.claims.splits == (most if divided else 1)


def test_variants_share_only_the_kernel() -> None:
    for choice in choices(mm(4096, 4096, 4096)):
        variants = choice.launch_variants()
        assert len({v.name for v in (choice, *variants)}) == len({v.content_hash for v in (choice, *variants)}) == 1 + len(variants)
        assert {v.compile_key for v in variants} == {choice.compile_key}
        assert all(v.name == f"cutlass:{v.config.name}" for v in variants)
        assert all(choice in v.launch_variants() for v in variants)


@pytest.mark.parametrize("problem", [
    mm(0, 4, 4), mm(4, 4, 0), Problem.int_mm(32, 0, 32, device_type="cuda"), Problem.mm(4, 4, 4, dtype=F32, device_type="cpu"),
], ids=["no-rows", "no-k", "int_mm-no-columns", "cpu"])  # fmt: skip
def test_refuses_unsupported_problems(problem: Problem) -> None:
    device = preset("avx2" if problem.device_type == "cpu" else "sm90")
    found = CutlassBackend().enumerate(problem, device, Settings())
    assert not found.choices
    assert len(found.refusals) == 1
    assert found.refusals[0].reason
