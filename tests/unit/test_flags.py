"""set_precision and precision_scope: the flags of torch that a Problem recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemmtune.problem import Precision, Problem, precision_of
from gemmtune.problem.flags import precision_scope, set_precision


@pytest.fixture
def _flags() -> Iterator[None]:
    matmul, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = (
        matmul.fp32_precision,
        cpu.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    yield
    matmul.fp32_precision, cpu.fp32_precision = before[:2]
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before[2:]


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_set_precision_of_16_bit_types(dtype: torch.dtype) -> None:
    name = f"allow_{'fp16' if dtype == torch.float16 else 'bf16'}_reduced_precision_reduction"
    for reduced in (False, True, False):
        set_precision(Problem.mm(8, 8, 8, dtype=dtype, device_type="cuda", precision=Precision(reduced_partials=reduced)))
        assert getattr(torch.backends.cuda.matmul, name) is reduced


@pytest.mark.usefixtures("_flags")
def test_set_precision_of_float32() -> None:
    matmul = torch.backends.cuda.matmul
    for mode in ("tf32", "ieee"):
        set_precision(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode=mode)))  # type: ignore[arg-type]
        assert matmul.fp32_precision == mode
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    set_precision(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"))
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_flags")
def test_precision_scope_restores_the_flags() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"
    tf32 = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))
    with precision_scope(tf32):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == "ieee"
    interrupted = pytest.raises(KeyError)
    with interrupted, precision_scope(tf32):
        raise KeyError
    assert matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
def test_set_flags_equal_recorded_flags(dtype: torch.dtype, reduced: bool) -> None:
    problem = Problem.mm(8, 8, 8, dtype=dtype, device_type="cuda", precision=precision_of(dtype, "cuda"))
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    set_precision(problem)
    assert precision_of(dtype, "cuda") == problem.precision


@pytest.mark.usefixtures("_flags")
def test_the_cpu_flag_changes_only_for_float32_and_only_if_it_differs() -> None:
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    cpu.fp32_precision = "bf16"
    set_precision(Problem.mm(8, 8, 8, dtype=torch.float16, device_type="cpu"))
    assert cpu.fp32_precision == "bf16"
    cpu.fp32_precision = "none"
    set_precision(Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu"))
    assert cpu.fp32_precision == "none"


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_flag_that_comes_with_another_is_read_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        fp32_precision = "ieee"

    setattr(Matmul, f"allow_{name}_reduced_precision_reduction", (True, False))
    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    assert precision_of(torch.float16 if name == "fp16" else torch.bfloat16, "cuda").reduced_partials
