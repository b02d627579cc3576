"""Gradients of the operations, against torch's own and against finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from rotation import rotated
from torch.utils.checkpoint import checkpoint

import gemmtune
from gemmtune import settings
from gemmtune.integration import eager


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


Tensor = torch.Tensor
SIZE = 4


def gated(acc: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return acc * torch.sigmoid(x) + y * y


class Fused(NamedTuple):
    """An operation with the epilogue ``gated``: ours, torch's composition, and the places that a gradient reaches."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    places: tuple[str, ...]
    dims: int = 2


OFFS = torch.tensor([SIZE], dtype=torch.int32)
WEIGHT = torch.arange(SIZE * SIZE, dtype=torch.int8).view(SIZE, SIZE) - 8
BLOCKS = torch.randn(16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to_sparse_bsr((4, 4))
FUSED = {
    "mm": Fused(gemmtune.mm, torch.mm, ("a", "b")),
    "addmm": Fused(
        lambda *xs, **kw: gemmtune.addmm(*xs, alpha=1.5, beta=-0.5, **kw),
        lambda *xs: torch.addmm(*xs, alpha=1.5, beta=-0.5),
        ("inp", "a", "b"),
    ),
    "bmm": Fused(gemmtune.bmm, torch.bmm, ("a", "b"), 3),
    "baddbmm": Fused(gemmtune.baddbmm, torch.baddbmm, ("inp", "a", "b"), 3),
    "mm_plus_mm": Fused(gemmtune.mm_plus_mm, lambda a, b, c, d: a @ b + c @ d, ("a", "b", "c", "d")),
    "grouped_mm": Fused(
        lambda a, b, **kw: gemmtune.grouped_mm(a, b.unsqueeze(0), OFFS, **kw), torch.mm, ("a", "b")
    ),
    "mixed_mm": Fused(lambda a, **kw: gemmtune.mixed_mm(a, WEIGHT, **kw), lambda a: a @ WEIGHT.to(a.dtype), ("a",)),
    "bsr_mm": Fused(lambda x, **kw: gemmtune.bsr_mm(BLOCKS, x, **kw), lambda x: BLOCKS.to_dense() @ x, ("x",)),
    "bsr_addmm": Fused(
        lambda inp, x, **kw: gemmtune.bsr_addmm(inp, BLOCKS, x, **kw), lambda inp, x: inp + BLOCKS.to_dense() @ x, ("inp", "x")
    ),
}  # fmt: skip
RELATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda x: x,
    "a view": lambda x: x.mT,
    "a row of it, broadcast": lambda x: x[..., :1, :].expand_as(x),
    "computed from it": torch.tanh,
}
"""How the tensor of one place is made of that of another place."""


@pytest.mark.rotates(8)
@pytest.mark.parametrize("op", FUSED)
def test_an_operand_may_stand_in_two_places(op: str):
    fused = FUSED[op]
    dtype = torch.float32 if op in ("grouped_mm", "mixed_mm") else torch.float64
    size = 16 if op.startswith("bsr") else SIZE
    places = (*fused.places, "epilogue 0", "epilogue 1")
    twice = not op.startswith("bsr")  # their products have no second derivative
    for pair, (i, j) in enumerate(itertools.combinations(range(len(places)), 2)):
        for turn, relation in rotated(tuple(enumerate(RELATIONS)), 2, f"{op} {pair}"):
            own = leaves(*([(2, size, size)[-fused.dims :]] * len(places)), dtype=dtype)
            first, second = (j, i) if (pair + turn) % 2 else (i, j)
            given = [x * 1 if k == first else x for k, x in enumerate(own)]  # a tensor that is no leaf, but an ancestor
            given[second] = RELATIONS[relation](given[first])
            wanted = [x for k, x in enumerate(own) if k != second]
            *operands, x, y = given
            results = [
                fused.ours(*operands, epilogue=gated, epilogue_args=(x, y)),
                gated(fused.theirs(*operands), x, y),
            ]
            found = [torch.autograd.grad(r.square().sum(), wanted, create_graph=twice, retain_graph=True) for r in results]
            where = f"{op}: {places[second]} is {relation} as {places[first]}"
            torch.testing.assert_close(*found, msg=lambda text, where=where: f"gradients of {where}: {text}")
            if twice:
                second_order = [torch.autograd.grad(sum(g.sin().sum() for g in gs), wanted, retain_graph=True) for gs in found]
                torch.testing.assert_close(
                    *second_order, rtol=1e-3 if dtype == torch.float32 else None, atol=1e-3 if dtype == torch.float32 else None,
                    msg=lambda text, where=where: f"second derivatives of {where}: {text}",
                )  # fmt: skip


def test_derivatives_of_a_residual_by_finite_differences():
    def residual(x: Tensor, w: Tensor) -> Tensor:
        return gemmtune.mm(x.tanh(), w, epilogue=gated, epilogue_args=(x, x))

    given = leaves((SIZE, SIZE), (SIZE, SIZE))
    assert torch.autograd.gradcheck(residual, given)
    assert torch.autograd.gradgradcheck(residual, given)


def test_a_residual_in_a_retained_graph_with_hooks_and_in_a_checkpoint():
    x, w = leaves((SIZE, SIZE), (SIZE, SIZE))
    seen: list[Tensor] = []

    def block(x: Tensor, w: Tensor) -> Tensor:
        hidden = x.tanh()
        if hidden.requires_grad:
            hidden.register_hook(seen.append)
        return gemmtune.mm(hidden, w, epilogue=torch.add, epilogue_args=(hidden,))

    expected = torch.autograd.grad((x.tanh() @ w + x.tanh()).sum(), (x, w))
    y = block(x, w).sum()
    for _ in range(2):  # a retained graph
        torch.testing.assert_close(torch.autograd.grad(y, (x, w), retain_graph=True), expected)
    hidden = x.detach().tanh().requires_grad_()
    (of_hidden,) = torch.autograd.grad((hidden @ w + hidden).sum(), hidden)
    assert len(seen) == 2
    for got in seen:
        torch.testing.assert_close(got, of_hidden)
    again = checkpoint(block, x, w, use_reentrant=False).sum()
    torch.testing.assert_close(torch.autograd.grad(again, (x, w)), expected)


def test_epilogues_without_a_gradient_of_one_argument():
    a, b, x = leaves((4, 3), (3, 5), (4, 5))
    comparison = gemmtune.mm(a, b, epilogue=lambda acc, x: (acc > x).to(x.dtype), epilogue_args=(x,))
    assert all(g is None or not g.any() for g in torch.autograd.grad(comparison.sum(), (a, b, x), allow_unused=True))
    alone = gemmtune.mm(a, b, epilogue=lambda acc, x: acc, epilogue_args=(x,))
    *found, of_x = torch.autograd.grad(alone.sum(), (a, b, x), allow_unused=True)
    assert of_x is None
    torch.testing.assert_close(found, [*torch.autograd.grad((a @ b).sum(), (a, b))])


def test_an_operand_changed_before_the_backward_pass_is_an_error():
    inp, x = leaves((16, 16), (16, 16))
    held = inp * 1
    y = gemmtune.bsr_addmm(held, BLOCKS, x, epilogue=gated, epilogue_args=(x, x))
    held.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_traced_backward_pass_leaves_products_to_torch(monkeypatch):
    """Compiled autograd traces backward passes. The look-up of a pick reads files, which no graph can hold."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(eager, "bound_for", lambda *_: pytest.fail("a pick was looked up"))
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad():
        assert torch.equal(eager.multiplied("mm", a, b), a @ b)
