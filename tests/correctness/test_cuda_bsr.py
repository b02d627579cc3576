"""Cuda kernel for block-sparse weights with small blocks, run on the CPU thread by thread, and its packed weights.

Each commit tests a part of the cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F16, biased, blocked, choice, gated
from cuda_kernels_on_cpu import assert_right, kernel
from rotation import rotated

from gemmtune.backends.cuda.bsr.configs import FRAGMENT, UNIT, Shape, units_of
from gemmtune.backends.cuda.bsr.packing import SPARE, bits_of, fragments_at, order_of, packed, words_of
from gemmtune.numerics.block_sparse import parts, sparse_of
from gemmtune.problem import Layout, Problem
from gemmtune.sparse import create_blocked_tensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
ONE, TWO = Shape(warps=1, block_n=16, stages=2), Shape(warps=2, block_n=16, stages=3, queue=4)
LINES, SHARED = Shape(warps=1, block_n=64, stages=2), Shape(warps=1, block_n=32, stages=3, cluster=2)
LINES_SHARED, ONE_AHEAD = Shape(warps=1, block_n=64, stages=2, cluster=2), Shape(warps=1, block_n=32, stages=2, queue=4)
ADDED = Problem.bsr_addmm(
    18, 96, 80, block=16, alpha=2, beta=0.5, bias="mn", imbalance="skewed", wide_index=True, device_type="cuda", prepacked=True
)
UNALIGNED = dataclasses.replace(blocked(20, 48, 64), out=Layout(size=(20, 48), stride=(51, 1), dtype=BF16))
CASES: dict[str, tuple[Problem, Any, dict[str, Any]]] = {
    "two-warps": (blocked(13, 96, 80, density=0.5), TWO, {"blocks": 1}),
    "a-row-of-blocks-too-few": (blocked(9, 80, 128, density=0.3, imbalance="skewed"), TWO, {}),
    "blocks-of-32": (blocked(18, 96, 96, block=32, density=0.5), TWO, {"blocks": 1}),
    "float16-blocks-of-32-one-ahead": (blocked(17, 32, 192, block=32, density=0.5, dtype=F16), ONE_AHEAD, {}),
    "tokens-contiguous": (blocked(72, 32, 80, density=0.5, layout="tt"), LINES, {"blocks": 1}),
    "a-cluster-from-tile-to-tile": (blocked(40, 96, 80, density=0.3), SHARED, {"blocks": 2}),
    "a-cluster-and-tokens-contiguous": (blocked(72, 64, 80, layout="tt"), LINES_SHARED, {}),
    "added": (ADDED, TWO, {}),
    "gated": (gated(blocked(20, 64, 64, density=0.5)), ONE, {"blocks": 2}),
    "float32-biased": (biased(blocked(20, 64, 64, block=32, density=1)), ONE, {}),
    "columns-unaligned": (UNALIGNED, ONE, {}),
}
"""Cases with partial tiles and units, remainders of tokens and K, both majors, persistent blocks, clusters, epilogues and gaps.

Verification adds patterns: ends of rows, empty rows, one long row, no blocks at all.
"""


@pytest.mark.turn(0, 6)
@needs_compiler
@pytest.mark.parametrize("name", rotated([*CASES], len(CASES), "bsr"))
def test_results_pass_verification(name: str) -> None:
    problem, shape, launched = CASES[name]
    assert_right(choice(problem, shape, **launched))


@pytest.mark.turn(0, 8)
@needs_compiler
def test_warps_with_blocks_at_opposite_ends_and_more_words_than_lanes() -> None:
    """Check warps that are as many steps apart as there are stages. x is infinite where no row has a block."""
    problem = blocked(16, 64, 8464, density=0.5)
    mask = torch.zeros(4, 529, dtype=torch.bool)
    mask[1, :8], mask[3, 500:] = True, True
    g = torch.Generator("cpu").manual_seed(1)
    dense, x = (torch.randint(-4, 5, size, generator=g).to(BF16) for size in ((64, 8464), (16, 8464)))
    assert problem.sparsity is not None
    weight, out = sparse_of(dense, mask, problem.sparsity), torch.empty(16, 64, dtype=BF16)
    expected = (x.float() @ weight.to_dense().float().t()).to(BF16)
    x[:, 128:8000] = torch.inf
    one = choice(problem, TWO)
    kernel(one).run(out, (x, one.pack(weight)), ())
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("block", "density"), [(16, 0.3), (16, 0.0), (32, 0.5)], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_fragments_match_matrix(block: int, density: float, index: torch.dtype) -> None:
    """Check what each lane reads, block by block. Columns of a row may come in any order."""
    n, k = 5 * block, 11 * block
    weight = create_blocked_tensor(n, k, block=block, density=density, imbalance="skewed", dtype=BF16)
    values, crow, col = parts(weight)
    last = slice(int(crow[-2]), int(crow[-1]))
    values[last], col[last] = values[last].flip(0).clone(), col[last].flip(0).clone()
    dense = torch.zeros(n, k, dtype=BF16)
    for row, (begin, end) in enumerate(zip(crow.tolist(), crow.tolist()[1:], strict=False)):
        for i in range(begin, end):
            dense[row * block : (row + 1) * block, int(col[i]) * block : (int(col[i]) + 1) * block] = values[i]
    made = packed(torch.sparse_bsr_tensor(crow.to(index), col.to(index), values, size=(n, k), check_invariants=False))
    rows, units, words, bits = UNIT // block, units_of(n), words_of(k, block), bits_of(block)
    at = fragments_at(n, k, block)
    head = made[:at].view(torch.int32).tolist()
    order, first, marks = head[: units * rows], head[units * rows : units * (rows + 1)], head[units * (rows + 1) :]
    assert sorted(order) == list(range(units * rows))
    fragments = made[at:].view(BF16).view(-1, 32, 4, 2)
    got, place, sides = torch.zeros(units * UNIT, k, dtype=BF16), 0, block // FRAGMENT
    for unit in range(units):
        assert first[unit] == place
        for step in range(-(-k // 64)):
            per_word = 32 // bits
            held = marks[unit * words + step // per_word] >> step % per_word * bits & ((1 << bits) - 1)
            for bit in (i for i in range(bits) if held >> i & 1):
                top, left = order[unit * rows + bit // (bits // rows)] * block, step * 64 + bit % (bits // rows) * block
                for i in range(sides**2):
                    for lane in range(32):
                        for pair in range(4):
                            row = top + i % sides * 16 + lane // 4 + pair % 2 * 8
                            column = left + i // sides * 16 + lane % 4 * 2 + pair // 2 * 8
                            got[row, column : column + 2] = fragments[place, lane, pair]
                    place += 1
    assert place + SPARE == len(fragments)
    assert torch.equal(got[:n], dense)


def test_pairs_long_and_short_rows_and_puts_long_units_first() -> None:
    lengths = torch.tensor([3, 9, 1, 5, 0])
    assert order_of(lengths, 2).tolist() == [1, 5, 3, 4, 0, 2], "9 and none, 5 and 0, 3 and 1"
    assert order_of(lengths, 1).tolist() == [1, 3, 0, 2, 4]
