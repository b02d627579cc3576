"""Kernels that rewrite one operand, by Triton's interpreter: the numbers that torch's calls give."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from processes import Run

import gemmtune
from gemmtune.passes import load
from gemmtune.passes.dequantize import dequantize
from gemmtune.problem.compositions import dequantized
from gemmtune.problem.grouped_compositions import widened
from gemmtune.problem.scales import BLOCKS_OF_WEIGHTS, block_of
from gemmtune.quantized.products import rows_in_float8

pytest.importorskip("triton")

KINDS, SCALES = ("int8", "uint8", "int4", "uint4"), ("tensor", "column", "group_32")
FLOATS = (torch.float16, torch.float32)
"""Dtypes of the result. The interpreter rounds bfloat16 wrongly."""


def wrong_kinds() -> list[object]:
    """Return the kinds of weights whose bits differ. Runs where Triton interprets."""
    wrong: list[object] = []
    with mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        for number, case in enumerate(itertools.product(KINDS, SCALES, FLOATS, (True, False))):
            kind, scales, dtype, rows_first = case
            weight = (torch.randn(72, 40) if rows_first else torch.randn(40, 72).t()).to(dtype)
            made = gemmtune.QuantizedWeight.quantize(weight, kind, scales=scales, scale_dtype=FLOATS[number % 2])
            parts = (made.scales, made.zero_points if made.zero_points is not None else made.scales)
            blocks = tuple(block_of(tuple(x.shape), (72, 40), BLOCKS_OF_WEIGHTS) for x in parts)
            got = dequantize(made.tensor, made.scales, made.zero_points, made.encoding, dtype, blocks)
            expected = dequantized(made.tensor, made.scales, made.zero_points, made.encoding, dtype)
            wrong += [] if torch.equal(got, expected) else [case]
        for kind in ("int8", "int4"):
            made = gemmtune.QuantizedWeight.quantize(torch.randn(3, 64, 24), kind, scales="group_32")
            got = dequantize(made.tensor, made.scales, None, made.encoding, torch.float16, ((32, 1), (32, 1)))
            wrong += [] if torch.equal(got, widened(made.tensor, made.scales, made.encoding, torch.float16)) else [kind]
    return wrong


def test_every_kind_has_torchs_bits(interpreted: Run) -> None:
    assert interpreted(wrong_kinds) == []


def wrong_rows() -> list[object]:
    """Return the cases in which rounded rows differ from torch's. The interpreter halves a few 8-bit floats, and knows no NaN."""
    wrong: list[object] = []
    with mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        for dtype, (m, k, block) in itertools.product(
            FLOATS, ((3, 70, 70), (2, 300, 128), (1, 256, 128), (2, 5000, 5000), (2, 9, 1))
        ):
            a = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(k)).to(dtype)[:, :k]
            a[0, 3], a[0, k - 1], a[-1, 0] = 0.0, float("nan"), a[-1].abs().max() * 2
            numbers, scales = load("float8_rows").round_rows(a, block)
            expected, known = rows_in_float8(a, block)
            exact = torch.equal(scales.nan_to_num(-1.0), known.nan_to_num(-1.0))
            close = torch.where(expected.isnan(), 0.0, numbers.float()).allclose(
                expected.float().nan_to_num(), rtol=0.5, atol=2**-6
            )
            wrong += [] if exact and close and numbers.stride() == (k, 1) else [(dtype, m, k, block)]
    return wrong


def test_rows_are_rounded_as_torch_rounds_them(interpreted: Run) -> None:
    assert interpreted(wrong_rows) == []


SERVED = {"__class__": torch.Tensor, "is_cuda": True, "dtype": torch.float16, "size": 1, "strides": (7, 1), "capability": (8, 9)}
NOT_SERVED = (
    {"__class__": torch.nn.Parameter}, {"is_cuda": False}, {"dtype": torch.float64}, {"size": 0}, {"strides": (1, 7)},
    {"capability": (8, 6)}, {"hip": "6.3"},
)  # fmt: skip


@pytest.mark.parametrize("other", [{}, {"capability": (9, 0)}, {"dtype": torch.float32}, *NOT_SERVED], ids=str)
def test_rows_are_rounded_by_a_kernel_where_it_is_legal(other: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = SERVED | other
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: facts["capability"])
    monkeypatch.setattr(torch.version, "hip", facts.get("hip"))
    words = {"is_cuda": facts["is_cuda"], "dtype": facts["dtype"], "numel": lambda: facts["size"]}
    a = type("Fake", (SimpleNamespace,), {"__class__": facts["__class__"]})(
        **words, device="cuda:0", stride=facts["strides"].__getitem__
    )
    assert load("float8_rows").serves(a) == (other not in NOT_SERVED)
