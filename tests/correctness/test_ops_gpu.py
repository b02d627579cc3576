"""The public operations on a GPU: what only can go wrong there."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune import settings

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(search="quick", backends=("aten", "triton")):
        yield


def test_a_scalar_on_the_cpu_may_be_added():
    a, b = torch.randn(48, 64, device="cuda"), torch.randn(64, 80, device="cuda")
    for _ in range(3):
        got = gemmtune.addmm(torch.tensor(2.0), a, b)
        assert torch.allclose(got, 2 + a @ b, atol=1e-3)


def test_a_scalar_on_the_cpu_may_be_used_by_an_epilogue():
    a, b = torch.randn(48, 64, device="cuda"), torch.randn(64, 80, device="cuda")
    for _ in range(3):
        got = gemmtune.mm(a, b, epilogue=lambda acc, s: acc * s, epilogue_args=(torch.tensor(2.0),))
        assert torch.allclose(got, 2 * (a @ b), atol=1e-3)


def test_operands_on_two_devices_are_refused():
    with pytest.raises(gemmtune.InvalidProblemError, match="all operands must be on one device, got a on cuda:0 and b on cpu"):
        gemmtune.mm(torch.randn(4, 4, device="cuda"), torch.randn(4, 4))


def test_a_call_in_a_captured_graph_runs_the_stored_pick_on_new_inputs():
    a, b = torch.randn(64, 96, device="cuda"), torch.randn(96, 80, device="cuda")
    gemmtune.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemmtune.mm(a, b)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.allclose(out, a @ b, atol=1e-3)
