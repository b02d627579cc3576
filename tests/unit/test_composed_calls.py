"""Calls that torch's own operations do obey the rules of shapes and options too: torch broadcasts, and knows no groups."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError
from gemmtune.ops import grouped

A, B = torch.randn(8, 128), torch.randn(3, 128, 16)
INT8 = torch.ones(128, 16, dtype=torch.int8)
OFFS = torch.tensor([3, 3, 8], dtype=torch.int32)
ROW, COLUMN, ONE = torch.randn(1, 128), torch.randn(128, 1), torch.ones(1)


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(tune="never"):
        yield


DENSE = {
    "one row of c": (lambda a: gemmtune.mm_plus_mm(a, B[0], ROW, B[1]), "shapes do not fit"),
    "one column of d": (lambda a: gemmtune.mm_plus_mm(a, B[0], a, COLUMN), "shapes do not fit"),
    "added batch": (lambda a: gemmtune.addmm(torch.ones(3, 8, 16), a, B[0]), "inp: got an operand of shape"),
    "operand of the epilogue": (
        lambda a: gemmtune.mm(a, B[0], epilogue=torch.add, epilogue_args=(torch.ones(3, 8, 16),)),
        "got an operand of shape",
    ),
    "zero point alone": (lambda a: gemmtune.mixed_mm(a, INT8, zero_b=ONE), "zero_b without scale_b"),
    "encoding": (lambda a: gemmtune.mixed_mm(a, INT8, scale_b=ONE, encoding="int5"), "encoding: got 'int5'"),
}
"""By name: a call that does not fit, and words of its error."""
GROUPED = {
    "fewer offsets": (lambda a, b: gemmtune.grouped_mm(a, b, OFFS[:2]), "shapes do not fit"),
    "wide offsets": (lambda a, b: gemmtune.grouped_mm(a, b, OFFS.long()), "dtype of offs"),
    "terms": (lambda a, b: gemmtune.grouped_mm(a[:, :64], b, OFFS), "grouped_mm: shapes do not fit, got a [8, 64]"),
    "gate": (lambda a, b: gemmtune.grouped_mm(a, b, OFFS, gated="relu"), "gated: got 'relu'"),
    "odd gates": (lambda a, b: gemmtune.grouped_mm(a, b[:, :, :15], OFFS, gated="silu"), "an even number of columns"),
    "rows": (lambda a, b: gemmtune.grouped_mm(a, b, OFFS, rows=torch.zeros(8, 1, dtype=torch.long)), "rows must be a 1-D"),
    "slots": (lambda a, b: gemmtune.grouped_mm(a, b, OFFS, scatter=(torch.arange(7), torch.ones(4, 2))), "shapes do not fit"),
    "epilogue": (
        lambda a, b: gemmtune.grouped_mm(a, b, OFFS, epilogue=torch.add, epilogue_args=(torch.ones(3, 8, 16),)),
        "got an operand of shape",
    ),
}


def refused(call, words):
    with pytest.raises(InvalidProblemError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(("call", "words"), DENSE.values(), ids=DENSE)
def test_forward_mode_refuses_what_a_plain_call_refuses(call, words):
    refused(lambda: call(A), words)
    refused(lambda: torch.func.jvp(call, (A,), (A,)), words)


@pytest.mark.parametrize(("call", "words"), GROUPED.values(), ids=GROUPED)
def test_groups_are_checked_whoever_multiplies(call, words):
    """Plain operands, with a gradient, in forward mode, quantized, and quantized with a gradient."""
    quantized = QuantizedWeight.quantize(B, "int8")
    graded = A.clone().requires_grad_()
    refused(lambda: call(A, B), words)
    refused(lambda: call(graded, B), words)
    refused(lambda: torch.func.jvp(lambda a: call(a, B), (A,), (A,)), words)
    refused(lambda: call(A, quantized), words)
    refused(lambda: call(graded, quantized), words)


def test_groups_that_fit_are_checked_once(monkeypatch):
    quantized, checked = QuantizedWeight.quantize(B, "int8"), []
    monkeypatch.setattr(grouped, "_fitting", set())
    monkeypatch.setattr(grouped, "check_composed", checked.append)
    for rows in (8, 8, 7, 8):
        gemmtune.grouped_mm(A[:rows], quantized, OFFS.clamp(max=rows))
    assert len(checked) == 2, "a check for each number of rows"


def test_complex_shapes_are_checked():
    a, b = A.to(torch.complex64), B.to(torch.complex64)
    refused(lambda: gemmtune.mm_plus_mm(a, b[0], a[:1], b[1]), "shapes do not fit")
    assert torch.equal(gemmtune.mm_plus_mm(a, b[0], a, b[1]), torch.addmm(torch.mm(a, b[1]), a, b[0]))


def test_a_traced_epilogue_keeps_the_shape():
    """An operator that torch's modes see does the product, and torch the epilogue."""
    with FakeTensorMode():
        a, b, wide = torch.empty(8, 4), torch.empty(4, 16), torch.empty(3, 8, 16)
        assert gemmtune.mm(a, b, epilogue=torch.add, epilogue_args=(wide[0],)).shape == (8, 16)
        refused(lambda: gemmtune.mm(a, b, epilogue=torch.add, epilogue_args=(wide,)), "got a result of shape [3, 8, 16]")
