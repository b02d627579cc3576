"""Dequantization in one pass on a GPU: bit for bit what torch's own calls give, and where torch has to do it."""

from __future__ import annotations

import itertools

import pytest
import torch

import gemmtune
from gemmtune.passes import dequantize, unwatched
from gemmtune.problem import compositions, grouped_compositions

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {
    "int8": ("tensor", "column", "group_32", "group_128"),
    "uint8": ("column", "group_64"),
    "int4": ("tensor", "column", "group_32", "group_128"),
    "uint4": ("column", "group_64"),
    "float8_e4m3fn": ("tensor", "column", "block_128x128"),
    "float8_e5m2": ("column",),
}


def by_torch(monkeypatch: pytest.MonkeyPatch, weight: gemmtune.QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    with monkeypatch.context() as patch:
        for module in (compositions, grouped_compositions):
            patch.setattr(module, "unwatched", lambda *tensors: False)
        return weight.dequantize().to(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.nan_to_num(nan=1e30), y.nan_to_num(nan=1e30))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    inner = dequantize.dequantize
    monkeypatch.setattr(dequantize, "dequantize", lambda *args: (calls.append(1), inner(*args))[1])
    return calls


def test_every_kind_block_and_order_has_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    cases = 0
    for kind, blocks in KINDS.items():
        for scales, dtype, scale_dtype, rows_first in itertools.product(blocks, FLOATS, (None, torch.float32), (True, False)):
            weight = torch.randn((160, 264) if rows_first else (264, 160), device="cuda", dtype=dtype) * 3
            weight = weight if rows_first else weight.t()
            made = gemmtune.QuantizedWeight.quantize(weight, kind, scales=scales, scale_dtype=scale_dtype)
            assert same_bits(made.dequantize(), by_torch(monkeypatch, made, dtype)), (kind, scales, dtype, scale_dtype, rows_first)
            cases += 1
    assert len(calls) == cases


def test_experts_have_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    for kind, scales in (("int8", "column"), ("int8", "group_32"), ("int4", "group_64"), ("float8_e4m3fn", "column")):
        made = gemmtune.QuantizedWeight.quantize(torch.randn(5, 128, 72, device="cuda", dtype=torch.bfloat16), kind, scales=scales)
        assert same_bits(made.dequantize(), by_torch(monkeypatch, made, torch.bfloat16)), (kind, scales)
    assert calls


def test_a_large_weight_and_its_last_row_are_whole() -> None:
    numbers = torch.randint(-128, 128, (2**15 + 1, 2**16 + 3), device="cuda", dtype=torch.int8)  # more than 2**31 elements
    scale = torch.ones(1, device="cuda", dtype=torch.float16)
    got = dequantize.dequantize(numbers, scale, None, "", torch.float16, ((1, 1), (1, 1)))
    assert torch.equal(got[-1].to(torch.int8), numbers[-1])
    assert torch.equal(got[:, -1].to(torch.int8), numbers[:, -1])


def test_torch_does_it_where_something_watches() -> None:
    x = torch.ones(4, 4, device="cuda")
    assert unwatched(x, None)
    watched = x.clone().requires_grad_()
    assert not unwatched(watched)
    with torch.no_grad():
        assert unwatched(watched)
    assert not unwatched(x.cpu())
    assert not unwatched(gemmtune.QuantizedWeight.quantize(x))
    seen: list[bool] = []
    torch.vmap(lambda row: (seen.append(unwatched(row)), row)[1])(x)
    assert seen == [False]


def test_gradients_flow_through_scales() -> None:
    a = torch.randn(8, 64, device="cuda")
    scale = torch.rand(1, 32, device="cuda", requires_grad=True)
    numbers = torch.randint(-8, 8, (64, 32), device="cuda", dtype=torch.int8)
    compositions.mixed_composed(a, numbers, scale, None).sum().backward()
    assert torch.allclose(scale.grad, (a @ numbers.float()).sum(0, keepdim=True), rtol=1e-4, atol=1e-3)
