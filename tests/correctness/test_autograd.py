"""Gradients of the operations, against torch's own and against finite differences."""

from __future__ import annotations

import pytest
import torch

import gemmtune
from gemmtune import settings


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(search="quick", backends=("aten",)):
        yield


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("bias_shape", [(5,), (4, 5), (4, 1), (1, 5), ()], ids=str)
def test_addmm_gradients(bias_shape: tuple[int, ...]):
    tensors = leaves(bias_shape, (4, 3), (3, 5))
    assert torch.autograd.gradcheck(lambda c, a, b: gemmtune.addmm(c, a, b, alpha=1.5, beta=-0.5), tensors)


def test_second_derivatives():
    assert torch.autograd.gradgradcheck(gemmtune.mm, leaves((3, 4), (4, 2)))


@pytest.mark.parametrize(("op", "shapes"), [("bmm", [(2, 3, 4), (2, 4, 5)]), ("baddbmm", [(2, 3, 5), (2, 3, 4), (2, 4, 5)])])
def test_batched_gradients(op: str, shapes: list[tuple[int, ...]]):
    assert torch.autograd.gradcheck(getattr(gemmtune, op), leaves(*shapes))


def test_gradients_through_an_epilogue_and_its_operands():
    def f(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return gemmtune.mm(a, b, epilogue=lambda acc, s: torch.sigmoid(acc * s) + 0.5, epilogue_args=(scale,))

    assert torch.autograd.gradcheck(f, leaves((4, 3), (3, 5), (5,)))


def test_gradient_of_an_epilogue_operand_alone():
    a, b = (t.detach() for t in leaves((4, 3), (3, 5)))
    (scale,) = leaves((5,))
    gemmtune.mm(a, b, epilogue=lambda acc, s: acc * s, epilogue_args=(scale,)).sum().backward()
    assert torch.allclose(scale.grad, (a @ b).sum(0))


def test_gradients_in_bfloat16_match_torch():
    a, b = leaves((8, 16), (16, 8), dtype=torch.bfloat16)
    gemmtune.mm(a, b).float().square().sum().backward()
    got = a.grad.clone()
    a.grad = None
    torch.mm(a, b).float().square().sum().backward()
    assert torch.allclose(got.float(), a.grad.float(), rtol=2e-2, atol=1e-1)


def test_only_the_wanted_gradients_are_computed():
    a, b = leaves((4, 3), (3, 5))
    gemmtune.mm(a, b.detach()).sum().backward()
    assert a.grad is not None
    assert b.grad is None


def test_no_grad_gives_a_plain_result():
    a, b = leaves((4, 3), (3, 5))
    with torch.no_grad():
        assert not gemmtune.mm(a, b).requires_grad
    assert gemmtune.mm(a, b).requires_grad


def test_a_warm_plan_does_not_lose_the_gradient():
    a, b = leaves((4, 3), (3, 5))
    gemmtune.mm(a.detach(), b.detach())
    assert gemmtune.mm(a, b).requires_grad


def test_out_with_gradients_is_an_error():
    a, b = leaves((4, 3), (3, 5))
    with pytest.raises(gemmtune.InvalidProblemError, match="a call with out= is not differentiable, but an input requires grad"):
        gemmtune.mm(a, b, out=torch.empty(4, 5, dtype=torch.float64))
