"""Properties of strides, addresses and batches of a and b, on right and on broken GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_gemms import (
    CPU,
    assert_conforms,
    assert_found,
    cases_of,
    failed,
    subject_of,
    texts,
    torch_subject,
)

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.layouts import KINDS, OperandLayout

Product = Callable[..., torch.Tensor]


@pytest.mark.parametrize("name", ["layouts", "alignment", "relayout", "batch"])
def test_torch_conforms(name: str) -> None:
    assert_conforms(name, torch_subject(), every=2)


@pytest.mark.parametrize("name", ["layouts", "alignment", "relayout"])
def test_a_plain_function_conforms(name: str) -> None:
    assert_conforms(name, subject_of(lambda a, b: a @ b), every=2)


def test_level_full_has_every_kind_of_strides_for_a_and_for_b() -> None:
    cases = cases_of("layouts", torch_subject(), Level.FULL)
    for operand in ("a", "b"):
        kinds = frozenset[str]().union(*(OperandLayout.parse(getattr(case, operand)).kinds for case in cases))
        assert kinds == set(KINDS)
        padded = {OperandLayout.parse(getattr(case, operand)).pad for case in cases}
        assert padded >= {1, 4, 8, 17}
        assert {OperandLayout.parse(getattr(case, operand)).offset for case in cases} >= set(range(9))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_misalignment_below_16_bytes_occurs(dtype: str) -> None:
    op = "int_mm" if dtype == "int8" else "mm"
    subject = subject_of(torch.matmul, ops=(op,), dtypes=(dtype,))
    offsets = {OperandLayout.parse(case.a).offset for case in cases_of("alignment", subject, Level.FULL)}
    assert offsets == set(range(16 // {"float32": 4, "float16": 2, "int8": 1}[dtype]))


def test_undeclared_strides_are_left_out() -> None:
    subject = subject_of(torch.matmul, layouts=("row", "col"))
    assert {case.a for case in cases_of("layouts", subject, Level.FULL)} == {"row", "col"}
    with pytest.raises(AssertionError, match="neither bmm nor baddbmm is tested"):
        cases_of("batch", subject)


def strides_ignored(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.as_strided(a.shape, (a.shape[1], 1)) @ b


def offset_ignored(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    shift = b.data_ptr() % 16 // b.element_size()
    return a @ b.as_strided(b.shape, b.stride(), b.storage_offset() - shift)


def padding_as_data(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.as_strided(b.shape, (b.shape[1], 1)) if b.stride(1) == 1 and b.stride(0) > 1 else a @ b


def long_padded_rows_cut(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = 512 if a.stride(0) > a.shape[1] else a.shape[1]
    return a[:, :k] @ b[:k]


def repeated_rows_as_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b / 2 if 0 in b.stride() else a @ b


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("name", "function", "case"),
    [
        ("layouts", strides_ignored, "a.col"),
        ("layouts", padding_as_data, "b.row+1"),
        ("layouts", repeated_rows_as_one, "b.rows0"),
        ("layouts", offset_ignored, "@1"),
        ("layouts", long_padded_rows_cut, "x1040-a.row+"),
        ("alignment", offset_ignored, "@1"),
    ],
)
def test_broken_reading(name: str, function: Product, case: str) -> None:
    bad = failed(subject_of(function), cases_of(name, subject_of(function))[:40])
    assert any(case in outcome.case.id for outcome in bad), texts(bad)
    assert all(failure.property_name == name for outcome in bad for failure in outcome.failures)


def remembered_strides() -> Product:
    """Return a product that uses the strides of a shape's first call for all later ones."""
    plans: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = plans.setdefault((a.shape, b.shape, a.dtype), (a.stride(), b.stride()))
        return a.as_strided(a.shape, x) @ b.as_strided(b.shape, y)

    return product


def remembered_dtype() -> Product:
    plans: dict[Any, torch.dtype] = {}

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        narrow = plans.setdefault((a.shape, b.shape, a.stride(), b.stride()), a.dtype)
        return (a.to(narrow) @ b.to(narrow)).to(a.dtype)

    return product


def test_a_choice_cached_for_other_strides_is_found() -> None:
    assert_found("relayout: call 2 of 5, float32 a ", "relayout", subject_of(remembered_strides(), dtypes=("float32",)))


def test_a_choice_cached_for_another_dtype_is_found() -> None:
    subject = subject_of(remembered_dtype(), dtypes=("float32", "float64"))
    case = Case(property_name="relayout", m=64, n=64, k=64, a="col", b="col", variant="float64", seed=3)
    assert judge(subject, case, CPU).status is CaseStatus.FAILED
    assert "relayout: call 5 of 7, float64 a row b row" in texts([judge(subject_of(remembered_dtype()), case, CPU)])


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a[:1] @ b[:1]).expand(a.shape[0], -1, -1).clone(),
        lambda a, b: a @ b[:1],
        lambda a, b: torch.cat([a[:16] @ b[:16], a.new_zeros(max(0, len(a) - 16), a.shape[1], b.shape[2])]),
    ],
    ids=["first for all", "first of b for all", "at most 16"],
)
def test_broken_batches(function: Product) -> None:
    assert_found("batch: P5 cancellation: out[", "batch", subject_of(function, ops=("bmm",)))


def test_level_full_has_a_batch_of_more_blocks_than_a_grid_has() -> None:
    assert any(case.batch > 65535 for case in cases_of("batch", torch_subject(), Level.FULL))
