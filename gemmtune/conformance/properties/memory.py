"""What is written and what is not: out, the memory around it, the inputs, and results that must stay as they are."""

from __future__ import annotations

import torch

from ...numerics.operands import Operands
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from .coverage import Sample, Size, fitted
from .probing import exact_probe, overwrite, same_bits, stage
from .property import Property

__all__ = ["OUT_STRIDES", "PROPERTIES"]

OUT_STRIDES = ("row", "row+1", "col", "row@1", "every2", "row+8", "col+4", "row+3@2", "col@3", "every2+5@1", "row~1", "col+1~1")
_TILE_EDGES: tuple[Size, ...] = (
    (1, 1, 1), (15, 17, 33), (64, 64, 64), (31, 33, 16), (63, 65, 64), (127, 129, 40), (1, 257, 8), (255, 1, 8), (100, 100, 100),
)  # fmt: skip
_FEW_STRIDES = ("row", "col", "row+3", "row@1")
_SQUARE: tuple[Size, ...] = ((64, 64, 64), (48, 48, 48), (33, 33, 33))
_SIZES: tuple[Size, ...] = ((64, 64, 64), (33, 47, 65), (96, 40, 128))
POISONED_CALLS = 3
MOVES = 6


def check_once(bench: Bench) -> None:
    """One call, whose result and memory are judged."""
    probe = exact_probe(bench)
    probe.judge(bench, bench.call(probe.operands))


def check_unwritten(bench: Bench) -> None:
    """The same call again and again over memory with other contents each time."""
    probe = exact_probe(bench)
    for number in range(1, POISONED_CALLS + 1):
        with stage(bench, f"call {number} of {POISONED_CALLS}"):
            if not probe.judge(bench, bench.call(probe.operands)):
                return


def check_inputs_unchanged(bench: Bench) -> None:
    """Two calls on the same operands: nothing is written to them, and both results are right."""
    probe = exact_probe(bench)
    for number in (1, 2):
        with stage(bench, f"call {number} of 2"):
            if not probe.judge(bench, bench.call(probe.operands)):
                return


def check_result(bench: Bench) -> None:
    """The result is memory of its own: no input's, and not that of an earlier result, which stays as it was."""
    probe = exact_probe(bench)
    first = bench.call(probe.operands)
    kept = first.clone()
    for name, tensor in probe.operands.named.items():
        bench.require(not _share(first, tensor), f"the result lies in the memory of the input {name}")
    if not probe.judge(bench, first):
        return
    probe = exact_probe(bench)
    second = bench.call(probe.operands)
    if _share(first, second):
        bench.fail(
            "the result lies in the memory of the earlier result, which is still in use",
            diagnosis="a buffer of an earlier call is returned again",
        )
    elif not same_bits(first, kept):
        bench.fail("the call changed the result of an earlier call, which is still in use")
    with stage(bench, "second call"):
        probe.judge(bench, second)


def check_fresh_pointers(bench: Bench) -> None:
    """Call after call with other numbers of the same sizes. The variant says where they lie: ``moved`` at new addresses, with all
    earlier operands kept; ``freed`` wherever the freed earlier ones were; ``overwritten`` at the same addresses."""
    kept: list[Operands] = []
    for number in range(1, MOVES + 1):
        probe = exact_probe(bench)
        operands = probe.operands
        if bench.case.variant == "moved":
            kept.append(operands)
        elif bench.case.variant == "overwritten":
            kept = kept or [operands]
            overwrite(kept[0], operands)
            operands = kept[0]
        with stage(bench, f"call {number} of {MOVES}, operands {bench.case.variant or 'freed'}"):
            if not probe.judge(bench, bench.call(operands)):
                return
        del probe, operands  # before the next ones are made, which then may lie there


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the elements of two tensors may lie in the same memory."""
    if not x.numel() or not y.numel():
        return False
    (x_first, x_end), (y_first, y_end) = _extent(x), _extent(y)
    return x.device == y.device and x_first < y_end and y_first < x_end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _needs_out(scope: Scope) -> str | None:
    return None if scope.traits.out else "out= is not declared"


def _with_out(case: Case) -> Case:
    """The variant is the place of out's strides in the table."""
    return case.changed(out=OUT_STRIDES[int(case.variant)], variant="")


def _fits_out(case: Case) -> bool:
    return case.batched or "~" not in OUT_STRIDES[int(case.variant)]


def _own_or_given(case: Case) -> Case:
    return case.changed(out="row", variant="") if case.variant == "out" else case


def _in_bounds(case: Case) -> Case:
    return case.changed(out=_BOUNDED[int(case.variant)], variant="")


_BOUNDED = ("row", "row+16", "row@1", "row+1", "col")
_OUT = Sample(
    name="out",
    budget=(72, 400, 2000),
    shapes=fitted(*_SIZES, (1, 1, 1)),
    variants=tuple(map(str, range(len(OUT_STRIDES)))),
    admits=_fits_out,
    finish=_with_out,
)
_OUT_OF_BOUNDS = Sample(
    name="out-of-bounds",
    budget=(72, 320, 2000),
    shapes=fitted(*_TILE_EDGES),
    variants=tuple(map(str, range(len(_BOUNDED)))),
    finish=_in_bounds,
)
_INPUTS = Sample(
    name="inputs-unchanged",
    budget=(18, 72, 300),
    shapes=fitted(*_SQUARE),
    pairs=lambda _: [(a, b) for a in _FEW_STRIDES for b in _FEW_STRIDES],
)

PROPERTIES = (
    Property(
        name="result",
        meaning="the result has the right shape, dtype and device, and is memory of its own",
        check=check_result,
        cases=Sample(name="result", budget=(36, 100, 400), shapes=fitted(*_SIZES, (1, 1, 1))),
    ),
    Property(
        name="out",
        meaning="the result is written to out, whatever its strides",
        check=check_once,
        cases=_OUT,
        needs=_needs_out,
        drawn=True,
    ),
    Property(
        name="out-of-bounds",
        meaning="nothing is written before, after or between the elements of out",
        check=check_once,
        cases=_OUT_OF_BOUNDS,
        needs=_needs_out,
        drawn=True,
    ),
    Property(
        name="unwritten",
        meaning="every element of the result is written, whatever its memory held before",
        check=check_unwritten,
        cases=Sample(
            name="unwritten", budget=(36, 200, 1000), shapes=fitted(*_TILE_EDGES), variants=("", "out"), finish=_own_or_given
        ),
    ),
    Property(
        name="inputs-unchanged",
        meaning="nothing is written to the inputs, nor beside them",
        check=check_inputs_unchanged,
        cases=_INPUTS,
    ),
    Property(
        name="fresh-pointers",
        meaning="results depend on the numbers of a call alone, not on where earlier operands were",
        check=check_fresh_pointers,
        cases=Sample(
            name="fresh-pointers", budget=(36, 100, 400), shapes=fitted(*_SIZES), variants=("moved", "freed", "overwritten")
        ),
    ),
)
