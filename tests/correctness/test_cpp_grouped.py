"""Grouped products by the cpp backend for every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cpp_kernels import CPU, HERE, as_shipped, call, choice_for, device_for, legal, needs_compiler, on_each_isa
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp import plan as plans
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.numerics.grouped import awkward_ends
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import grouped_by_terms, grouped_product, spans
from gemmtune.selector.offers import legal_offers
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = [needs_compiler, pytest.mark.rotates(8)]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WAYS = [{"mode": mode, "direct": direct} for mode in ("columns", "dots") for direct in (False, True)]
G = 5


def integers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def operands(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers in the problem's layouts, so that sums are exact."""
    made = []
    for layout in (problem.a, problem.b):
        x = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype)
        made.append(x.copy_(integers(*layout.size, dtype=layout.dtype)))
    return made[0], made[1]


@pytest.fixture(params=[False, True], ids=["at-once", "in-blocks"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the rows of A all at once, or only one panel at a time."""
    if request.param:
        monkeypatch.setattr(plans, "MAX_PACKED_A_BYTES", 1)


@on_each_isa
@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_groups_of_rows(arch: str, layout: str) -> None:
    problem = Problem.grouped_mm(61, 70, 90, groups=G, layout=layout, dtype=F32, device_type="cpu")
    a, b = operands(problem)
    ways = [way for way in WAYS if legal(problem, arch, **way)]
    assert len(ways) >= 2
    for way in ways:
        for name, ends in awkward_ends(61, G):
            got = call(problem, arch, a, b, extra=(torch.tensor(ends, dtype=torch.int32),), **way)
            want = torch.cat([a[begin:end] @ b[g] for g, (begin, end) in enumerate(spans(ends, 61))])
            assert torch.equal(got[: ends[-1]], want), (name, way)
            assert got[ends[-1] :].isnan().all(), "rows of no group are left as they were"


@on_each_isa
@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("dtype", rotated([F32, F16, BF16], 3, "terms"), ids=str)
def test_groups_of_terms(arch: str, dtype: torch.dtype) -> None:
    problem = Problem.grouped_k_mm(37, 70, 120, groups=G, dtype=dtype, device_type="cpu")
    a, b = operands(problem)
    for direct in (False, True):
        for name, ends in awkward_ends(120, G):
            got = call(problem, arch, a, b, extra=(torch.tensor(ends, dtype=torch.int32),), mode="columns", direct=direct)
            want = torch.stack([a[:, begin:end].float() @ b[begin:end].float() for begin, end in spans(ends, 120)])
            assert torch.equal(got, want.to(dtype)), (name, direct)


@pytest.fixture
def threads() -> Iterator[None]:
    """Use more threads than the machine has cores, for products that merit them."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("packed", "threads")
@pytest.mark.parametrize("make", [Problem.grouped_mm, Problem.grouped_k_mm], ids=["rows", "terms"])
def test_threads_share_the_tasks_of_all_groups(make: Callable[..., Problem]) -> None:
    problem = make(150, 200, 300, groups=G, dtype=F32, device_type="cpu")
    run = choice_for(problem, HERE[-1], mode="columns").build().run
    a, b = operands(problem)
    for name, ends in awkward_ends(problem.m if make == Problem.grouped_mm else problem.k, G):
        offs = torch.tensor(ends, dtype=torch.int32)
        want = (grouped_product if make == Problem.grouped_mm else grouped_by_terms)(a, b, offs)
        for _ in range(5):
            out = torch.full(problem.out.size, torch.nan)
            run(out, (a, b, offs), ())
            assert torch.equal(out[: ends[-1]], want[: ends[-1]]), name


@on_each_isa
def test_invalid_offsets_touch_no_other_memory(arch: str) -> None:
    rows = Problem.grouped_mm(40, 70, 33, groups=4, dtype=F32, device_type="cpu")
    terms = Problem.grouped_k_mm(40, 70, 33, groups=4, dtype=F32, device_type="cpu")
    for problem in (rows, terms):
        run = choice_for(problem, arch, mode="columns").build().run
        a, b = (torch.ones_like(x) for x in operands(problem))
        for ends in ([9, 3, 4000, 12], [-7, 5, 2, 99], [2**31 - 1, -(2**31), 40, 41]):
            memory = torch.full((6, *problem.out.size[-2:]), -1.0)
            out = memory[1] if problem is rows else memory[1:5]
            run(out, (a, b, torch.tensor(ends, dtype=torch.int32)), ())
            assert (memory[0] == -1).all()
            assert (memory[2 if problem is rows else 5 :] == -1).all()
            assert out.isfinite().all()


VERIFIED = {
    "bf16": Problem.grouped_mm(37, 70, 130, groups=G, layout="nn", device_type="cpu"),
    "fp16": Problem.grouped_mm(64, 20, 40, groups=17, dtype=F16, device_type="cpu"),
    "fp32-terms": Problem.grouped_k_mm(37, 50, 130, groups=G, layout="nn", dtype=F32, device_type="cpu"),
    "int8": Problem.mixed_grouped_mm(37, 70, 64, groups=3, device_type="cpu"),
    "int4": Problem.mixed_grouped_mm(37, 70, 128, groups=3, encoding="int4", scales="group_32", dtype=F32, device_type="cpu"),
    "fp8-rows": Problem.scaled_grouped_mm(40, 70, 160, groups=3, device_type="cpu"),
    "fp8-blocks": Problem.scaled_grouped_mm(40, 136, 160, groups=3, scales="block_128x128", layout="nn", device_type="cpu"),
    "routed": Problem.routed_grouped_mm(36, 24, 40, groups=G, tokens=12, gated="silu", dtype=F32, device_type="cpu"),
    "combined": Problem.combined_grouped_mm(36, 24, 40, groups=G, tokens=12, dtype=BF16, device_type="cpu"),
}


@pytest.mark.turn(6, 8)
@as_shipped
@pytest.mark.parametrize("name", rotated(list(VERIFIED), 6, "cpp grouped"))
def test_verified_with_their_own_claims(name: str) -> None:
    problem = VERIFIED[name]
    offered = legal_offers(problem, detect("cpu"), Settings(backends=("cpp",))).choices
    for choice in rotated(offered, max(1, len(offered) // 2), name):
        verdict = Verifier(problem, CPU).check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


@pytest.mark.parametrize("name", ["routed", "combined"])
def test_offers_with_torchs_strides_are_not_also_refused(name: str) -> None:
    offers = legal_offers(VERIFIED[name], device_for("avx512"), Settings(backends=("cpp",)), on_this_machine=False)
    assert {choice.name.rpartition("+")[2] for choice in offers.choices} == {"routed"}
    assert [refusal for refusal in offers.refusals if refusal.name == "cpp"] == []


def test_offers() -> None:
    device, chosen = device_for("avx512"), settings.current()
    problem = Problem.grouped_mm(64, 512, 1024, groups=8, dtype=F32, device_type="cpu")
    choices = BACKEND.enumerate(problem, device, chosen).choices
    assert choices[0].name == "cpp:grouped_avx512_14x32_dots_kc1024_t8x1"
    assert not any("_steps_" in choice.name for choice in choices)
    many = Problem.grouped_mm(8192, 512, 1024, groups=8, dtype=F32, device_type="cpu")
    assert choices[0].at(many, device).compile_key == choices[0].compile_key  # type: ignore[union-attr]
    assert legal(Problem.grouped_mm(1 << 20, 64, 4096, groups=8, dtype=F32, device_type="cpu"), "avx512", mode="columns")
    terms = Problem.grouped_k_mm(64, 512, 1024, groups=8, layout="nt", dtype=F32, device_type="cpu")
    assert not legal(terms, "avx512", mode="dots")
    assert BACKEND.enumerate(terms, device, chosen).choices[0].name.startswith("cpp:grouped_k_avx512_14x32_columns_")
