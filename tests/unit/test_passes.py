"""Dequantization in one pass by Triton's interpreter, bit for bit what torch's calls give."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import contextlib, itertools, torch, gemmtune
from gemmtune.passes.dequantize import dequantize
from gemmtune.problem.compositions import dequantized
from gemmtune.problem.grouped_compositions import widened
from gemmtune.problem.scales import BLOCKS_OF_WEIGHTS, block_of

torch.cuda.device = lambda device: contextlib.nullcontext()
floats = (torch.float16, torch.float32)  # bfloat16 is wrong in the interpreter
done = 0
kinds, blocks = ("int8", "uint8", "int4", "uint4"), ("tensor", "column", "group_32")
for kind, scales, dtype, rows_first in itertools.product(kinds, blocks, floats, (True, False)):
    weight = (torch.randn(72, 40) if rows_first else torch.randn(40, 72).t()).to(dtype)
    made = gemmtune.QuantizedWeight.quantize(weight, kind, scales=scales, scale_dtype=floats[done % 2])
    parts = (made.scales, made.zero_points if made.zero_points is not None else made.scales)
    blocks = tuple(block_of(tuple(x.shape), (72, 40), BLOCKS_OF_WEIGHTS) for x in parts)
    got = dequantize(made.tensor, made.scales, made.zero_points, made.encoding, dtype, blocks)
    expected = dequantized(made.tensor, made.scales, made.zero_points, made.encoding, dtype)
    assert torch.equal(got, expected), (kind, scales, dtype, rows_first)
    done += 1
for kind in ("int8", "int4"):
    made = gemmtune.QuantizedWeight.quantize(torch.randn(3, 64, 24), kind, scales="group_32")
    got = dequantize(made.tensor, made.scales, None, made.encoding, torch.float16, ((32, 1), (32, 1)))
    assert torch.equal(got, widened(made.tensor, made.scales, made.encoding, torch.float16)), kind
    done += 1
print(done)
"""


def test_every_kind_has_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["50"]
