"""Properties of block-sparse weights: patterns of blocks, absent blocks, changes in place."""

from typing import Any

from ...declaration.labels import FLOATS, SPARSE
from ...numerics.block_sparse import by_blocks, parts
from ..bench.bench import Bench
from ..cases.sampling import Sample, Size
from .property import Property, declared, stage, tested

SIZES: tuple[Size, ...] = ((17, 192, 256), (64, 256, 192), (1, 384, 160), (33, 96, 512), (130, 128, 128))
PATTERNS = ("random", "ends", "one long row", "diagonal", "nothing")
NONE_TESTED = f"none of {', '.join(SPARSE)} is tested"


def check_pattern(bench: Bench) -> None:
    """Check random numbers in the block pattern of the variant. Rows without blocks must be written too."""
    name = bench.case.variant.replace("_", " ") or PATTERNS[0]
    probes = bench.probes
    operands = probes.random() if name == PATTERNS[0] else probes.patterns()[name]
    bench.expect(bench.call(operands), operands, name=f"blocks: {name}")


def check_absent(bench: Bench) -> None:
    """Check infinities of the other operand that meet blocks which exist in some rows only."""
    expected = bench.probes.absent()
    if expected is not None:
        bench.expect_that(bench.call(expected.operands), expected)


def check_changed(bench: Bench) -> None:
    """Check a tensor again after changing its values, then a column index, in place. Nothing old may be kept."""
    operands, sparsity = bench.probes.patterns()["ends"], bench.case.sparsity
    assert operands.weight is not None
    assert sparsity is not None
    values, _, col = parts(operands.weight)
    blocks = by_blocks(operands.b.t(), sparsity)
    with stage(bench, "before any change"):
        bench.expect(bench.call(operands), operands)
    values.mul_(-2)
    blocks.mul_(-2)
    with stage(bench, "values changed in place"):
        bench.expect(bench.call(operands), operands)
    col[0] = 0  # moves the only block of the first row from the last column to the first
    blocks[0, 0], blocks[0, -1] = blocks[0, -1].clone(), 0
    with stage(bench, "a column index changed in place"):
        bench.expect(bench.call(operands), operands)


def _sample(budget: tuple[int, int, int], **more: Any) -> Sample:
    return Sample(budget=budget, shapes=SIZES, ops=SPARSE, **more)


PROPERTIES = (
    Property(
        "block-patterns", "rows without blocks, with blocks at their ends or with all of them, weights of no block", check_pattern,
        _sample((40, 120, 600), variants=tuple(name.replace(" ", "_") for name in PATTERNS)), needs=tested(SPARSE, NONE_TESTED),
    ),
    Property(
        "absent-blocks", "where there is no block, infinities of the other operand do not show", check_absent,
        _sample((20, 60, 200), dtypes=FLOATS),
        needs=lambda scope: tested(SPARSE, NONE_TESTED)(scope) or declared("skips_absent")(scope),
    ),
    Property(
        "changed-in-place", "values and column indices of a weight count as they are when it is called", check_changed,
        _sample(
            (20, 60, 200),
            admits=lambda case: case.sparsity is not None and case.k > case.sparsity.block_k and case.dtype != "int8",
        ),
        needs=tested(SPARSE, NONE_TESTED),
    ),
)  # fmt: skip
