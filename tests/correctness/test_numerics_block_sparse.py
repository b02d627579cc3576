"""Patterns of blocks and the sparse tensors of them: which blocks there are, exactly, and what stands for what."""

from __future__ import annotations

import pytest
import torch
from broken_kernels import CPU

from gemmtune.numerics import block_sparse
from gemmtune.numerics.block_sparse import (
    assembled,
    awkward_masks,
    by_blocks,
    copied,
    dense_problem,
    mask_of,
    occupied,
    parts,
    random_mask,
    rows_of,
    sparse_of,
    spread,
)  # fmt: skip
from gemmtune.numerics.operands import random_operands
from gemmtune.numerics.probes import Probes
from gemmtune.problem import Problem
from gemmtune.problem.sparsity import Sparsity

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
BLOCK = Sparsity(block_n=2, block_k=3, density=0.5)
SKEWED = Sparsity(block_n=2, block_k=3, density=0.5, imbalance="skewed")


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".X"[x] for x in row) for row in mask.int().tolist()]


def masks(rows: int, cols: int) -> dict[str, list[str]]:
    return {name: drawn(mask) for name, mask in awkward_masks((2 * rows, 3 * cols), BLOCK, CPU)}


def test_patterns_on_which_kernels_go_wrong() -> None:
    assert masks(7, 4) == {
        "ends": ["...X", "....", "X..X", "...X", "....", "X..X", "...X"],
        "one long row": ["....", "....", "....", "....", "....", "....", "XXXX"],
        "diagonal": ["X...", ".X..", "..X.", "...X", "....", "....", "...."],
        "nothing": ["...."] * 7,
    }
    assert masks(2, 5)["diagonal"] == ["X.X.X", ".X.X."]
    assert masks(1, 3) == {"ends": ["..X"], "one long row": ["XXX"], "diagonal": ["XXX"], "nothing": ["..."]}
    assert masks(0, 3) == {key: [] for key in ("ends", "one long row", "diagonal", "nothing")}


