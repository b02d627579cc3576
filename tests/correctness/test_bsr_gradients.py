"""Gradients of block-sparse products, and linear layers with such weights: sparsify_, optimize, restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.numerics.block_sparse import mask_of, parts
from gemmtune.sparse import create_blocked_tensor, linear, weights
from gemmtune.sparse.gradients import sampled_product, transposed

SPARSE = create_blocked_tensor(32, 48, block=16)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support", "ignore:Sparse invariant checks")


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()
    with settings.patch(backends=("aten",), verify=False, search="quick", tune="never"):
        yield


def test_the_transpose_and_the_sampled_product() -> None:
    bsr = create_blocked_tensor(64, 96, block=(16, 32), density=0.4, imbalance="skewed", dtype=torch.float64)
    turned = transposed(bsr)
    assert torch.equal(turned.to_dense(), bsr.to_dense().t())
    g, x = torch.randn(64, 5, dtype=torch.float64), torch.randn(96, 5, dtype=torch.float64)
    sampled = torch.sparse_bsr_tensor(bsr.crow_indices(), bsr.col_indices(), sampled_product(bsr, g, x), size=bsr.shape)
    exists = mask_of(bsr).repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.allclose(sampled.to_dense(), (g @ x.t()) * exists)


def test_indices_are_read_once_for_all_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    checked = weights._checked
    monkeypatch.setattr(weights, "_checked", lambda name, weight: asked.append(name) or checked(name, weight))
    bsr = create_blocked_tensor(32, 48, block=(16, 8), density=0.5, imbalance="skewed")
    values, crow, col = (part.clone() for part in parts(bsr))
    for factor in (1, -2):
        x = torch.randn(48, 3, requires_grad=True)
        values.mul_(factor)
        gemmtune.bsr_mm(bsr, x).sum().backward()  # defines the operators, too
        torch.ops.gemmtune.bsr_mm(crow, col, values, x).sum().backward()
        assert torch.allclose(x.grad, (1 + factor) * bsr.to_dense().t() @ torch.ones(32, 3), atol=1e-4)
    assert asked == ["bsr_mm"] * 2
    turned = transposed(bsr)
    assert weights.sparsity_of("mm", turned) == checked("mm", turned)
    bsr.col_indices()[:2] = torch.tensor([0, 1])
    assert torch.equal(transposed(bsr).to_dense(), bsr.to_dense().t())


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_dense_product(packed: bool) -> None:
    made = create_blocked_tensor(32, 48, block=16, density=0.5, dtype=torch.float64)
    values, crow, col = parts(made)
    values, x, inp = (t.clone().requires_grad_() for t in (values, torch.randn(48, 3).double(), torch.randn(3).double()))
    bsr = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48))
    weight = gemmtune.prepack(bsr) if packed else bsr
    g = torch.randn(32, 3, dtype=torch.float64)
    got = torch.autograd.grad(gemmtune.bsr_addmm(inp, weight, x, alpha=2, beta=0.5), (values, x, inp), g)
    dense = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48)).to_dense()
    want = torch.autograd.grad(torch.addmm(inp, dense, x, alpha=2, beta=0.5), (values, x, inp), g)
    assert all(torch.allclose(one, other) for one, other in zip(got, want, strict=True))


def test_the_gradient_of_a_parameter_is_dense_with_zeros_elsewhere() -> None:
    weight = nn.Parameter(create_blocked_tensor(32, 48, block=16, density=0.5))
    x = torch.randn(48, 3)
    gemmtune.bsr_mm(weight, x).sum().backward()
    exists = mask_of(weight.detach()).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.allclose(weight.grad, (torch.ones(32, 3) @ x.t()) * exists)


def test_gradients_through_an_epilogue_and_factors_of_rows_and_columns() -> None:
    made = create_blocked_tensor(32, 48, block=16, density=0.5, dtype=torch.float64)
    values, crow, col = parts(made)
    given = (values, torch.randn(48, 3).double(), torch.randn(32, 1).double(), torch.rand(32).double(), torch.rand(3).double())
    values, x, inp, left, right = (t.clone().requires_grad_() for t in given)
    bsr, g = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48)), torch.randn(32, 3, dtype=torch.float64)
    asked = (values, x, inp, left, right)

    def dense() -> torch.Tensor:
        return torch.sparse_bsr_tensor(crow, col, values, size=(32, 48)).to_dense()

    scaled = gemmtune.bsr_addmm(inp, bsr, x, alpha=2, beta=0.5, left_alpha=left, right_alpha=right, epilogue=torch.sigmoid)
    want = torch.sigmoid(0.5 * inp + left[:, None] * (2 * dense() @ x) * right)
    assert torch.allclose(scaled, want)
    for one, other in zip(torch.autograd.grad(scaled, asked, g), torch.autograd.grad(want, asked, g), strict=True):
        assert torch.allclose(one, other)
    bsr = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48))
    constant = gemmtune.bsr_mm(bsr, x.detach(), epilogue=lambda acc, y: torch.relu(acc) * y, epilogue_args=(left[:, None],))
    want = torch.relu(dense() @ x.detach()) * left[:, None]
    for one, other in zip(
        torch.autograd.grad(constant, (values, left), g), torch.autograd.grad(want, (values, left), g), strict=True
    ):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("epilogue", [None, torch.sigmoid])
def test_second_derivatives_of_what_is_dense(packed: bool, epilogue: Any) -> None:
    bsr = create_blocked_tensor(8, 12, block=4, density=0.5, dtype=torch.float64)
    weight = gemmtune.prepack(bsr) if packed else bsr
    x, inp = torch.randn(12, 2).double().requires_grad_(), torch.randn(8, 1).double().requires_grad_()

    def product(x: torch.Tensor, inp: torch.Tensor) -> torch.Tensor:
        return gemmtune.bsr_addmm(inp, weight, x, alpha=2, beta=0.5, epilogue=epilogue).square()

    assert torch.autograd.gradcheck(product, (x, inp))
    assert torch.autograd.gradgradcheck(product, (x, inp))


def test_another_weight_of_the_same_kind_gets_its_own_gradient() -> None:
    x = torch.randn(48, 3, requires_grad=True)
    for seed in range(3):
        weight = nn.Parameter(create_blocked_tensor(32, 48, block=16, density=0.5, seed=seed))
        g_x, g_w = torch.autograd.grad(gemmtune.bsr_mm(gemmtune.prepack(weight), x).sum(), (x, weight))
        dense = weight.detach().to_dense()
        exists = mask_of(weight.detach()).repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.allclose(g_x, dense.t() @ torch.ones(32, 3), atol=1e-5)
        assert torch.allclose(g_w, (torch.ones(32, 3) @ x.detach().t()) * exists, atol=1e-5)


@pytest.mark.parametrize("tokens", [torch.ones(0, 48), torch._neg_view(torch.ones(3, 48))], ids=["no tokens", "negated"])
def test_a_parameter_has_a_dense_gradient_where_torch_does_the_product(tokens: torch.Tensor) -> None:
    weight = nn.Parameter(create_blocked_tensor(32, 48, block=16, density=0.5))
    linear(tokens, weight).sum().backward()
    exists = mask_of(weight.detach()).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(weight.grad, -len(tokens) * exists.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_weight_of_several_products_gets_all_of_their_gradients(dtype: torch.dtype) -> None:
    made = create_blocked_tensor(32, 48, block=16, density=0.5, dtype=dtype)
    values, crow, col = parts(made)
    values = values.clone().requires_grad_()
    weight = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48))
    (gemmtune.bsr_mm(weight, torch.ones(48, 3, dtype=dtype)) + linear(torch.ones(3, 48, dtype=dtype), weight).t()).sum().backward()
    assert torch.equal(values.grad, torch.full_like(values, 6))


def test_8_bit_floats_have_no_gradient() -> None:
    bsr = create_blocked_tensor(32, 48, block=16, dtype=torch.float8_e4m3fn)
    x = torch.ones(48, 3).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(gemmtune.InvalidProblemError, match="bsr_mm: x requires grad, but the operation has no gradient"):
        gemmtune.bsr_mm(bsr, x).sum().backward()


def test_no_gradient_through_out() -> None:
    bsr, x = create_blocked_tensor(32, 32, block=16), torch.randn(32, 3, requires_grad=True)
    with pytest.raises(gemmtune.InvalidProblemError, match="a call with out= is not differentiable"):
        gemmtune.bsr_mm(bsr, x, out=torch.empty(32, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_takes_any_dimensions(dtype: torch.dtype) -> None:
    weight = create_blocked_tensor(32, 48, block=16, dtype=dtype)
    bias = torch.randn(32, dtype=dtype)
    for size in ((48,), (5, 48), (2, 3, 48)):
        x = torch.randn(size, dtype=dtype)
        for _ in range(2):
            got = linear(x, weight, bias)
        want = nn.functional.linear(x.double(), weight.to_dense().double(), bias.double())
        assert got.shape == want.shape
        assert got.is_contiguous()
        assert torch.allclose(got.double(), want, atol=0.1 if dtype == torch.bfloat16 else 1e-4)


def test_linear_has_gradients_and_the_dtypes_of_bsr_mm() -> None:
    weight, bias = create_blocked_tensor(32, 48, block=16).requires_grad_(), torch.randn(32, requires_grad=True)
    x, g = torch.randn(2, 3, 48, requires_grad=True), torch.randn(2, 3, 32)
    dense = weight.to_dense().detach().requires_grad_()
    got = torch.autograd.grad(linear(x, gemmtune.prepack(weight), bias), (x, weight, bias), g)
    want = torch.autograd.grad(nn.functional.linear(x, dense, bias), (x, dense, bias), g)
    exists = mask_of(weight).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.allclose(got[0], want[0], atol=1e-4)
    assert torch.allclose(got[1].to_dense(), want[1] * exists, atol=1e-4)
    assert torch.allclose(got[2], want[2], atol=1e-4)
    few = create_blocked_tensor(32, 48, block=16, dtype=torch.int8)
    ones = torch.ones(3, 48, dtype=torch.int8)
    assert torch.equal(linear(ones, few), few.to_dense().sum(dim=1, dtype=torch.int32).expand(3, 32))
    assert linear(torch.ones(0, 48), weight).shape == (0, 32)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3, 32), SPARSE), r"linear: got x \[3, 32\], bsr \[32, 48\] and bias NoneType, expected tensors x \[..., K\]"),
        ((torch.ones(()), SPARSE), r"linear: got x \[\]"),
        ((3, SPARSE), "linear: got x int"),
        ((torch.ones(3, 48), SPARSE, torch.ones(3, 32)), r"and bias \[3, 32\]"),
        ((torch.ones(3, 48), SPARSE, 2), r"and bias int, expected"),
        ((torch.ones(3, 48), 5), "linear: bsr must be a sparse_bsr tensor, got int"),
        ((torch.ones(3, 48), torch.ones(32, 48)), "bsr must be a sparse_bsr tensor, got a tensor of layout torch.strided"),
    ],
)
def test_linear_says_what_does_not_fit(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(gemmtune.InvalidProblemError, match=message):
        linear(*args)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40), nn.Linear(40, 8)).to(dtype)


def test_sparsify_keeps_the_blocks_with_the_largest_norm() -> None:
    net = model()
    before = net[0].weight.detach().clone()
    assert gemmtune.sparsify_(net, block=32, density=0.5) is net
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.layout is torch.sparse_bsr
    kept = mask_of(weight.detach())
    norms = before.view(3, 32, 2, 32).norm(dim=(1, 3))
    assert int(kept.sum()) == 3
    assert norms[kept].min() >= norms[~kept].max()
    exists = kept.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(weight.to_dense(), before * exists)
    assert net[2].weight.layout is net[3].weight.layout is torch.strided  # blocks of 32 do not divide 40 and 8
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    gemmtune.sparsify_(tied, block=32)
    assert tied[1].weight is tied[0].weight
    with pytest.raises(gemmtune.InvalidProblemError, match="density: got 2"):
        gemmtune.sparsify_(net, density=2)
    with pytest.raises(gemmtune.InvalidProblemError, match="no layer whose weight consists of whole blocks of 7x7"):
        gemmtune.sparsify_(model(), block=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimized_model_runs_its_sparse_layers(dtype: torch.dtype) -> None:
    net = gemmtune.sparsify_(model(dtype), block=(8, 16), density=0.5)
    dense = gemmtune.sparsify_(model(dtype), block=(8, 16), density=0.5)
    for layer in dense:
        if isinstance(layer, nn.Linear) and layer.weight.layout is torch.sparse_bsr:
            layer.weight = nn.Parameter(layer.weight.detach().to_dense())
    x = torch.randn(2, 5, 64, dtype=dtype)
    gemmtune.optimize(net)
    try:
        with torch.no_grad():
            assert torch.allclose(net(x), dense(x), atol=0.05 if dtype == torch.bfloat16 else 1e-5)
            net[0].weight.values().mul_(2)  # noticed by what was packed
            dense[0].weight.mul_(2)
            assert torch.allclose(net(x), dense(x), atol=0.05 if dtype == torch.bfloat16 else 1e-5)
        net(x).float().sum().backward()
        dense(x).float().sum().backward()
        assert torch.allclose(net[3].weight.grad, dense[3].weight.grad, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
        assert torch.allclose(net[0].bias.grad, dense[0].bias.grad, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
    finally:
        gemmtune.restore(net)
    assert "forward" not in net[0].__dict__


def test_example_inputs_tune_the_sparse_layers() -> None:
    net = gemmtune.sparsify_(model(), block=(8, 16), density=0.5)
    with settings.patch(tune="on_miss", tune_in_subprocess=False):
        gemmtune.optimize(net, tune=torch.randn(4, 64), progress=False)
        try:
            with torch.no_grad():
                net(torch.randn(4, 64))
        finally:
            gemmtune.restore(net)
        stated = gemmtune.Problem.bsr_addmm(
            4, 96, 64, block=(8, 16), density=0.5, dtype=torch.float32, wide_index=False, device_type="cpu", prepacked=True
        )
        [found] = gemmtune.tune(stated, progress=False)
    assert found.source == "store"
