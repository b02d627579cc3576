"""Cuda kernel for block-sparse weights and few tokens, run on the CPU thread by thread, and its packed weights.

Each commit tests a part of the cases.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cpp_kernels import needs_compiler
from cuda_cases import BF16, F16, F32, biased, blocked, choice, gated
from cuda_kernels_on_cpu import assert_right, kernel
from rotation import rotated

from gemmtune.backends.cuda.bsr_skinny.family import Shape
from gemmtune.backends.cuda.bsr_skinny.packing import HEAD_WORDS, fragments_at, packed, panel_words, panels_of
from gemmtune.numerics.block_sparse import parts, sparse_of
from gemmtune.problem import Layout, Problem
from gemmtune.sparse import create_blocked_tensor

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse BSR tensor support"), pytest.mark.rotates(8)]


def shape(block_n: int, warps: int = 2, stages: int = 2, stage_fragments: int = 2) -> Shape:
    return Shape(block_n=block_n, warps=warps, stages=stages, stage_fragments=stage_fragments)


ADDED = Problem.bsr_addmm(
    11, 64, 400, block=16, alpha=2, beta=0.5, bias="mn", imbalance="skewed", wide_index=True, device_type="cuda", prepacked=True
)
UNALIGNED = dataclasses.replace(blocked(13, 48, 64, density=0.5), out=Layout(size=(13, 48), stride=(51, 1), dtype=BF16))
APART = dataclasses.replace(blocked(3, 48, 80, density=0.5), a=Layout(size=(3, 80), stride=(92, 1), dtype=BF16, offset=4))
LINES = blocked(6, 48, 144, density=0.5, layout="tt")
BY_TOKENS = dataclasses.replace(LINES, out=Layout.contiguous((6, 48), BF16))
WIDE_LINES = blocked(18, 64, 416, block=32, density=0.5, layout="tt", dtype=F16)
CASES: dict[str, tuple[Problem, Shape]] = {
    "one-token": (blocked(1, 48, 272, density=0.5), shape(8)),
    "seven-tokens-with-gaps": (APART, shape(8, stages=4)),
    "sixteen-tokens": (blocked(16, 48, 1040, density=0.9), shape(16, stage_fragments=4)),
    "lines-full-of-columns": (blocked(3, 32, 384, density=1), shape(8, stages=1, stage_fragments=8)),
    "odd-tokens-float16-four-warps": (blocked(13, 32, 528, density=0.5, dtype=F16), shape(16, 4)),
    "32-tokens-by-k": (blocked(29, 32, 272, density=0.5), shape(32)),
    "blocks-of-32": (blocked(15, 64, 416, block=32, density=0.5), shape(16, stage_fragments=4)),
    "tokens-contiguous": (blocked(14, 48, 400, density=0.5, layout="tt"), shape(16)),
    "float16-blocks-of-32-tokens-contiguous": (
        blocked(18, 64, 416, block=32, density=0.5, layout="tt", dtype=F16),
        shape(32, stages=4),
    ),
    "tokens-contiguous-stored-by-tokens": (BY_TOKENS, shape(16)),
    "added": (ADDED, shape(16)),
    "gated": (gated(blocked(5, 64, 64, density=0.5)), shape(8)),
    "float32-biased": (biased(blocked(10, 64, 96, block=32, density=1)), shape(16)),
    "columns-unaligned": (UNALIGNED, shape(16)),
}
"""Cases with remainders of tokens, panels with more and fewer blocks than in flight, both majors of x and results, epilogues, gaps.

