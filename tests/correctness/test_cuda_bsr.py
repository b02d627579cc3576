"""The cuda family for block-sparse weights on the CPU, thread by thread; and weights as it has them packed.

For each commit a part of the cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F16, biased, blocked, bsr_shape, choice, gated
from cuda_kernels_on_cpu import kernel
from rotation import rotated

from gemmtune.backends.cuda.bsr.configs import UNIT
from gemmtune.backends.cuda.bsr.packing import PLACE_BITS, grouped_rows, packed_units, swizzled, units_at
from gemmtune.choice import Status
from gemmtune.numerics.block_sparse import sparse_of
from gemmtune.problem import Problem
from gemmtune.selector.verify import Verifier
from gemmtune.sparse import create_blocked_tensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
ONE, TWO, FOUR = bsr_shape(64, 16, 3), bsr_shape(128, 16, 2), bsr_shape(256, 16, 2)
LINES, DIVIDED, IN_FOUR = bsr_shape(128, 64, 2), bsr_shape(128, 16, 2, 2), bsr_shape(64, 32, 2, 4)
SHARED = bsr_shape(128, 16, 2, 1, 2)
MAPPED = bsr_shape(128, 16, 3, units=5, mapped=True)
NARROW, NARROW_SHARED = bsr_shape(128, 16, 5, units=3), bsr_shape(256, 16, 3, 1, 2, units=5)

ADDED = Problem.bsr_addmm(
    18, 192, 192, block=64, alpha=2, beta=0.5, bias="mn", imbalance="skewed", wide_index=True, device_type="cuda", prepacked=True
)
CASES: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "rows-in-twos-and-one-over": (blocked(13, 192, 128, density=0.5), TWO, {}),
    "rows-in-fours": (blocked(16, 320, 256, density=0.3), FOUR, {}),
    "from-tile-to-tile": (blocked(40, 320, 192, density=0.5, imbalance="skewed"), ONE, {"blocks": 2}),
    "tokens-contiguous": (blocked(72, 128, 136, block=(64, 136), layout="tt"), LINES, {"blocks": 1}),
    "float16-blocks-of-128": (blocked(17, 256, 256, block=128, dtype=F16), TWO, {}),
    "in-strips": (blocked(90, 320, 192, density=0.5), ONE, {"blocks": 5, "strip": 2}),
    "joined": (blocked(9, 96, 144, block=(32, 16), density=0.2), TWO, {}),
    "cut-and-unaligned": (blocked(7, 130, 192, block=(65, 96)), ONE, {}),
    "two-blocks-of-a-cluster": (blocked(24, 128, 320, density=0.5), DIVIDED, {}),
    "four-blocks-of-a-cluster": (blocked(33, 64, 320, density=0.3), IN_FOUR, {}),
    "tiles-of-a-cluster": (blocked(70, 128, 256, density=0.5), SHARED, {}),
    "tiles-of-a-cluster-one-after-the-other": (blocked(40, 320, 192, density=0.3, imbalance="skewed"), SHARED, {"blocks": 4}),
    "tiles-of-four-and-tokens-contiguous": (blocked(200, 64, 192, layout="tt"), bsr_shape(64, 64, 2, 1, 4), {}),
    "units-as-boxes": (blocked(13, 192, 320, density=0.6), MAPPED, {"blocks": 2}),
    "room-for-few-units": (blocked(13, 256, 448, density=0.6), NARROW, {"blocks": 2}),
    "room-for-few-units-of-a-cluster": (blocked(30, 256, 320, density=0.7), NARROW_SHARED, {}),
    "added": (ADDED, NARROW, {}),
    "gated": (gated(blocked(20, 128, 128)), ONE, {"blocks": 3}),
    "float32-biased": (biased(blocked(20, 128, 128, density=1)), TWO, {}),
    "tokens-contiguous-gated": (gated(blocked(64, 128, 128, layout="tt", dtype=F16)), LINES, {}),
    "nothing": (blocked(20, 128, 128, density=0), ONE, {"blocks": 2}),
}
"""Rows of the weight that a tile has and has not, ends of tokens and of K, both majors, tiles one after the other, clusters,
epilogues. Verification draws patterns of its own: ends of rows, empty rows, one long row, nothing at all."""


@needs_compiler
@pytest.mark.parametrize("name", rotated([*CASES], len(CASES), "bsr"))
def test_every_case_is_right(name: str) -> None:
    problem, shape, told = CASES[name]
    one = choice(problem, shape, **told)
    here = dataclasses.replace(problem, device_type="cpu")
    chosen = dataclasses.replace(one, problem=here)
    verdict = Verifier(here, torch.device("cpu")).check(chosen, kernel(chosen))
    assert verdict.status is Status.OK, verdict.reason


@needs_compiler
def test_a_row_that_waits_for_the_other_holds_no_stage() -> None:
    """More steps of one row of a tile than there are stages, before the other has its second."""
    problem = blocked(16, 128, 768)
    one = choice(problem, TWO)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, [0, 6, 11]], mask[1, 1:11] = True, True
    g = torch.Generator("cpu").manual_seed(1)
    dense, x = (torch.randint(-4, 5, size, generator=g).to(BF16) for size in ((128, 768), (16, 768)))
    assert problem.sparsity is not None
    weight, out = sparse_of(dense, mask, problem.sparsity), torch.empty(16, 128, dtype=BF16)
    kernel(one).run(out, (x, one.pack(weight)), ())
    assert torch.equal(out, (x.float() @ weight.to_dense().float().t()).to(BF16))


@pytest.mark.parametrize("warp_groups", [1, 2, 4])
@pytest.mark.parametrize(("block", "density"), [(64, 0.3), (128, 0.5), ((65, 96), 0.5), ((32, 16), 0.1), (64, 0.0)], ids=str)
def test_packed_units_are_the_matrix(block: int | tuple[int, int], density: float, warp_groups: int) -> None:
    """What the kernel reads of them, one after the other."""
    n, k = 3 * (block if isinstance(block, int) else block[0]), 4 * (block if isinstance(block, int) else block[1])
    weight = create_blocked_tensor(n, k, block=block, density=density, imbalance="skewed", dtype=BF16)
    packed = packed_units(weight, warp_groups)
    groups = -(-n // (UNIT * warp_groups))
    head, columns = groups * (warp_groups + 1), -(-k // UNIT)
    steps_at, first_unit = (head + 1) // 2 * 8, units_at(groups, warp_groups, columns)
    assert 0 <= first_unit - (steps_at + 8 * groups * columns) < 128
    words = packed[: 4 * head].view(torch.int32).tolist()
    rows, counts = words[: groups * warp_groups], words[groups * warp_groups :]
    lines = packed[steps_at : steps_at + 8 * groups * columns].view(torch.int32).view(groups, columns, 2).tolist()
    units = swizzled(packed[first_unit:].view(BF16).view(-1, UNIT, UNIT))  # which undoes itself
    assert sorted(rows) == list(range(groups * warp_groups))
    assert counts == sorted(counts, reverse=True)
    dense, used = torch.zeros(groups * warp_groups * UNIT, -(-k // UNIT) * UNIT, dtype=BF16), 0
    for group, (count, line) in enumerate(zip(counts, lines, strict=True)):
        numbers = [told >> PLACE_BITS for told, _ in line[:count]]
        assert numbers == sorted(set(numbers))
        for told, first in line[:count]:
            places = [i for i in range(PLACE_BITS) if told >> i & 1]
            assert places
            assert first == used
            for place in places:
                row, col = rows[group * warp_groups + place] * UNIT, (told >> PLACE_BITS) * UNIT
                dense[row : row + UNIT, col : col + UNIT] = units[used]
                used += 1
    assert used == len(units)
    assert torch.equal(dense[:n, :k], weight.to_dense())
    assert dense.count_nonzero() == weight.to_dense().count_nonzero()


def test_rows_with_the_same_columns_are_of_one_group() -> None:
    """Three kinds of rows, mixed, and a row that is alone; then rows that are all alike, which stay where they are."""
    kinds = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    columns = {0: [0, 1, 2, 3], 1: [4, 5, 6], 2: [0, 4, 7, 8, 9], 3: [9]}
    row, col = zip(*[(i, col) for i, kind in enumerate(kinds) for col in columns[kind]], strict=True)
    places = torch.tensor(row), torch.tensor(col)
    found = grouped_rows(*places, len(kinds), 10, 4)
    assert sorted(found.tolist()) == list(range(16))
    assert {frozenset(group) for group in found.view(4, 4).tolist()} == {
        frozenset({0, 3, 6, 9}),
        frozenset({1, 4, 7, 10}),
        frozenset({2, 5, 8, 11}),
        frozenset({12, 13, 14, 15}),
    }
    alike = torch.arange(6).repeat_interleave(3), torch.arange(3).repeat(6)
    assert {frozenset(pair) for pair in grouped_rows(*alike, 6, 3, 2).view(3, 2).tolist()} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({4, 5}),
    }


def test_rows_by_chance_have_fewer_steps_than_as_neighbours() -> None:
    """Of 64 rows with half of 64 units, pairs of neighbours have 48 steps."""
    existing = torch.rand(64, 64, generator=torch.Generator("cpu").manual_seed(1)) < 0.5
    row, col = existing.nonzero(as_tuple=True)
    found = existing[grouped_rows(row, col, 64, 64, 2)].view(32, 2, 64).any(1)
    assert found.sum() < 0.94 * existing.view(32, 2, 64).any(1).sum()
