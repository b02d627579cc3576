"""Default kernels of quantized weights on a GPU: without any tuning, for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.selector.features import MEMORY_GBPS
from gemmtune.selector.predicted import ROWS
from gemmtune.selector.segments import DEFAULT
from gemmtune.store.store import open_store

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own(own_store):
    with settings.patch(tune="never", rows="shared"):
        yield


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_every_number_of_rows_has_a_verified_kernel(kind):
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024, bias=False)).to("cuda", torch.bfloat16)
    gemmtune.quantize_(model, kind)
    plain = [layer.weight.dequantize().float() for layer in model]
    gemmtune.optimize(model, progress=False)
    facts = [fact for fact in open_store(settings.current()).every_ranged() if fact.kind == DEFAULT]
    assert len(facts) == 2
    for rows in (1, 7, 16, 33, 190, 513, 3000, ROWS[-1] + 5):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            got = model[0](x).float()
        expected = x.float() @ plain[0].t() + model[0].bias.float()
        assert (got - expected).abs().max() <= 0.02 * expected.abs().max(), rows


def test_it_is_verified_once_and_measured_picks_come_first(monkeypatch):
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(1024, 1024)).to("cuda", torch.bfloat16), "int4")
    gemmtune.optimize(model, progress=False)
    monkeypatch.setattr("gemmtune.integration.defaults.defaults_for", pytest.fail)
    gemmtune.optimize(gemmtune.restore(model), progress=False)
    x = torch.randn(24, 1024, device="cuda", dtype=torch.bfloat16)
    weight = model[0].weight
    given = {"scale_b": weight.scales, "encoding": weight.encoding}
    assert "verified here" in str(gemmtune.explain("mixed_mm", x, weight.tensor, **given))
    with settings.patch(tune="on_miss", search="quick"):
        explained = gemmtune.explain("mixed_mm", x, weight.tensor, **given)
        assert (explained.pick, "the first call tunes it" in explained.origin) == (None, True), str(explained)


def test_a_compiled_graph_runs_them():
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(1024, 1024, bias=False)).to("cuda", torch.bfloat16), "int4")
    expected = model[0].weight.dequantize().float()
    torch._dynamo.reset()
    compiled = torch.compile(gemmtune.optimize(model, progress=False))
    for rows in (1, 40):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad(), torch.profiler.profile() as profile:
            got = compiled(x).float()
            torch.cuda.synchronize()
        assert (got - x.float() @ expected.t()).abs().max() <= 0.02 * got.abs().max()
        names = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
        assert not any("_dequantize" in name for name in names), names


def test_dense_weights_of_a_measured_gpu_have_predicted_kernels_in_graphs():
    device = detect("cuda")
    if device.name not in MEMORY_GBPS:
        pytest.skip(f"nothing is predicted for {device.name}")
    layer = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    gemmtune.optimize(nn.Sequential(layer), progress=False)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    said = str(gemmtune.explain("mm", x, layer.weight.detach().t()))
    assert "predicted, verified here, not measured" in said or "shipped" in said
    expected, of_torch = replayed(lambda: nn.functional.linear(x, layer.weight))
    got, ours = replayed(lambda: layer(x))
    assert (got.float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max()
    assert ours.isdisjoint(of_torch), ours


@torch.no_grad()
def replayed(call):
    """Return the result of a call in a CUDA graph, and the names of the kernels that ran."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
    with torch.profiler.profile() as profile:
        graph.replay()
        torch.cuda.synchronize()
    return result, {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