Verification adds patterns: ends of rows, empty rows, one long row, no blocks at all.
"""


@pytest.mark.turn(6, 8)
@needs_compiler
@pytest.mark.parametrize("name", rotated([*CASES], len(CASES), "bsr_skinny"))
def test_results_pass_verification(name: str) -> None:
    assert_right(choice(*CASES[name]))


@pytest.mark.turn(7, 8)
@needs_compiler
@pytest.mark.parametrize("layout", ["nt", "tt"])
def test_reads_x_only_at_blocks_and_inside_bounds(layout: str) -> None:
    """Check a row with all blocks but one, where x is infinite, a row with one block, and empty rows. NaN follows x."""
    problem = blocked(6, 64, 336, density=0.5, layout=layout)
    mask = torch.zeros(4, 21, dtype=torch.bool)
    mask[2, :20], mask[0, 7] = True, True
    g = torch.Generator("cpu").manual_seed(1)
    dense, x = (torch.randint(-4, 5, size, generator=g).to(BF16) for size in ((64, 336), (6, 336)))
    assert problem.sparsity is not None
    weight = sparse_of(dense, mask, problem.sparsity)
    expected = (x.float() @ weight.to_dense().float().t()).to(BF16)
    x[:, 320:] = torch.inf
    beside = torch.full((6 * 336 + 64,), torch.nan, dtype=BF16)
    given = beside[32:-32].as_strided(problem.a.size, problem.a.stride)
    given.copy_(x)
    out = torch.empty_strided(problem.out.size, problem.out.stride, dtype=BF16)
    one = choice(problem, shape(16, stages=4))
    kernel(one).run(out, (given, one.pack(weight)), ())
    assert torch.equal(out, expected)


@pytest.mark.turn(5, 8)
@needs_compiler
def test_weight_without_blocks_returns_added_operand() -> None:
    problem = Problem.bsr_addmm(3, 32, 64, block=32, beta=2, bias="mn", density=0, device_type="cuda", prepacked=True)
    weight = create_blocked_tensor(32, 64, block=32, density=0, dtype=BF16)
    inp, x = torch.arange(96).reshape(3, 32).to(BF16), torch.full((3, 64), torch.nan, dtype=BF16)
    one, out = choice(problem, shape(8)), torch.empty(3, 32, dtype=BF16)
    kernel(one).run(out, (x, one.pack(weight), inp), (1.0, 2.0))
    assert torch.equal(out, 2 * inp)


@pytest.mark.parametrize(("block", "density"), [(16, 0.3), (16, 0.0), (32, 0.5)], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_panels_match_matrix(block: int, density: float, index: torch.dtype) -> None:
    """Check what each lane reads, block by block. Columns of a row may come in any order."""
    n, k = 5 * block, 40 * block
    weight = create_blocked_tensor(n, k, block=block, density=density, imbalance="skewed", dtype=F32).to(BF16)
    dense = weight.to_dense()
    values, crow, col = parts(weight)
    last = slice(int(crow[-2]), int(crow[-1]))
    values[last], col[last] = values[last].flip(0).clone(), col[last].flip(0).clone()
    made = packed(torch.sparse_bsr_tensor(crow.to(index), col.to(index), values, size=(n, k), check_invariants=False))
    at = fragments_at(n, k, block)
    told = made[:at].view(torch.int32).view(panels_of(n), panel_words(k, block))
    blocks = made[at:].view(BF16).view(-1, block // 16, 8, 4, 2, 2, 2)
    got, counts = torch.zeros(n, k, dtype=BF16), told[:, 2].tolist()
    assert sorted(told[:, 0].tolist()) == [*range(0, n, 16)]
    assert counts == sorted(counts, reverse=True)
    for row, first, count, *behind in told.tolist():
        columns = behind[HEAD_WORDS - 3 :]
        assert columns[:count] == sorted(columns[:count])
        assert not any(columns[count:]), "what is behind them names a column that there is"
        for i, column in enumerate(columns[:count]):
            for part, line, four, pair, half in torch.cartesian_prod(
                *(torch.arange(m) for m in (block // 16, 8, 4, 2, 2))
            ).tolist():
                left = column * block + four * block // 4 + part * 4 + pair * 2
                got[row + half * 8 + line, left : left + 2] = blocks[first + i, part, line, four, pair, half]
    assert sum(counts) == len(blocks)
    assert torch.equal(got, dense)
