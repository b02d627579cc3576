"""Properties of memory: out, the memory around it, unchanged inputs, and results that must stay as they are."""

import itertools
from collections.abc import Iterator

from ...declaration.labels import OPS, SINGLE
from ...dispatch.checks import overlaps
from ...numerics.operands import Operands
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.sampling import Sample, Size
from ..cases.scope import Scope
from .property import Property, check_calls, check_once, declared, exact_probe, overwrite, same_bits, stage

OUT_STRIDES = (
    "row", "row+1", "col", "row@1", "every2", "row+8", "col+4", "row+3@2", "col@3", "every2+5@1", "row~1", "col+1~1", "row+8@1",
    "row~i",
)  # fmt: skip
TILE_EDGES: tuple[Size, ...] = (
    (1, 1, 1), (15, 17, 33), (64, 64, 64), (31, 33, 16), (63, 65, 64), (127, 129, 40), (1, 257, 8), (255, 1, 8), (100, 100, 100),
)  # fmt: skip
SIZES: tuple[Size, ...] = ((64, 64, 64), (33, 47, 65), (96, 40, 128))
VECTORS: tuple[Size, ...] = ((1, 1, 1), (1, 40, 65), (65, 1, 33))
LONG: tuple[Size, ...] = ((16, 24, 4096), (2**16 + 3, 8, 8), (40, 33, 1100), (5, 2**16 + 3, 8))
"""Sizes with a long K, whose partial sums a kernel may add up in out, and with more rows or columns than 16 bits index."""
PLACES = ("row", "col", "row+3", "row@1")
MOVES, MANY = 6, 48
"""Calls with other operands, and those of a small product with operands in one place, which a GEMM may begin to remember late."""
SMALL_MACS = 2**18


def check_out(bench: Bench) -> None:
    """Check an exact probe with the case's alpha and beta. With an added operand, also check alpha 1 with beta 1 and beta 0."""
    check_once(bench)
    for number, beta in enumerate(("zero", "one")):
        known = (bench.case.alpha, bench.case.beta) == ("one", beta) or not (number or bench.subject.traits.beta)
        if bench.case.added and not bench.failures and not known:
            with stage(bench, f"alpha 1, beta {number}"):
                check_once(bench.sibling(alpha="one", beta=beta))


def check_result(bench: Bench) -> None:
    """Check that the result shares no memory with inputs or earlier results, and that earlier results stay unchanged."""
    probe = exact_probe(bench)
    first = bench.call(probe.operands)
    kept = first.clone()
    if not probe.judge(bench, first):
        return
    probe = exact_probe(bench)
    second = bench.call(probe.operands)
    if overlaps(first, second):
        bench.fail(
            "the result lies in the memory of the earlier result, which is still in use",
            diagnosis="a buffer of an earlier call is returned again",
        )
    elif not same_bits(first, kept):
        bench.fail("the call changed the result of an earlier call, which is still in use")
    with stage(bench, "second call"):
        probe.judge(bench, second)


def check_fresh_pointers(bench: Bench) -> None:
    """Check calls with new numbers of the same sizes. The variant sets the addresses of the operands.

    ``moved``: new addresses, all earlier operands are kept. ``freed``: earlier operands are freed. ``overwritten``: the same ones.
    """
    kept: list[Operands] = []
    problem = bench.problem
    is_small = problem.batch * problem.m * problem.n * problem.k <= SMALL_MACS and not problem.groups
    calls = MANY if is_small and bench.case.variant == "overwritten" else MOVES
    for number in range(1, calls + 1):
        probe = exact_probe(bench)
        operands = probe.operands
        if bench.case.variant == "moved":
            kept.append(operands)
        elif bench.case.variant == "overwritten":
            kept = kept or [operands]
            overwrite(kept[0], operands)
            probe = probe.at(kept[0])
            operands = probe.operands
        with stage(bench, f"call {number} of {calls}, operands {bench.case.variant or 'freed'}"):
            probe.judge(bench, bench.call(operands))
        del probe, operands  # so that the next operands may reuse their memory


def _out(name: str, scope: Scope) -> Iterator[Case]:
    strides = tuple({"out": text} for text in OUT_STRIDES)
    yield from Sample(budget=(72, 400, 2000), shapes=(*SIZES, *VECTORS), variants=strides, ops=OPS)(name, scope)
    yield from Sample(budget=(16, 56, 200), shapes=LONG, variants=strides, ops=SINGLE)(name, scope)


PROPERTIES = (
    Property(
        "result", "the result has the right shape, dtype and device, and shares no memory", check_result,
        Sample(
            budget=(36, 100, 400), shapes=(*SIZES, (1, 1, 1)), ops=OPS,
            # An odd M takes alpha 0 and beta 1, for which a GEMM may return the added operand itself.
            finish=lambda case: case.changed(alpha="zero", beta="one") if case.m % 2 and case.alpha == "general" else case,
        ),
    ),
    Property(
        "out", "the result is written to out, whatever its strides", check_out, _out,
        needs=declared("out", "out="), drawn=True,
    ),
    Property(
        "out-of-bounds", "nothing is written before, after or between the elements of out", check_once,
        Sample(
            budget=(72, 320, 2000), shapes=TILE_EDGES,
            variants=tuple({"out": text} for text in ("row", "row+16", "row@1", "row+1", "col")), ops=OPS,
        ),
        needs=declared("out", "out="), drawn=True,
    ),
    Property(
        "unwritten", "every element of the result is written, whatever its memory held before", check_calls(3),
        Sample(budget=(36, 200, 1000), shapes=TILE_EDGES, variants=("", {"out": "row"}), ops=OPS),
    ),
    Property(
        "inputs-unchanged", "nothing is written to the inputs, nor next to them", check_calls(2),
        Sample(
            budget=(18, 72, 300), shapes=((64, 64, 64), (48, 48, 48), (33, 33, 33)), pairs=tuple(itertools.product(PLACES, PLACES)),
            ops=OPS,
        ),
    ),
    Property(
        "fresh-pointers", "results depend on the numbers of a call alone, not on where earlier operands were", check_fresh_pointers,
        Sample(budget=(36, 100, 400), shapes=SIZES, variants=("moved", "freed", "overwritten"), ops=OPS),
    ),
)  # fmt: skip
