"""Block-sparse products as operators: opcheck, gradients, torch.compile, kept weights."""

from __future__ import annotations

import gc

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans
from gemmtune.numerics.block_sparse import mask_of, parts, spread
from gemmtune.problem import Problem
from gemmtune.problem.sparsity import Sparsity
from gemmtune.selector.offers import offers_for
from gemmtune.settings import Settings
from gemmtune.sparse import create_blocked_tensor, operators

OPS = torch.ops.gemmtune
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support", "ignore:Sparse invariant checks")


@pytest.fixture(autouse=True)
def fresh(own_store):
    forget_plans()
    with settings.patch(backends=("aten",), verify=False, search="quick", tune="never"):
        yield


def made(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    bsr = create_blocked_tensor(32, 48, block=(8, 16), density=0.5, dtype=dtype)
    values, crow, col = parts(bsr)
    return bsr.to_dense(), (crow, col, values.clone().requires_grad_(dtype.is_floating_point)), torch.ones(48, 3).to(dtype)


@pytest.mark.turn(6, 8)
def test_opcheck() -> None:
    _, weight, x = made()
    x.requires_grad_()
    inp = torch.randn(32, 1, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(OPS.bsr_mm.default, (*weight, x))
    torch.library.opcheck(OPS.bsr_addmm.default, (inp, *weight, x), {"beta": 0.5, "alpha": 2.0})
    crow, col, values = weight
    g = torch.randn(32, 3, dtype=torch.float64)
    torch.library.opcheck(OPS.bsr_sampled.default, (crow, col, g, x.detach(), 8, 16))
    sampled = torch.sparse_bsr_tensor(crow, col, OPS.bsr_sampled(crow, col, g, x.detach(), 8, 16), size=(32, 48))
    exists = spread(mask_of(sampled), Sparsity(block_n=8, block_k=16, density=0.5))
    assert torch.allclose(sampled.to_dense(), g @ x.detach().t() * exists)
    got = torch.autograd.grad(OPS.bsr_addmm(inp, *weight, x, beta=0.5, alpha=2.0), (inp, values, x), g)
    known = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48)).to_dense()
    want = torch.autograd.grad(0.5 * inp + 2 * known @ x, (inp, values, x), g)
    assert all(torch.allclose(one, other) for one, other in zip(got, want, strict=True))
    integers, (crow, col, values), ones = made(torch.int8)
    assert torch.equal(OPS.bsr_mm(crow, col, values, ones), (integers.int() @ ones.int()))


@pytest.mark.turn(1, 8)
@pytest.mark.parametrize("size", [(48,), (2, 3, 48)])
def test_linear(size: tuple[int, ...]) -> None:
    _, (crow, col, values), _ = made()
    x, bias = torch.randn(*size).double().requires_grad_(), torch.randn(32).double().requires_grad_()
    torch.library.opcheck(OPS.bsr_linear.default, (x, crow, col, values, bias))
    torch.library.opcheck(OPS.bsr_linear.default, (x.detach(), crow, col, values.detach()))
    known = torch.sparse_bsr_tensor(crow, col, values, size=(32, 48)).to_dense()
    g = torch.randn(*size[:-1], 32, dtype=torch.float64)
    got, want = OPS.bsr_linear(x, crow, col, values, bias), torch.nn.functional.linear(x, known, bias)
    assert torch.allclose(got, want)
    for one, other in zip(*(torch.autograd.grad(y, (x, values, bias), g) for y in (got, want)), strict=True):
        assert torch.allclose(one, other)


def test_compiled_functions_hold_them_as_one_node() -> None:
    dense, weight, x = made()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(OPS.bsr_mm(*weight, x)) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), torch.relu(dense @ x) + 1)


@pytest.mark.turn(3, 8)
def test_compiled_code_with_a_sparse_tensor_runs_as_without_the_compiler() -> None:
    model, x = gemmtune.sparsify_(torch.nn.Linear(32, 32), block=16), torch.randn(5, 32)
    gemmtune.optimize(model)
    weight = gemmtune.prepack(model.weight.detach())
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))
        product = torch.compile(lambda x: gemmtune.bsr_mm(weight, x.t()) + 1, backend="eager")
        torch.testing.assert_close(product(x), model.weight.to_dense() @ x.t() + 1)
    gemmtune.restore(model)


def test_packed_copies_follow_values_that_are_changed_in_place() -> None:
    dense, _, x = made()
    values, crow, col = (part.clone() for part in parts(create_blocked_tensor(32, 48, block=(8, 16), dtype=torch.float64)))
    prepacked = Problem.bsr_mm(3, 32, 48, block=(8, 16), dtype=torch.float64, device_type="cpu", prepacked=True)
    packs = next(c for c in offers_for(prepacked, detect("cpu"), Settings(backends=("aten",))).choices if c.packed_format)
    for factor in (1, -2, 3):
        values.mul_(factor)
        dense = factor * dense
        assert torch.allclose(OPS.bsr_mm(crow, col, values, x), dense @ x)
        assert torch.equal(operators.weight_of(crow, col, values, 48).for_choice(packs), dense.t())


def test_a_weight_is_kept_as_long_as_its_values_and_noticed_when_changed() -> None:
    dense, (crow, col, values), x = made()
    values = values.detach()
    OPS.bsr_mm(crow, col, values, x)
    first = operators.weight_of(crow, col, values, 48)
    assert operators.weight_of(crow, col, values, 48) is first
    values.mul_(-2)
    assert torch.allclose(OPS.bsr_mm(crow, col, values, x), -2 * dense @ x)
    col[0] = 7
    with pytest.raises(gemmtune.InvalidProblemError, match="expected 0 to 2"):
        OPS.bsr_mm(crow, col, values, x)
    count = len(operators._weights)
    del values
    gc.collect()
    assert len(operators._weights) == count - 1
