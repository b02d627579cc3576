"""Precision flags of torch hold in the process of an untrusted GEMM, and are not held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemmtune.declaration.subject import Subject, SubjectSpec, wrapped
from gemmtune.declaration.traits import Traits
from gemmtune.problem import Precision, Problem
from gemmtune.problem.flags import precision_scope
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.conduct import Conduct
from gemmtune.untrusted.target import Target

FUNCTIONS = """
import torch

def first(flag):
    return float(flag[0] if isinstance(flag, tuple) else flag)

def flags(a, b):
    matmul = torch.backends.cuda.matmul
    bf16, fp16 = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return torch.tensor([first(bf16), first(fp16), float(matmul.allow_tf32)])

def own_flag(a, b):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bool(a[0, 0] > 0)
    return flags(a, b)
"""
STRICT = {
    dtype: Problem.mm(8, 8, 8, dtype=dtype, device_type="cuda", precision=Precision()) for dtype in (torch.float16, torch.bfloat16)
}
TF32 = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(FUNCTIONS)
    return str(path)


def foreign(**declared: object) -> Subject:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    return wrapped(SubjectSpec(target="x:matmul", declared=declared), matmul)


@pytest.mark.parametrize("dtype", STRICT, ids=str)
def test_a_foreign_gemm_is_called_under_the_flags_of_its_problem(dtype: torch.dtype) -> None:
    """Otherwise cuBLAS rounds partial sums to 16 bits, and a GEMM that calls torch seems to be wrong."""
    name = f"allow_{'fp16' if dtype == torch.float16 else 'bf16'}_reduced_precision_reduction"
    before = getattr(torch.backends.cuda.matmul, name)
    with foreign().conditions(STRICT[dtype]):
        inside = getattr(torch.backends.cuda.matmul, name)
    assert (inside[0] if isinstance(inside, tuple) else inside) is False
    assert getattr(torch.backends.cuda.matmul, name) == before


def test_flags_reach_the_process_and_its_own_changes_show(file: str) -> None:
    x = torch.ones(2, 2)
    candidate = Candidate(Target(kind="file", path=file, name="flags"))
    assert candidate.call("", (x, x), {}).tolist() == [1, 1, 0]
    with precision_scope(STRICT[torch.bfloat16]), precision_scope(TF32):
        assert candidate.call("", (x, x), {}).tolist() == [0, 1, 1]
    assert candidate.call("", (x, x), {}).tolist() == [1, 1, 0]
    candidate.settle()
    assert candidate.findings == ()
    candidate.close()

    candidate = Candidate(Target(kind="file", path=file, name="own_flag"))
    assert candidate.call("", (-x, x), {}).tolist() == [0, 1, 0]
    with precision_scope(TF32):
        candidate.call("", (x, x), {})
    candidate.settle()
    [finding] = candidate.findings
    assert finding.kind is Conduct.SETTINGS
    assert "allow_bf16_reduced_precision_reduction" in finding.detail
    candidate.close()


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_torchs_partial_sums_are_claimed_where_its_flags_allow_them(declared: bool, reduced: bool) -> None:
    problem = Problem.mm(8, 8, 8, dtype=torch.bfloat16, device_type="cuda", precision=Precision(reduced_partials=reduced))
    claims = Traits(calls_torch=declared).claims(problem)
    assert claims.partials is (torch.bfloat16 if declared and reduced else torch.float32)
    assert claims.splits == (16 if declared and reduced else 1)
    assert Traits(calls_torch=declared, partials={"bfloat16": "float32"}).claims(problem).partials is torch.float32
