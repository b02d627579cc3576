"""Repeated operands: the work that a GEMM does for them, next to that for new ones, and the bits of their rows."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import torch

from ..declaration.subject import Subject
from ..numerics.operands import Operands
from .mean_errors import Trouble
from .run import Run
from .variations import cancelling

AT_ONCE, LESS, OFTEN = 0.7, 0.85, 0.75
"""Least work for repeated operands, as a share of that for new ones, below which they were not computed again.

The work must also be ``LESS`` in so many of the repetitions: one of them may have met less other work on the machine.
"""
LEAST_S = 1e-9
FEW = 4
"""Most rows that are multiplied alone."""
LEAST_MOVED, LIKE = 100, 0.5
"""Least number of elements that differ between two processes, and least correlation of the signs of differences."""
LEAST_REPEATS, SUSPICIOUS, SECOND_LOOKS = 5, 2, 8
"""Least number of repetitions that accuse, that which leads to a second look, and those of that."""


def digest(result: object) -> bytes:
    """Return a hash of the bits of a result."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return b""
    return hashlib.blake2b(result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def follows(here: tuple[object, object], there: tuple[object, object]) -> bool:
    """Return True if a result differs from that of another process as torch's does, be it by random last bits more or less.

    Both are the results of the GEMM and of torch, ``there`` of the other process, in which torch's has other bits.
    """
    if digest(here[0]) == digest(here[1]) and digest(there[0]) == digest(there[1]):
        return True
    results = [x for x in (*here, *there) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    if len(results) < 4 or len({x.shape for x in results}) > 1:
        return False
    own, by_torch, own_there, by_torch_there = (x.double().flatten() for x in results)
    signs = torch.stack([own - own_there, by_torch - by_torch_there]).sign()
    signs = signs[:, (signs != 0).all(0) & signs.isfinite().all(0)]
    return signs.shape[1] >= LEAST_MOVED and float(torch.corrcoef(signs)[0, 1]) > LIKE


def of_least(repeats: Sequence[tuple[float, float]]) -> float:
    """Return the least work for repeated operands as a share of that for new ones. Other programs make each larger, not smaller."""
    return min(again_s for _, again_s in repeats) / max(min(new_s for new_s, _ in repeats), LEAST_S)


def is_from_memory(repeats: Sequence[tuple[float, float]], least: int = LEAST_REPEATS) -> bool:
    """Return True if repeated operands take far less work than new ones, and not by luck. ``least`` repetitions are needed."""
    if len(repeats) < least or of_least(repeats) >= AT_ONCE:
        return False
    return sum(again_s < LESS * new_s for new_s, again_s in repeats) >= OFTEN * len(repeats)


def second_look(fresh: Callable[[], Operands], work: Callable[[Operands], float]) -> list[tuple[float, float]]:
    """Return the work for new and for repeated operands again, before anyone is accused of a memory.

    Another call comes before each pair: after one of torch, or a pause, the first call may be slower.
    """
    found = []
    for _ in range(SECOND_LOOKS):
        work(fresh())
        found.append((work(operands := fresh()), work(operands)))
    return found


def check_rows(subject: Subject, run: Run, operands: Operands, number: int) -> None:
    """Multiply a few rows of the latest call alone, if that may not change their bits."""
    traits, least = subject.traits, run.rng.randint(1, FEW)
    few = -(-max(least, traits.least[0]) // traits.multiples[0]) * traits.multiples[0]
    rows = dataclasses.replace(operands, a=operands.a[..., :few, :])
    if not (traits.batch_invariant and len(rows.tensors) == 2 and few < run.checker.problem.m and rows.a.is_contiguous()):
        return
    alone, among = run.call(rows.tensors, rows.scalars, None), run.result
    if not (isinstance(alone, torch.Tensor) and isinstance(among, torch.Tensor)):
        return
    if not torch.equal(alone.view(torch.uint8), among[..., :few, :].contiguous().view(torch.uint8)):
        text = f"{few} rows have other bits alone than among {run.checker.problem.m}, which it declares not to do"
        run.wrong.append((number, Trouble(text=text), False))


def cancelled(run: Run) -> tuple[Operands, Callable[[object], bool]]:
    """Call the GEMM with numbers that cancel out, and return these with a function that says if a result has the same bits."""
    operands = cancelling(run.checker.plain(), run.rng)
    run.current = run.numbers = run.numbers + 1
    run.result = own = run.call(operands.tensors, operands.scalars, None)
    run.last = bits = digest(own)
    return operands, lambda result: digest(result) == bits


def rounds_products(operands: Operands) -> bool:
    """Return True if products of two numbers are rounded, by some terms. If none is, two libraries often have equal bits."""
    a, b = operands.a, operands.b
    if a.dtype == torch.float64:
        return not all(torch.equal(x, x.float().double()) for x in (a, b))
    some = torch.tensor([0, a.shape[-1] // 2, a.shape[-1] - 1], device=a.device)
    products = a[..., some].double().unsqueeze(-1) * b[..., some, :].double().unsqueeze(-3)
    return not torch.equal(products, products.to(a.dtype).double())
