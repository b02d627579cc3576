"""Quantized weights of AWQ, GPTQ and torchao: read, written, and refused."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gemmtune import QuantizedWeight
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.formats import from_awq, from_gptq, from_torchao, to_awq, to_gptq, to_torchao
from gemmtune.problem.compositions import packed

WEIGHT = torch.randn(256, 96, generator=torch.Generator().manual_seed(1))


def numbers(*size: int, most: int = 15) -> torch.Tensor:
    return torch.randint(0, most + 1, size, generator=torch.Generator().manual_seed(2))


def words(x: torch.Tensor, bits: int, columns: list[int] | None = None) -> torch.Tensor:
    """Pack each row of numbers, column ``columns[i]`` of each word first. The last word is filled with zeros."""
    per = 32 // bits
    rows = nn.functional.pad(x, (0, -x.shape[1] % per)).view(x.shape[0], -1, per).to(torch.int64)
    found = sum(rows[:, :, column] << (bits * i) for i, column in enumerate(columns or range(per)))
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
GROUPS = ((256, 64), (320, 128), (96, 64), (200, 128), (40, 32), (136, 64), (256, 256))
"""K and the rows of a group, of which the last may have fewer, and one group of all rows."""


def test_awq():
    for k, group in GROUPS:
        groups = torch.arange(k) // group
        q, z, s = numbers(k, 16), numbers(int(groups[-1]) + 1, 16), torch.rand(int(groups[-1]) + 1, 16) + 0.5
        given = words(q, 4, AWQ_COLUMNS), words(z, 4, AWQ_COLUMNS), s
        weight = from_awq(*given)
        assert torch.equal(weight.dequantize(), (q - z[groups]) * s[groups]), (k, group)
        assert all(torch.equal(x, y) for x, y in zip(to_awq(weight), given, strict=True)), (k, group)
        assert torch.equal(from_awq(given[0], None, s).dequantize(), (q - 8) * s[groups]), (k, group)
    signed = QuantizedWeight.quantize(WEIGHT, "int4", scales="group_64")
    assert torch.equal(from_awq(*to_awq(signed)).dequantize(), signed.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less_one", [True, False])
def test_gptq(bits, less_one):
    most = 2**bits - 1
    for (k, group), n in itertools.product((*GROUPS, (100, 32), (70, 64)), (16, 12)):
        g_idx = torch.arange(k) // group
        count = int(g_idx[-1]) + 1
        q, z, s = numbers(k, n, most=most), numbers(count, n, most=most - 1) + 1, torch.rand(count, n) + 0.5
        given = words(q.t(), bits).t(), words(z - int(less_one), bits), s
        case = (k, group, n)
        wanted = (q - z[g_idx]) * s[g_idx]
        weight = from_gptq(*given, g_idx.to(torch.int32), bits=bits, zeros_less_one=less_one)
        assert torch.equal(weight.dequantize(), wanted), case
        if k % (32 // bits) == 0:
            assert torch.equal(from_gptq(*given, bits=bits, zeros_less_one=less_one).dequantize(), wanted), case
        assert torch.equal(from_gptq(given[0], None, s, g_idx, bits=bits).dequantize(), (q - 2 ** (bits - 1)) * s[g_idx]), case
        if bits == 4 and k % 8 == 0 and n % 8 == 0:
            back = to_gptq(weight, zeros_less_one=less_one)
            assert all(torch.equal(x, y) for x, y in zip(back, (*given, g_idx), strict=True)), case
        for other in (g_idx.flip(0), torch.arange(k) % count) if count > 1 else ():
            with pytest.raises(InvalidProblemError, match="groups whose rows are not adjacent"):
                from_gptq(*given, other, bits=bits)


def of_zeros(*zeros: float) -> QuantizedWeight:
    return QuantizedWeight(packed(numbers(64, 8)), torch.ones(1, 8), torch.tensor([zeros * 8])[:, :8], "uint4")


def test_what_a_format_cannot_have_is_refused():
    q, z, s = words(numbers(16, 256), 4).t(), words(numbers(4, 16), 4), torch.rand(4, 16)
    order = torch.arange(256) // 64
    int8, lone = QuantizedWeight.quantize(WEIGHT), QuantizedWeight.quantize(torch.randn(16, 20).mT, "int4", scales="group_32")
    last = QuantizedWeight.quantize(torch.randn(64, 320).t(), "int4", scales="group_128").t()
    for call, message in (
        (lambda: from_gptq(q, z, s, bits=3), "from_gptq: bits: got 3, expected 4 or 8"),
        (lambda: from_gptq(q, z, s, order[:-8]), "g_idx: got 248 rows for a qweight of 256, expected the same number"),
        (
            lambda: from_gptq(q, z, s[:3], order),
            r"got scales \[3, 16\] and 4 groups of qzeros, expected a matrix with as many rows",
        ),
        (lambda: from_gptq(q, None, s[0], order), r"got scales \[16\], expected a matrix"),
        (lambda: from_gptq(q.float(), z, s), r"from_gptq: qweight: got torch.float32 of shape .*, expected a matrix of int32"),
        (lambda: from_gptq(q, z, torch.rand(5, 16), order), r"got scales \[5, 16\]"),
        (lambda: from_gptq(q, None, torch.rand(5, 16)), "QuantizedWeight: scales: got shape .*5, 16.*, expected"),
        (lambda: from_awq(q, z, s[:, :8]), "QuantizedWeight: (scales|zero_points): got shape"),
        (lambda: to_awq(of_zeros(2.5)), "to_awq: got a zero point of 2.5, expected an integer of 0 … 15; dequantize the weight"),
        (lambda: to_awq(of_zeros(3.0, 16.0)), "to_awq: got a zero point of 16, expected an integer of 0 … 15"),
        (lambda: to_awq(of_zeros(3.0, -1.0)), "to_awq: got a zero point of -1, expected an integer of 0 … 15"),
        (lambda: to_gptq(of_zeros(3.0, 0.0)), r"got a zero point of 0, expected an integer of 1 … 16; pass zeros_less_one=False"),
        (
            lambda: to_gptq(of_zeros(16.0), zeros_less_one=False),
            "got a zero point of 16, expected an integer of 0 … 15; dequantize",
        ),
        (lambda: to_gptq(int8), "to_gptq: got QuantizedWeight.*expected a QuantizedWeight of uint4"),
        (lambda: to_gptq(lone), "to_gptq: got K = 20, expected a multiple of 8"),
        (lambda: to_torchao(torch.ones(2, 2)), "to_torchao: got Tensor, expected a QuantizedWeight"),
        (lambda: to_torchao(last), "to_torchao: got 320 inputs in groups of 128, expected a multiple"),
        (lambda: from_torchao(3), "from_torchao: got int, expected an Int4Tensor, .* or AffineQuantizedTensor"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            call()
    assert torch.equal(from_gptq(*to_gptq(of_zeros(16.0))).zero_points, torch.full((1, 8), 16.0))


def test_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(256, 96)
    for config in (quantization.Int8WeightOnlyConfig(), quantization.Float8WeightOnlyConfig()):
        other = copy.deepcopy(layer)
        quantization.quantize_(other, config)
        weight = from_torchao(other.weight)
        assert weight.shape == (96, 256)
        assert torch.allclose(weight.dequantize(), other.weight.dequantize(), atol=1e-6)
    ours = QuantizedWeight.quantize(WEIGHT, "int4", scales="group_64").t()
    assert type(to_torchao(ours)).__name__ == "Int4Tensor"
    assert torch.equal(from_torchao(to_torchao(ours)).dequantize(), ours.dequantize())
    with pytest.raises(InvalidProblemError, match="from_torchao: got Tensor, expected an Int4Tensor"):
        from_torchao(WEIGHT)
    scaled, experts = to_torchao(ours), quantization.Int8Tensor.from_hp(torch.randn(3, 32, 64), quantization.PerRow())
    scaled.act_pre_scale = torch.ones(256)
    for given, message in (
        (scaled, r"got Int4Tensor \[96, 256\] with an act_pre_scale, expected a weight \[N, K\] without one"),
        (experts, r"got Int8Tensor \[3, 32, 64\], expected a weight \[N, K\]"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            from_torchao(given)
    for granularity in (quantization.PerTensor(), quantization.PerRow()):
        given = quantization.Float8Tensor.from_hp(WEIGHT.t().contiguous(), granularity=granularity)
        assert torch.allclose(from_torchao(given).dequantize(), given.dequantize(), atol=1e-6)
        given.scale = given.scale.reshape(()) if given.scale.numel() == 1 else given.scale
        assert torch.allclose(from_torchao(given).dequantize(), WEIGHT.t(), atol=0.3)


class AffineQuantizedTensor:
    """torchao's class before 0.16: asymmetric bytes with a scale and a zero point for each 64 elements of a row."""

    dtype = torch.float32

    def __init__(self, domain: str) -> None:
        self.block_size, self.zero_point_domain = (1, 64), SimpleNamespace(name=domain)
        self.parts = numbers(96, 256, most=127).to(torch.int8), torch.rand(96, 4) + 0.5, numbers(96, 4) - 8
        self.tensor_impl = type("PlainAQTTensorImpl", (), {"get_plain": lambda _: self.parts})()

    def dim(self) -> int:
        return 2


def test_older_tensors_of_torchao():
    given = AffineQuantizedTensor("INT")
    q, scale, zero = (x if x.shape[1] == 256 else x.repeat_interleave(64, 1) for x in given.parts)
    assert torch.equal(from_torchao(given).dequantize(), (q - zero) * scale)
    with pytest.raises(InvalidProblemError, match=r"zero points of domain FLOAT.*expected PlainLayout, INT or NONE, and blocks of"):
        from_torchao(AffineQuantizedTensor("FLOAT"))
