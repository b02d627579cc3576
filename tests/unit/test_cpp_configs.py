"""Offers of the cpp backend: pure, legal, and shared between shapes that need no recompilation."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.configs import MICRO_TILES, Config, configs, refusal
from gemmtune.backends.cpp.operands import oriented
from gemmtune.backends.cpp.plan import make_plan
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.problem import Epilogue, Layout, Problem
from gemmtune.problem.epilogue import Node, Ref
from gemmtune.problem.trace import trace

ARCHS = ("avx512", "avx2", "portable")
FIELDS = (
    "batch", "m", "n", "k", "numbers", "a_batch", "a_m", "a_k", "b_batch", "b_panel", "b_column", "b_k", "out_batch", "out_m",
    "out_n", "inp_batch", "inp_m", "inp_n", "rows", "kc", "block_m", "block_n", "task_m", "task_n", "columns_mode", "direct",
    "dots", "alpha_zero", "beta_zero", "threads",
)  # fmt: skip
INTEGERS = Epilogue(
    nodes=(Node(op="acc", args=(), dtype=torch.float32), Node(op="cast", args=(Ref(0),), dtype=torch.int32)),
)
BASE = Config(mr=14, nv=2, mode="steps", kc=512, task_m=8, task_n=4)


def mm(m: int, n: int, k: int, **changes: object) -> Problem:
    return Problem.mm(m, n, k, **({"dtype": torch.float32, "device_type": "cpu"} | changes))


def offers(problem: Problem, arch: str = "avx512", search: str = "default") -> Offers:
    with settings.patch(search=search) as patched:
        return BACKEND.enumerate(problem, preset(arch), patched)


def plan_of(problem: Problem, **changes: object) -> dict[str, int]:
    plan = make_plan(problem, dataclasses.replace(BASE, **changes), "avx512")
    return dict(zip(FIELDS, plan.words, strict=False)) | {"swapped": int(plan.swapped)}


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((1, 4096, 4096), (16, 4096, 4096), (1024, 1024, 1024), (500, 501, 499), (3, 2, 0))


@pytest.mark.parametrize(
    ("arch", "dtype", "shape", "prepacked"),
    rotated([*itertools.product(ARCHS, DTYPES, SHAPES, (False, True))], 3, "offers"),
    ids=str,
)
def test_offers_are_legal_with_distinct_names(
    arch: str, dtype: torch.dtype, shape: tuple[int, int, int], prepacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    problem = mm(*shape, dtype=dtype, prepacked=prepacked)
    found = {search: offers(problem, arch, search).choices for search in ("quick", "default", "exhaustive")}
    names = {search: [c.name for c in choices] for search, choices in found.items()}
    assert 1 <= len(names["quick"]) <= 4
    assert len(names["quick"]) <= len(names["default"]) <= 10
    assert set(names["quick"]) <= set(names["default"]) <= set(names["exhaustive"])
    assert len(set(names["exhaustive"])) == len(names["exhaustive"])
    assert len({c.content_hash for c in found["default"]}) == len(found["default"])
    for choice in found["exhaustive"]:
        assert refusal(choice.config, problem, preset(arch)) is None
        assert choice.name.startswith(f"cpp:{arch}{'bf16' * choice.vnni}_")
        assert (choice.packed_format is not None) == prepacked


def test_bfloat16_pairs_need_a_cpu_instruction_and_a_matching_b() -> None:
    bf16, f32, without = torch.bfloat16, torch.float32, dataclasses.replace(preset("avx512"), isa=("avx512f",))
    for problem, pairs in (
        (mm(512, 512, 512, dtype=bf16), True),
        (mm(512, 512, 512, dtype=torch.float16), False),
        (Problem.mixed_mm(512, 512, 512, dtype=bf16, device_type="cpu"), True),
        (Problem.mixed_mm(512, 512, 512, dtype=torch.float16, device_type="cpu"), False),
        (Problem.mixed_mm(512, 32, 512, dtype=bf16, device_type="cpu"), False),
    ):
        found = offers(problem).choices
        assert {choice.vnni for choice in found} == {pairs}
        assert {choice.claims.flush_subnormals for choice in found} == {pairs}
        assert all(("-mavx512bf16" in choice.source.flags) == pairs for choice in found)
        assert not any(choice.vnni for choice in BACKEND.enumerate(problem, without, settings.current()).choices)
    rows = offers(mm(8, 512, 512, dtype=bf16, layout="nn")).choices
    assert {choice.config.direct: choice.vnni for choice in rows} == {True: False, False: True}
    weights = offers(Problem.mixed_mm(4, 512, 512, dtype=bf16, scales="column", device_type="cpu")).choices
    assert {(c.config.mode == "dots", c.vnni, c.claims.weights) for c in weights} == {(True, False, f32), (False, True, bf16)}
    packed = offers(mm(8, 512, 512, dtype=bf16, prepacked=True)).choices[0]
    assert packed.packed_format == "cpp_bf16x2_nr32"
    assert packed.claims.splits == -(-512 // (2 * packed.config.kc))


def test_shapes_and_blockings_share_one_compilation() -> None:
    keys = {c.compile_key for shape in ((1, 4096, 4096), (300, 200, 100)) for c in offers(mm(*shape)).choices}
    assert len(keys) == 1
    assert keys != {c.compile_key for c in offers(mm(300, 200, 100, dtype=torch.float16)).choices}
    assert keys != {c.compile_key for c in offers(mm(300, 200, 100), "avx2").choices}


def test_an_epilogue_changes_the_compilation_but_not_the_name() -> None:
    plain = mm(64, 64, 64)
    fused = dataclasses.replace(plain, epilogue=trace(torch.relu, torch.float32, ()))
    before, after = offers(plain).choices[0], offers(fused).choices[0]
    assert before.name == after.name
    assert before.compile_key != after.compile_key
    assert before.content_hash != after.content_hash
    assert before.claims == dataclasses.replace(after.claims, reduction=before.claims.reduction)
    assert (str(before.claims.reduction), str(after.claims.reduction)) == ("fma, K in one run", "fma, K in one run, cpp")


def test_choices_can_be_pickled() -> None:
    choice = offers(mm(64, 64, 64)).choices[0]
    copy = pickle.loads(pickle.dumps(choice))
    assert copy == choice
    assert copy.content_hash == choice.content_hash


def test_claims_count_the_blocks_of_k() -> None:
    for choice in offers(mm(256, 256, 4000)).choices:
        assert choice.claims.accumulate == choice.claims.partials == choice.claims.epilogue_input == torch.float32
        assert choice.claims.splits == -(-4000 // choice.config.kc)
        assert not choice.claims.flush_subnormals
    assert offers(mm(8, 8, 8, dtype=torch.float64)).choices[0].claims.accumulate == torch.float64


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (mm(8, 8, 8, device_type="cuda"), "the problem is on cuda"),
        (dataclasses.replace(Problem.bmm(2, 8, 8, 8, device_type="cpu"), prepacked=True), "a prepacked operand is 2-D"),
        (dataclasses.replace(mm(8, 8, 8), epilogue=INTEGERS), "values of torch.int32, expected float dtypes or bool"),
    ],
    ids=["device", "batched", "integers"],
)
def test_unserved_problems_are_refused_with_a_reason(problem: Problem, reason: str) -> None:
    found = offers(problem)
    assert not found.choices
    assert reason in found.refusals[0].reason


def test_a_gpu_has_no_kernels_here() -> None:
    assert "sm90" in offers(mm(8, 8, 8), "sm90").refusals[0].reason
    assert not BACKEND.available(preset("sm90")).ok
    assert not BACKEND.serves_by_default(preset("sm90"))
    assert BACKEND.serves_by_default(preset("avx2"))


@pytest.mark.parametrize(
    ("config", "problem", "reason"),
    [
        (dataclasses.replace(BASE, mr=20), mm(8, 8, 8), "20 rows by 2 vectors needs more than the 32 vector registers"),
        (dataclasses.replace(BASE, kc=0), mm(8, 8, 8), "at least 1"),
        (dataclasses.replace(BASE, direct=True), mm(64, 64, 64), "read in place only with 32 or more columns of stride 1"),
        (dataclasses.replace(BASE, direct=True), mm(20, 20, 64, layout="nn"), "read in place only with 32 or more columns"),
        (dataclasses.replace(BASE, mode="dots"), mm(64, 64, 64, layout="nn"), "dot products need b with stride 1 along K"),
        (dataclasses.replace(BASE, mode="dots"), mm(64, 64, 64, prepacked=True), "dot products need b with stride 1 along K"),
        (dataclasses.replace(BASE, mode="columns"), mm(1 << 16, 64, 1 << 12), "a packed copy of a takes 1073741824 bytes"),
    ],
)
def test_refusal(config: Config, problem: Problem, reason: str) -> None:
    assert reason in (refusal(config, problem, preset("avx512")) or "")


def test_every_micro_tile_fits_the_registers() -> None:
    for arch in ARCHS:
        for mr, nv in MICRO_TILES[arch]:
            assert refusal(dataclasses.replace(BASE, mr=mr, nv=nv), mm(64, 64, 64), preset(arch)) is None


def test_few_rows_of_a_linear_layer_get_dot_products_first() -> None:
    assert configs(mm(1, 4096, 4096), preset("avx512"), "quick")[0].mode == "dots"
    assert configs(mm(1024, 4096, 4096), preset("avx512"), "quick")[0].mode == "columns"
    assert configs(mm(1, 4096, 4096, prepacked=True), preset("avx512"), "quick")[0].direct


def test_a_result_stored_by_columns_is_computed_transposed() -> None:
    base = mm(100, 70, 50)
    by_columns = dataclasses.replace(base, out=Layout(size=(100, 70), stride=(1, 100), dtype=torch.float32))
    assert not oriented(base, 32).swapped
    x = oriented(by_columns, 32)
    assert x.swapped
    assert x.a == by_columns.b.transposed
    assert x.out.row_major
    plan = plan_of(by_columns)
    assert (plan["m"], plan["n"], plan["k"], plan["swapped"]) == (70, 100, 50, 1)
    assert (plan["a_m"], plan["a_k"], plan["b_column"], plan["b_k"]) == (50, 1, 50, 1)
    assert (plan["out_m"], plan["out_n"]) == (100, 1)
    assert not oriented(dataclasses.replace(by_columns, prepacked=True), 32).swapped
    assert oriented(mm(1000, 1, 50), 32).swapped


def test_panels_have_nearly_equal_heights() -> None:
    assert [plan_of(mm(m, 64, 64))["rows"] for m in (1, 14, 15, 16, 28, 29, 500)] == [1, 14, 8, 8, 14, 10, 14]
    assert [plan_of(mm(m, 64, 64), mode="dots")["rows"] for m in (1, 6, 7, 16)] == [1, 6, 4, 6]


def test_panels_read_in_place() -> None:
    assert plan_of(mm(64, 100, 64, layout="nn"), direct=True)["direct"] == 3  # the last, partial one is packed
    assert plan_of(mm(64, 100, 64, prepacked=True), direct=True)["direct"] == 4
    assert plan_of(mm(64, 100, 64), mode="dots")["direct"] == 4
    assert plan_of(mm(64, 100, 64))["direct"] == 0


def test_blocks_limit_the_memory_for_packed_panels() -> None:
    plan = plan_of(mm(20000, 30000, 5000), kc=1024)
    for block, size in ((plan["block_m"], 20000), (plan["block_n"], 30000)):
        assert block * plan["kc"] * 4 <= 16 << 20
        assert block < size
    assert plan["block_m"] % plan["rows"] == 0
    assert plan["block_n"] % 32 == 0
    small = plan_of(mm(100, 100, 100))
    assert small["block_m"] >= 100
    assert small["block_n"] >= 100


def test_small_products_take_one_thread() -> None:
    assert plan_of(mm(8, 8, 8))["threads"] == 1
    assert plan_of(mm(1024, 1024, 1024))["threads"] > 64


def test_added_operands_broadcast_by_stride() -> None:
    strides = {
        bias: [
            plan_of(Problem.addmm(40, 50, 60, bias=bias, dtype=torch.float32, device_type="cpu"))[f"inp_{d}"] for d in ("m", "n")
        ]
        for bias in ("n", "mn", "m1", "1n", "scalar")
    }
    assert strides == {"n": [0, 1], "mn": [50, 1], "m1": [1, 0], "1n": [0, 1], "scalar": [0, 0]}
