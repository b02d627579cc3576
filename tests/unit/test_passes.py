"""Dequantization in one pass by Triton's interpreter, bit for bit what torch's calls give."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from processes import Run

import gemmtune
from gemmtune.passes.dequantize import dequantize
from gemmtune.problem.compositions import dequantized
from gemmtune.problem.grouped_compositions import widened
from gemmtune.problem.scales import BLOCKS_OF_WEIGHTS, block_of

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
