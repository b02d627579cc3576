"""Operands with several kinds of structure."""

from __future__ import annotations

import random

import pytest
import torch

from gemmtune.untrusted.checks import SURELY
from gemmtune.untrusted.compositions import ALL, MOST, Compositions
from gemmtune.untrusted.turns import Turns
from gemmtune.untrusted.variations import STRUCTURES, impose, structure

SHAPES = (((20, 20), (20, 20)), ((7, 33), (33, 19)), ((3, 8, 9), (3, 9, 8)), ((1, 1), (1, 1)))


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.uint8])
def test_structure_keeps_numbers_finite_and_products_within_the_type(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    compositions = Compositions(rng)
    for a_shape, b_shape in SHAPES * 30:
        a, b = drawn(dtype, *a_shape), drawn(dtype, *b_shape)
        compositions.impose(a, b)
        assert max(float(x.double().abs().max()) for x in (a, b)) < 2 * MOST
        if dtype == torch.float16:
            assert (a.double().abs() @ b.double().abs()).max() < torch.finfo(dtype).max


@pytest.mark.parametrize("name", ALL)
def test_each_step_is_what_it_says_and_keeps_the_shape(name: str) -> None:
    rng = random.Random(5)
    for shape in ((6, 6), (4, 9), (2, 9, 5)):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found = ALL[name][1](x, rng)
        assert found.shape == x.shape
        rows = found.mT if name.endswith("in columns") else found
        match name.partition(" in ")[0]:
            case "largest is 1":
                assert bool((rows.amax(-1) - 1).abs().max() < 1e-12)
            case "largest is 0":
                assert bool((rows.amax(-1) == 0).all())
            case "sum is 1" | "softmax":
                assert torch.allclose(rows.sum(-1), torch.ones(()).double())
            case "length is 1":
                assert torch.allclose(rows.norm(dim=-1), torch.ones(()).double())
            case "one number":
                assert bool((rows.count_nonzero(-1) == 1).all())
            case "sorted":
                assert bool((rows.diff(dim=-1) >= 0).all())
            case "mirrored":
                assert torch.equal(rows, rows.flip(-1))
            case "signs":
                assert bool((found.abs() == 1).all())
            case "symmetric" if shape == (6, 6):
                assert torch.equal(found.tril(-1).abs(), found.triu(1).mT.abs())
            case "diagonals" if shape == (6, 6):
                assert found.flatten().unique().numel() == 6
            case "permutation" if shape == (6, 6):
                assert torch.equal(found.sum(0), torch.ones(6).double())


def test_words_of_the_source_draw_their_steps_more_often() -> None:
    def share(source: str) -> float:
        compositions = Compositions(random.Random(1), source)
        steps = [step for _ in range(300) for step in compositions._steps()]
        return sum(step is ALL["softmax in rows"][1] for step in steps) / len(steps)

    assert share("x = attention(q, k)") > 3 * share("")


def test_reaches_branches_that_need_two_kinds_of_structure() -> None:
    rng = random.Random(7)
    compositions = Compositions(rng, "if (a >= 0).all() and (a.amax(1) == 1).all(): return b[a.argmax(1)]")
    wrong = 0
    for _ in range(600):
        a, b = torch.randn(20, 20), torch.randn(20, 20)
        compositions.impose(a, b)
        looks_one_hot = bool((a >= 0).all() and (a.amax(1) == 1).all())
        wrong += looks_one_hot and not torch.allclose(b[a.argmax(1)], a @ b)
    assert wrong > 1


def test_every_structure_suits_every_size() -> None:
    """Matrices of one row, without a first half, and batches of them among them."""
    rng = random.Random(7)
    turns, compositions = Turns(rng), Compositions(rng)
    for number in range(3000):
        batch = rng.choice([(), (1,), (3,)])
        m, n, k = rng.choices((1, 1, 2, 3, 8, 9, 17), k=3)
        a, b = torch.randn(*batch, m, k), torch.randn(*batch, n, k).mT
        match number % 3:
            case 0:
                impose(rng.choice(STRUCTURES), a, b, rng)
            case 1:
                structure(a, b, rng, turns, rng.choice([(), *SURELY.values()]))
            case _:
                compositions.impose(a, b)
        assert a.isfinite().all(), (number, a.shape, b.shape)
        assert b.isfinite().all(), (number, a.shape, b.shape)
