"""Offers of the cpp backend for int8 products, narrow weights and 8-bit floats: pure, legal, with correct claims."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch
from rotation import rotated

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND
from gemmtune.backends.cpp.configs import Config, configs, refusal
from gemmtune.backends.cpp.operands import EVERYTHING, numbers_per_step, scale_words, sides, uses_vnni
from gemmtune.backends.cpp.plan import make_plan, packed_shape
from gemmtune.choice import Offers
from gemmtune.device import DeviceInfo, preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

ARCHS = ("avx512", "avx2", "portable")
BASE = Config(mr=14, nv=2, mode="columns", kc=512, task_m=8, task_n=4)
SHAPES = ((1, 4096, 4096), (16, 4096, 4096), (500, 502, 498), (1024, 1024, 1024), (3, 2, 0), (100, 16, 32))


def without_vnni(arch: str) -> DeviceInfo:
    return dataclasses.replace(preset(arch), isa=tuple(x for x in preset(arch).isa if "vnni" not in x))


def with_vnni(arch: str) -> DeviceInfo:
    return dataclasses.replace(without_vnni(arch), isa=(*without_vnni(arch).isa, "avx512_vnni", "avx_vnni"))


def problems(m: int, n: int, k: int) -> tuple[Problem, ...]:
    mixed = {"dtype": torch.bfloat16, "device_type": "cpu"}
    return (
        Problem.int_mm(m, n, k, device_type="cpu"),
        Problem.int_mm(m, n, k, layout="nn", device_type="cpu"),
        Problem.mixed_mm(m, n, k, dtype_b=torch.int8, **mixed),
        Problem.mixed_mm(m, n, k, dtype_b=torch.float8_e4m3fn, scales="column", layout="nn", **mixed),
        Problem.mixed_mm(m, n, k, encoding="int4", scales="group_64", zeros=True, **mixed),
        Problem.scaled_mm(m, n, k, scales="block_128x128", device_type="cpu"),
    )


def offers(problem: Problem, device: DeviceInfo, search: str = "default") -> Offers:
    with settings.patch(search=search) as patched:
        return BACKEND.enumerate(problem, device, patched)


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    ("arch", "shape", "prepacked"), rotated([*itertools.product(ARCHS, SHAPES, (False, True))], 3, "quantized offers"), ids=str
)
def test_offers_are_legal_with_distinct_names(
    arch: str, shape: tuple[int, int, int], prepacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    for problem in problems(*shape):
        offered = dataclasses.replace(problem, prepacked=prepacked)
        for device in (without_vnni(arch), with_vnni(arch)):
            found = {search: offers(offered, device, search).choices for search in ("quick", "default", "exhaustive")}
            names = {search: [c.name for c in choices] for search, choices in found.items()}
            assert 1 <= len(names["quick"]) <= 4
            assert set(names["quick"]) <= set(names["default"]) <= set(names["exhaustive"])
            assert len(set(names["exhaustive"])) == len(names["exhaustive"])
            assert len({c.content_hash for c in found["default"]}) == len(found["default"])
            for choice in found["exhaustive"]:
                assert refusal(choice.config, offered, device) is None
                assert (choice.packed_format is not None) == prepacked


def test_names_and_sources_show_the_byte_instructions() -> None:
    problem = problems(64, 64, 64)[0]
    for arch in ("avx512", "avx2"):
        plain, bytewise = (offers(problem, device).choices[0] for device in (without_vnni(arch), with_vnni(arch)))
        assert plain.name.startswith(f"cpp:{arch}_")
        assert bytewise.name.startswith(f"cpp:{arch}vnni_")
        assert plain.compile_key != bytewise.compile_key
        assert set(bytewise.source.flags) - set(plain.source.flags) == {"-mavx512vnni" if arch == "avx512" else "-mavxvnni"}
    assert not uses_vnni(problem, with_vnni("portable"))
    assert not uses_vnni(problems(64, 64, 64)[2], with_vnni("avx512"), dots=True)


def test_numbers_in_a_step() -> None:
    assert [numbers_per_step(torch.int32, arch, vnni=False) for arch in ARCHS] == [2, 2, 1]
    assert numbers_per_step(torch.int32, "avx512", vnni=True) == 4
    assert numbers_per_step(torch.float32, "avx512", vnni=False) == 1
    assert packed_shape(10, 33, 32, 4) == (2, 3, 32, 4)
    assert packed_shape(10, 33, 32) == (2, 10, 32)


def test_shapes_and_scale_layouts_share_one_compilation() -> None:
    def key(**changes: object) -> str | None:
        values = {"dtype": torch.float16, "encoding": "int4", "scales": "group_64", "zeros": True, "device_type": "cpu"} | changes
        return offers(Problem.mixed_mm(8, 4096, 4096, **values), preset("avx512")).choices[0].compile_key

    assert key() == key(scales="column") == key(scales="group_32", layout="nn")
    different = [
        key(), key(zeros=False), key(scale_dtype=torch.float32), key(encoding="uint4"), key(dtype=torch.bfloat16),
        key(encoding="", dtype_b=torch.uint8), key(scales="none", zeros=False),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_choices_can_be_pickled() -> None:
    for problem in problems(16, 64, 128):
        choice = offers(problem, preset("avx512")).choices[0]
        copy = pickle.loads(pickle.dumps(choice))
        assert copy == choice
        assert copy.content_hash == choice.content_hash


def test_claims() -> None:
    sums, _, plain, scaled_columns, _, blocks = problems(16, 64, 300)
    claims = {problem: offers(problem, preset("avx512")).choices[0].claims for problem in (sums, plain, scaled_columns, blocks)}
    assert claims[sums].accumulate == claims[sums].partials == claims[sums].epilogue_input == torch.int32
    fused = dataclasses.replace(sums, epilogue=trace(torch.relu, torch.float32, ()), out=Layout.contiguous((16, 64), torch.float32))
    assert offers(fused, preset("avx512")).choices[0].claims.epilogue_input == torch.float32
    assert claims[plain].weights is None
    assert claims[scaled_columns].weights == torch.bfloat16
    assert offers(scaled_columns, preset("avx2")).choices[0].claims.weights == torch.float32
    assert claims[blocks].weights is None
    assert claims[blocks].accumulate == torch.float32


@pytest.mark.parametrize(
    ("changes", "problem", "reason"),
    [
        (
            {"direct": True},
            Problem.int_mm(64, 64, 64, layout="nn", device_type="cpu"),
            "int8 b is read in place only by dot products",
        ),
        (
            {},
            dataclasses.replace(Problem.int_mm(64, 64, 64, device_type="cpu"), prepacked=True),
            "a prepacked b of int8 can only be read in place",
        ),
        (
            {"mode": "dots"},
            Problem.mixed_mm(400, 3, 64, encoding="int4", layout="nn", device_type="cpu"),
            "dot products need 4-bit weights on the right",
        ),
        ({"mode": "dots"}, Problem.int_mm(4, 64, 64, layout="nn", device_type="cpu"), "dot products need b with stride 1 along K"),
        ({}, Problem.int_mm(1 << 16, 64, 1 << 14, device_type="cpu"), "a packed copy of a takes 1073741824 bytes"),
    ],
)
def test_refusal(changes: dict, problem: Problem, reason: str) -> None:
    assert reason in (refusal(dataclasses.replace(BASE, **changes), problem, preset("avx512")) or "")


def test_a_gpu_problem_is_refused() -> None:
    problem = dataclasses.replace(problems(8, 64, 64)[0], device_type="cuda")
    assert "the problem is on cuda" in offers(problem, preset("avx512")).refusals[0].reason


def test_few_rows_of_a_linear_layer_get_dot_products_first() -> None:
    for problem in (problems(1, 4096, 4096)[0], problems(1, 4096, 4096)[4]):
        assert configs(problem, preset("avx512"), "quick")[0].mode == "dots"
        assert configs(dataclasses.replace(problem, prepacked=True), preset("avx512"), "quick")[0].direct


def test_scale_words_are_shifts_and_strides() -> None:
    found = scale_words(Problem.mixed_mm(8, 96, 256, encoding="int4", scales="group_64", zeros=True, device_type="cpu"))
    assert [dataclasses.astuple(x) for x in found] == [(0, 6, 1, 96)] * 2
    (column,) = scale_words(Problem.mixed_mm(8, 96, 256, scales="column", device_type="cpu"))
    assert dataclasses.astuple(column) == (0, EVERYTHING, 1, 96)
    (one,) = scale_words(Problem.mixed_mm(8, 96, 256, scales="tensor", device_type="cpu"))
    assert dataclasses.astuple(one) == (EVERYTHING, EVERYTHING, 0, 0)
    left, right = scale_words(Problem.scaled_mm(200, 300, 400, scales="block_128x128", device_type="cpu"))
    assert dataclasses.astuple(left) == (0, 7, 4, 1)
    assert dataclasses.astuple(right) == (7, 7, 1, 3)


def test_sides_know_their_scales() -> None:
    problem = Problem.mixed_mm(8, 96, 256, dtype=torch.float16, encoding="int4", scales="group_64", zeros=True, device_type="cpu")
    left, right = sides(problem, swapped=False)
    assert (left.dtype, left.encoding, left.scale, left.zero) == (torch.float16, "", None, None)
    assert (right.dtype, right.encoding, right.scale, right.zero) == (torch.uint8, "int4", 0, 1)
    assert sides(problem, swapped=True) == (right, left)
    left, right = sides(Problem.scaled_mm(8, 96, 256, device_type="cpu"), swapped=False)
    assert (left.scale, right.scale) == (0, 1)


def test_plan_counts_steps_and_numbers() -> None:
    plan = make_plan(Problem.int_mm(8, 64, 130, device_type="cpu"), BASE, "avx512", vnni=True)
    assert list(plan.words)[:5] == [1, 8, 64, 33, 130]
    packed = Problem.mixed_mm(8, 64, 130, encoding="int4", layout="nn", device_type="cpu")
    odd = dataclasses.replace(BASE, kc=33)
    kc = 19  # after five sizes, strides of a, b, out and inp (3, 4, 3 and 3), and the rows of a panel
    assert make_plan(packed, odd, "avx512").words[kc] == 34  # a byte has two steps
    assert make_plan(packed, dataclasses.replace(odd, mode="dots"), "avx512").words[kc] == 64


def test_sources_have_no_unrendered_text() -> None:
    for problem in problems(16, 64, 128):
        for arch in ARCHS:
            text = offers(problem, preset(arch)).choices[0].source.text
            assert "{%" not in text
            assert "{{ " not in text
            assert "gemmtune_gemm" in text
