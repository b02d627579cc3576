"""The table of torch's products against torch's own schemas, and the translation of calls."""

from __future__ import annotations

import pytest
import torch

from gemmtune.operators.torch_products import (
    BY_FUNCTION,
    BY_NAME,
    RECIPE,
    TORCH_ONLY,
    TORCH_PRODUCTS,
    Statement,
    positional_order,
    torch_product,
)
from gemmtune.operators.torch_products import with_dimensions as shaped
from gemmtune.problem.operations import OPERATIONS, ROLES

A, B, C = torch.zeros(4, 8), torch.zeros(8, 6), torch.zeros(6)
ENDS = torch.zeros(3, dtype=torch.int32)
SCALES = torch.zeros(4), torch.zeros(3, 6)


@pytest.mark.parametrize("row", TORCH_PRODUCTS, ids=lambda row: row.name)
def test_arguments_are_those_of_the_schema_in_its_order(row):
    if row.overload is None:
        pytest.skip(f"this torch has no {row.name}")
    assert [x.name for x in row.overload._schema.arguments] == list(row.arguments)
    assert [x.name for x in row.overload._schema.arguments if x.kwarg_only] == [x for x in row.arguments if x in ("beta", "alpha")]
    assert torch_product(row.overload) is row
    assert bool(row.overload._schema.is_mutable) == row.in_place


@pytest.mark.parametrize("row", TORCH_PRODUCTS, ids=lambda row: row.name)
def test_meanings_are_fields_of_our_operation(row):
    operation = OPERATIONS["addmm" if row.composite else row.op]
    known = {*(x.role for x in operation.operands), *operation.scalars, *operation.options}
    assert set(row.arguments.values()) <= known | {"bias", "out_dtype", RECIPE, TORCH_ONLY}
    assert {x.role for x in operation.operands if x.required} <= {*row.arguments.values(), *(["inp"] if row.composite else [])}


def test_a_call_is_stated_by_role_whatever_the_form_of_its_arguments():
    row = BY_NAME["aten::addmm"]
    for args, kwargs in (
        ((C, A, B), {"alpha": 2}),
        ((C,), {"mat1": A, "mat2": B, "alpha": 2}),
        ((), {"input": C, "mat1": A, "mat2": B, "alpha": 2}),
    ):
        found = row.stated(args, kwargs)
        assert isinstance(found, Statement)
        assert list(found.operands) == [role for role in ROLES if role in found.operands] == ["a", "b", "inp"]
        assert [found.operands[x] is y for x, y in (("a", A), ("b", B), ("inp", C))] == [True] * 3
        assert (found.op, found.numbers, found.bias, found.out_dtype) == ("addmm", {"alpha": 2}, None, None)


def test_a_composite_operator_is_a_sum_if_it_gets_a_bias():
    row = BY_FUNCTION[torch.nn.functional.linear]
    assert [row.stated((A, B.t(), bias), {}).op for bias in (None, C)] == ["mm", "addmm"]


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("mm", [None, (0, 1), None]),
        ("addmm", [None, None, (1, 2, 0), None]),
        ("linear", [None, (0, 1), (0, 1, 2), None]),
        ("_scaled_mm", [None, None, None, (0, 1, 2, 3), None]),
        ("_grouped_mm", [None, None, (0, 1, 2), None]),
    ],
)
def test_positional_operands_have_an_order_if_they_are_all_there_and_nothing_else_is(name, orders):
    row = BY_NAME[f"aten::{name}"]
    assert [positional_order(row, count) for count in range(1, len(orders) + 1)] == orders


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "reason"),
    [
        ("mm", (A, B), {"out": C}, "out"),
        ("mm", (A, B, torch.float32), {}, "argument 3"),
        ("mm", (A, B), {"out_dtype": torch.float32}, "out_dtype"),
        ("mm", (A,), {}, "without one of its operands"),
        ("addmm", (1, C, A, B), {}, "argument 4"),
        ("_grouped_mm", (A, B, ENDS), {"bias": C}, "bias"),
        ("_scaled_mm", (A, B, C, C), {"scale_result": C}, "scale_result"),
        ("_scaled_grouped_mm", (A, B, *SCALES), {}, "other forms"),
        ("_scaled_grouped_mm", (A, B, *SCALES, ENDS), {}, "other forms"),
        ("_scaled_grouped_mm_v2", (A, B[None], [C], [0], [], [C], [1], [], ENDS), {}, "recipe_a"),
        ("_scaled_grouped_mm_v2", (A, B[None], [C], [1], [], [C, C], [1, 1], [], ENDS), {}, "scale_b"),
        ("_scaled_grouped_mm_v2", (A, B[None], [C], [1], [1], [C], [1], [], ENDS), {}, "swizzle_a"),
    ],
)
def test_a_call_that_our_operation_cannot_replace_says_why(name, args, kwargs, reason):
    found = BY_NAME[f"aten::{name}"].stated(args, kwargs)
    assert isinstance(found, str)
    assert found.startswith("torch alone has ")
    assert reason in found


def test_both_scaled_grouped_products_state_the_same_call():
    a, b = (x.to(torch.float8_e4m3fn) for x in (A, B[None].expand(3, 8, 6)))
    old = BY_NAME["aten::_scaled_grouped_mm"].stated((a, b, *SCALES, ENDS), {"use_fast_accum": True})
    scale_a, scale_b = SCALES
    new = BY_NAME["aten::_scaled_grouped_mm_v2"].stated(
        (a, b, [scale_a], [1], [], [scale_b], [1], [], ENDS, None, None, [], True), {}
    )
    for found in (old, new):
        assert isinstance(found, Statement)
        assert (found.op, found.numbers) == ("scaled_grouped_mm", {"fast_accum": True})
        shapes = {role: tuple(shaped(found.op, role, x).shape) for role, x in found.operands.items()}
        assert shapes == {"a": (4, 8), "b": (3, 8, 6), "scale_a": (4, 1), "scale_b": (3, 1, 6), "offs": (3,)}