def test_random_even_pattern_has_equal_blocks_in_each_row() -> None:
    generator = torch.Generator().manual_seed(5)
    for density, count in ((None, 5), (0.3, 3), (0.26, 3), (0.24, 2), (0.0, 0), (1.0, 10)):
        mask = random_mask((80, 30), BLOCK, generator, density=density)
        assert mask.shape == (40, 10)
        assert set(mask.sum(dim=1).tolist()) == {count}
        if 0 < count < 10:
            assert len(mask.unique(dim=0)) > 20
            assert mask.any(dim=0).all()
    first, again = (random_mask((80, 30), BLOCK, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("rows", "cols", "share", "counts"),
    [
        (4, 8, 0.5, [8, 4, 2, 1]),  # 8 and 8 · (0.354, 0.192, 0.125) / 0.671
        (4, 8, 1.0, [8, 8, 8, 8]),
        (4, 8, 0.0, [0, 0, 0, 0]),
        (3, 100, 0.1, [19, 7, 4]),  # 30 · (1, 0.354, 0.192) / 1.546
        (1, 7, 0.5, [4]),
        (2, 4, 0.75, [4, 2]),
    ],
)
def test_rows_of_a_skewed_pattern_fall_by_a_power(rows: int, cols: int, share: float, counts: list[int]) -> None:
    assert block_sparse._power_law(rows, cols, share).tolist() == counts
    mask = random_mask((2 * rows, 3 * cols), SKEWED, torch.Generator().manual_seed(2), density=share)
    assert sorted(mask.sum(dim=1).tolist(), reverse=True) == counts


def test_long_rows_of_a_skewed_pattern_lie_anywhere() -> None:
    generator = torch.Generator().manual_seed(3)
    longest = {int(random_mask((40, 30), SKEWED, generator).sum(dim=1).argmax()) for _ in range(20)}
    assert len(longest) > 5
    assert random_mask((0, 30), SKEWED, generator).shape == (0, 10)


@pytest.mark.parametrize("wide", [False, True])
def test_a_sparse_tensor_is_torchs_of_the_same_matrix(wide: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    mask = random_mask((8, 15), BLOCK, generator)
    sparsity = Sparsity(block_n=2, block_k=3, density=0.5, wide_index=wide)
    weight = torch.randn(8, 15, generator=generator) * spread(mask, BLOCK)
    made, torchs = sparse_of(weight, mask, sparsity), weight.to_sparse_bsr((2, 3))
    index = torch.int64 if wide else torch.int32
    for mine, its, dtype in zip(parts(made), parts(torchs), (torch.float32, index, index), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine.to(its.dtype), its)
    assert torch.equal(made.to_dense(), weight)
    assert torch.equal(mask_of(made), mask)
    assert torch.equal(occupied(weight, BLOCK), mask)
    assert rows_of(torch.tensor([0, 2, 2, 3])).tolist() == [0, 0, 2]
    again = copied(made)
    assert torch.equal(again.to_dense(), weight)
    assert {x.data_ptr() for x in parts(again)}.isdisjoint({x.data_ptr() for x in parts(made)})
    assert parts(weight) == (weight,)


def test_zeros_among_the_elements_of_a_block_are_kept() -> None:
    weight = torch.zeros(4, 6)
    weight[2, 4] = 7
    made = sparse_of(weight, torch.tensor([[True, False], [False, True]]), BLOCK)
    assert made.values().shape == (2, 2, 3)
    assert drawn(occupied(weight, BLOCK)) == ["..", ".X"]
    blocks = by_blocks(torch.arange(24).view(4, 6), BLOCK)
    assert blocks.shape == (2, 2, 2, 3)
    assert blocks[1, 0].tolist() == [[12, 13, 14], [18, 19, 20]]
    assert drawn(spread(torch.tensor([[True, False]]), BLOCK)) == ["XXX...", "XXX..."]
    values = torch.ones(1, 2, 3)
    assert assembled(torch.tensor([0, 0, 1]), torch.tensor([1]), values, (4, 6)).to_dense().sum() == 6


def test_the_dense_problem_differs_in_nothing_else() -> None:
    for dtype, op in ((torch.float16, "mm"), (torch.int8, "int_mm")):
        sparse = Problem.bsr_mm(16, 64, 128, block=16, dtype=dtype, prepacked=True, device_type="cpu")
        dense = dense_problem(sparse)
        assert (dense.op, dense.sparsity, dense.prepacked) == (op, None, True)
        assert (dense.a, dense.b, dense.out) == (sparse.a, sparse.b, sparse.out)
    added = dense_problem(Problem.bsr_addmm(16, 64, 128, block=16, alpha=3, beta=1, device_type="cpu"))
    assert (added.op, added.alpha, added.beta, added.inp is None) == ("addmm", "general", "one", False)


@pytest.mark.parametrize("wide", [False, True])
def test_random_operands_have_a_weight_of_the_class(wide: bool) -> None:
    problem = Problem.bsr_mm(4, 32, 96, block=(8, 16), density=0.5, wide_index=wide, device_type="cpu")
    made = random_operands(problem, CPU, seed=3)
    assert made.weight is not None
    values, crow, col = parts(made.weight)
    assert made.weight.shape == (32, 96)
    assert values.shape == (12, 8, 16)
    assert problem.sparsity is not None
    assert torch.equal(mask_of(made.weight), random_mask((32, 96), problem.sparsity, torch.Generator().manual_seed(3)))
    assert crow.tolist() == [0, 3, 6, 9, 12]
    assert crow.dtype == col.dtype == (torch.int64 if wide else torch.int32)
    assert 0.9 < float(values.float().std()) < 1.1
    assert made.named["b"] is made.weight
    assert made.b.shape == (96, 32)
    assert made.b.stride() == (0, 0)


def test_infinity_shows_only_in_columns_with_a_block_in_the_last_row_of_b() -> None:
    problem = Problem.bsr_mm(4, 14, 8, block=(2, 1), density=0.5, dtype=torch.float32, device_type="cpu")
    absent = Probes(problem, CPU).absent()
    assert absent is not None
    assert absent.present.tolist() == [col // 2 % 3 != 1 for col in range(14)]
    assert absent.counts.tolist() == [1 if col // 2 % 3 == 2 else 0 for col in range(14)]
    assert absent.operands.a[:, :-1].eq(1).all()
    assert absent.operands.a[:, -1].isinf().all()
    assert Probes(Problem.mm(4, 14, 8, device_type="cpu"), CPU).absent() is None
    nothing = Problem.bsr_addmm(4, 14, 8, block=(2, 1), density=0.5, dtype=torch.float32, alpha=0, device_type="cpu")
    assert Probes(nothing, CPU).absent() is None
