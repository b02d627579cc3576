"""Views of a QuantizedWeight are read as plain tensors are, eager and compiled."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.quantized.views import DequantizedView


@pytest.fixture(autouse=True)
def never(own_store):
    with settings.patch(tune="never"):
        yield


def layer_weight(kind: str) -> QuantizedWeight:
    """A weight [16, 64], laid out as that of an ``nn.Linear``."""
    values = torch.rand(16, 64, generator=torch.Generator().manual_seed(1)) + 0.25
    return QuantizedWeight.quantize(values.mT, kind, scales="column" if kind.startswith("f") else "group_32").mT


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_views_are_read_as_plain_tensors(kind, mode):
    weight = layer_weight(kind)
    dense = weight.dequantize()
    with mode():
        view = weight[3:5]
        assert type(view) is DequantizedView
        assert type(view[0]) is type(view.view(-1)) is type(view.data) is type(view.mT.detach()) is DequantizedView
        for result in (view + 1, view.clone(), view.double(), view.sum(), torch.cat([view, view]), view @ view.mT):
            assert type(result) is torch.Tensor
        assert torch.equal(view, dense[3:5])
        assert (view.shape, view.stride(), view.dtype) == ((2, 64), (64, 1), torch.float32)
        assert view.tolist() == dense[3:5].tolist()
        assert view[0, 1].item() == float(view[0, 1]) == dense[3, 1].item()
        assert f"{view[0, 0]:.3f}" == f"{dense[3, 0].item():.3f}"
        assert repr(view[0, :2]) == f"DequantizedView({dense[3, :2]!r})"
        plain = torch.zeros(2, 64)
        assert torch.equal(plain.copy_(view), dense[3:5])
        assert torch.equal(nn.functional.linear(dense, view), dense @ dense[3:5].mT)
        assert torch.equal(gemmtune.mm(dense, weight[:2].mT), dense @ dense[:2].mT)


def test_views_leave_the_process_as_plain_tensors():
    weight = layer_weight("int4")
    view, dense = weight[3:5], weight.dequantize()[3:5]
    file = io.BytesIO()
    torch.save(view, file)
    assert file.tell() < 3000, "the rest of the weight is not saved along"
    file.seek(0)
    for copied in (copy.deepcopy(view), copy.copy(view), pickle.loads(pickle.dumps(view)), torch.load(file)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied.mul_(2), dense * 2)
    assert torch.equal(view, dense)
    layer = nn.Linear(64, 2)
    layer.weight.data = view
    assert torch.equal(layer.weight, dense)


def test_arrays_of_a_view_cannot_be_written():
    weight = layer_weight("int8")
    for array in (weight[3].numpy(), np.asarray(weight[3])):
        assert np.array_equal(array, weight.dequantize()[3].numpy())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for x in (weight, weight[3]):
        assert not hasattr(x, "__cuda_array_interface__")


@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn"])
def test_strides_are_those_that_the_weight_claims(kind):
    weight = layer_weight(kind)
    dense = torch.empty_strided(weight.shape, weight.stride()).copy_(weight.dequantize())
    assert weight.is_contiguous()
    assert torch.equal(weight.as_strided((3, 5), (64, 1), 7), dense.as_strided((3, 5), (64, 1), 7))
    assert torch.equal(weight.view(torch.int32), dense.view(torch.int32))
    assert type(weight.as_strided(weight.shape, weight.stride())) is QuantizedWeight
    rows = weight.t().contiguous()
    assert type(rows) is QuantizedWeight
    assert rows.is_contiguous()
    assert torch.equal(rows.view(-1), dense.t().reshape(-1))
    assert torch.equal(rows.t().dequantize(), weight.dequantize())


def test_a_view_of_a_weight_with_gaps_has_the_strides_that_it_claims():
    numbers = torch.arange(-40, 56, dtype=torch.int8).view(8, 12)
    weight = QuantizedWeight(numbers[:, ::2], torch.rand(1, 6), None)
    assert weight.stride() != weight.dequantize().stride()
    assert torch.equal(weight.as_strided((3, 2), weight.stride()), weight.dequantize()[:3, :2])


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.turn(5, 8)
@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn"])
def test_in_compiled_graphs(kind):
    weight = layer_weight(kind)
    dense, x = weight.dequantize().clone(), torch.rand(3, 64).requires_grad_()
    for function in (lambda w: w[0].zero_(), lambda w: w.view(-1).add_(1), lambda w: w.data[2].fill_(0)):
        with pytest.raises(RuntimeError, match=r"got a view of a QuantizedWeight, expected .*dequantize\(\) the weight"):
            compiled(function)(weight)
    with pytest.raises(RuntimeError, match="got a view of a QuantizedWeight"):
        compiled(lambda v: v.zero_())(weight[0])
    assert torch.equal(weight.dequantize(), dense)
    assert torch.equal(compiled(lambda w: w[3:5] * 2)(weight), dense[3:5] * 2)
    assert torch.equal(compiled(lambda v: v * 2)(weight[3:5]), dense[3:5] * 2)
    view, transposed = compiled(lambda w: w[3:5])(weight), compiled(lambda w: w.t())(weight)
    assert (type(view), type(transposed)) == (DequantizedView, QuantizedWeight)
    assert torch.equal(view, dense[3:5])
    assert torch.equal(transposed.dequantize(), dense.t())
    compiled(lambda x: nn.functional.linear(x, weight[:2]).sum())(x).backward()
    assert torch.allclose(x.grad, dense[:2].sum(0).expand(3, 64))


def test_between_compiled_graphs():
    """Functions that run there make weights, which Dynamo cannot trace."""
    layer = nn.Linear(64, 16, bias=False)
    layer.weight = nn.Parameter(layer_weight("int4"), requires_grad=False)
    copies = []
    layer.register_forward_pre_hook(torch._dynamo.disable(lambda module, _: copies.append(module.weight.t().clone())))
    x = torch.rand(3, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(
            torch.compile(nn.Sequential(layer), backend="aot_eager")(x), x @ layer.weight.dequantize().t(), atol=1e-5
        )
    assert type(copies[0]) is QuantizedWeight
