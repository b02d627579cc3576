"""mm_plus_mm as a Problem: sizes, messages, keys, text, command-line options, and backends that refuse it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from gemmtune.backends.cpp.configs import unsupported
from gemmtune.backends.cublaslt.gemm import gemm_of
from gemmtune.backends.cutlass.configs import check_problem
from gemmtune.backends.table import BACKENDS, load
from gemmtune.cli import cli
from gemmtune.cli.spec import Spec
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.operations import OPERATIONS
from gemmtune.settings import Settings

PROBLEM = Problem.mm_plus_mm(64, 40, 32, 48, device_type="cpu")


def test_sizes_work_and_traffic_count_both_products() -> None:
    assert (PROBLEM.m, PROBLEM.n, PROBLEM.k, PROBLEM.k2) == (64, 40, 32, 48)
    assert (PROBLEM.summed, PROBLEM.terms) == ((32, 48), 80)
    assert PROBLEM.flops == 2 * 64 * 40 * 80
    assert PROBLEM.bytes == 2 * (64 * 80 + 80 * 40 + 64 * 40)
    assert [role for role, _ in PROBLEM.operands] == ["a", "b", "c", "d"]
    assert [layout for _, layout in PROBLEM.operands] == [PROBLEM.a, PROBLEM.b, PROBLEM.c, PROBLEM.d]
    assert Problem.mm_plus_mm(4, 5, 6, device_type="cpu").k2 == 6
    single = Problem.mm(4, 5, 6, device_type="cpu")
    assert (single.k2, single.summed, single.terms, len(single.operands)) == (0, (6,), 6, 2)


def test_text_has_both_sizes_and_the_layouts_of_c_and_d_if_different() -> None:
    assert str(PROBLEM) == "mm_plus_mm 64x40x(32+48) bfloat16 nt on cpu"
    other = Problem.mm_plus_mm(64, 40, 32, 48, layout="tn", device_type="cpu")
    assert str(dataclasses.replace(PROBLEM, c=other.c, d=other.d)) == "mm_plus_mm 64x40x(32+48) bfloat16 nt+tn on cpu"


def test_key_has_the_second_product_and_is_rebuilt() -> None:
    data = json.loads(PROBLEM.key)
    assert (data["k"], data["k2"]) == (32, 48)
    assert {"c", "d"} <= set(data)
    assert not {"scale_a", "encoding"} & set(data)
    assert Problem.from_json(data) == PROBLEM
    assert not {"c", "d", "k2"} & set(json.loads(Problem.mm(4, 5, 6, device_type="cpu").key))
    moved = dataclasses.replace(PROBLEM, d=dataclasses.replace(PROBLEM.d, offset=1))
    assert moved.key != PROBLEM.key


SUMS = [name for name, row in OPERATIONS.items() if row.second]
BAD = {
    "no d": ({"d": None}, "mm_plus_mm: d is missing, expected d [K2, N]"),
    "mm": ({"op": "mm"}, f"mm: takes no c, got shape [64, 48]; {' and '.join(SUMS)} {'do' if SUMS[1:] else 'does'}"),
    "shapes": (
        {"d": Layout.contiguous((32, 40), torch.bfloat16)},
        "mm_plus_mm: shapes do not fit, got a [64, 32], b [32, 40], c [64, 48] and d [32, 40]; "
        "expected a [M, K], b [K, N], c [M, K2] and d [K2, N]",
    ),
    "n of d": (
        {"d": Layout.contiguous((48, 41), torch.bfloat16)},
        "mm_plus_mm: shapes do not fit, got a [64, 32], b [32, 40], c [64, 48] and d [48, 41]; "
        "expected a [M, K], b [K, N], c [M, K2] and d [K2, N]",
    ),
    "m of c": (
        {"c": Layout.contiguous((63, 48), torch.bfloat16)},
        "mm_plus_mm: shapes do not fit, got a [64, 32], b [32, 40], c [63, 48] and d [48, 40]; "
        "expected a [M, K], b [K, N], c [M, K2] and d [K2, N]",
    ),
    "rank": ({"c": Layout.contiguous((48,), torch.bfloat16)}, "mm_plus_mm: c must be a 2-D tensor, got shape [48]"),
    "dtype": (
        {"c": Layout.contiguous((64, 48), torch.float16)},
        "mm_plus_mm: a and c must have the same dtype, got torch.bfloat16 and torch.float16; cast one of them",
    ),
    "inp": ({"inp": PROBLEM.out}, "mm_plus_mm: takes no inp, got shape [64, 40]; addmm, baddbmm and bsr_addmm do"),
    "alpha": (
        {"alpha": "general"},
        "mm_plus_mm: takes no alpha or beta, got alpha general and beta zero; give an epilogue that multiplies or adds",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_validation_errors_name_the_problem(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(InvalidProblemError) as caught:
        dataclasses.replace(PROBLEM, **changes)
    assert str(caught.value) == message


def test_options_make_the_problem() -> None:
    spec = Spec(op="mm_plus_mm", dtype="float16", k2=48)
    assert spec.problem((64, 40, 32), "test") == Problem.mm_plus_mm(64, 40, 32, 48, dtype=torch.float16, device_type="cpu")
    with pytest.raises(InvalidProblemError, match=r"k2: not for mm, expected .*mm_plus_mm"):
        Spec(op="mm", k2=48).problem((64, 40, 32), "test")


def test_choices_of_the_command_line_are_those_of_the_sum() -> None:
    words = ["choices", "64x64x32", "--op", "mm_plus_mm", "--k2", "48", "--arch", "sm90", "--backends", "aten,triton"]
    result = CliRunner().invoke(cli, [*words, "--json", "-"])
    assert result.exit_code == 0, result.output
    names = [choice["name"] for choice in json.loads(result.stdout)["choices"]]
    assert names[0] == "aten:mm_plus_mm"
    assert len(names) > 1
    assert all(name.startswith("triton:mm_plus_mm_") for name in names[1:])


def test_backends_with_one_product_refuse_it_with_the_reason() -> None:
    problem, device = Problem.mm_plus_mm(64, 64, 64, device_type="cuda"), preset("sm90")
    reason = "mm_plus_mm is not an operation of this backend, which has "
    assert check_problem(problem, device).startswith(reason)
    assert unsupported(PROBLEM).startswith(reason)
    with pytest.raises(InvalidProblemError, match=reason):
        gemm_of(problem)
    for backend in BACKENDS:
        for choice in load(backend).enumerate(problem, device, Settings()).choices:
            assert choice.name.partition(":")[2].startswith("mm_plus_mm"), choice.name


def test_a_product_without_terms_is_left_to_torch() -> None:
    offers = load("triton").enumerate(Problem.mm_plus_mm(64, 64, 64, 0, device_type="cuda"), preset("sm90"), Settings())
    assert [refusal.reason for refusal in offers.refusals] == ["one of the products has no terms: compute the other one with mm"]
