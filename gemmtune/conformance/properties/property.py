"""One property: an assertion about every GEMM, its check and its cases. Also the exact probes that checks share."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...numerics.block_sparse import parts
from ...numerics.bounds import exact_limit
from ...numerics.buffers import element_bits, placed, storage_bits
from ...numerics.expectation import Expectation
from ...numerics.one_hot import OneHotProbe
from ...numerics.operands import Operands
from ...numerics.quantized import packed, scales_along_k
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_info
from ..bench.bench import Bench
from ..bench.outcome import NoResult
from ..cases.case import Case
from ..cases.scope import Scope

Check: TypeAlias = Callable[[Bench], None]
"""Function that calls the GEMM of a bench for its case and states what it expects."""
Needs: TypeAlias = Callable[[Scope], str | None]
"""Function that returns the reason for not testing a property within a scope (a trait, a device), or None."""


@dataclass(frozen=True, slots=True)
class Property:
    """One row of the suite's table: name, meaning, check, cases and requirements.

    ``enumerate`` yields the cases for the property's name and a scope, in a fixed order. ``drawn`` allows hypothesis to draw
    further ones, by changing sizes, strides, dtype and seed.
    """

    name: str
    meaning: str
    check: Check
    enumerate: Callable[[str, Scope], Iterable[Case]]
    needs: Needs = lambda _: None
    drawn: bool = False

    def cases(self, scope: Scope) -> Iterable[Case]:
        """Return the cases of a scope, in a fixed order."""
        return self.enumerate(self.name, scope)


def declared(trait: str, word: str = "") -> Needs:
    """Return the requirement that a trait is declared. ``word`` names it in the reason, instead of ``trait``."""
    return lambda scope: None if getattr(scope.traits, trait) else f"{word or trait} is not declared"


def tested(ops: Collection[str], otherwise: str) -> Needs:
    """Return the requirement that one of these operations is tested."""
    return lambda scope: None if set(ops) & set(scope.tested_ops) else otherwise


MOST_PRODUCT = 64
"""Largest product of two integers of the fill ``integers``."""
MOST_SCALED = 4
"""Largest alpha, and largest factor of a scale that changes along K, in exact probes."""
ZEROED = 2
"""Maximum of |a · b| ÷ |a · (b − zero_b)| in exact probes."""
MOST_ADDED = 27
"""Maximum of |beta · c| in exact probes, c being the added operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Operands with one right result."""

    operands: Operands
    one_hot: OneHotProbe | None = None
    """Probe whose result is known exactly without a product. None: integers, whose reference product is exact."""
    grouped: Expectation | None = None
    """Expectation of a grouped product."""

    def at(self, operands: Operands) -> "Probe":
        """Return this probe for ``operands`` of the same values at other addresses, which explain a wrong result."""
        if operands.weight is not None:  # b is its own copy of the weight, and still has the earlier values
            operands = dataclasses.replace(operands, b=self.operands.b)
        one_hot = None if self.one_hot is None else dataclasses.replace(self.one_hot, operands=operands)
        grouped = None if self.grouped is None else dataclasses.replace(self.grouped, operands=operands)
        return Probe(operands=operands, one_hot=one_hot, grouped=grouped)

    def judge(self, bench: Bench, result: torch.Tensor) -> bool:
        """Return True if ``result`` is right. Record a failure in ``bench`` otherwise."""
        if self.grouped is not None:
            return bench.expect_that(result, self.grouped)
        if self.one_hot is not None:
            return bench.expect_one_hot(result, self.one_hot)
        return bench.expect(result, self.operands, name="integers", exact=True)


def exact_probe(bench: Bench) -> Probe:
    """Return a probe with new numbers, in which each element of the result depends on the addresses that the GEMM reads.

    It is one of cancelling integers if the strides let both operands be chosen freely, of one-hot lines if only one.
    """
    if bench.problem.groups:
        expectation = bench.groups.next_integers()
        return Probe(operands=expectation.operands, grouped=expectation)
    one_hot: OneHotProbe | None = None
    probes = bench.probes
    if probes.free_a and probes.free_b:
        one_hot = probes.cancel(exact_limit(bench.problem, bench.claims))
    elif probes.free_a and keeps_significands(bench):
        one_hot = probes.rows_of_b(probes.random().right, special=False)
    elif probes.free_b and keeps_significands(bench):
        one_hot = probes.cols_of_a(probes.random().left, special=False)
    return Probe(operands=probes.integers() if one_hot is None else one_hot.operands, one_hot=one_hot)


def check_once(bench: Bench) -> None:
    """Check one call with an exact probe, which detects any element read from or written to a wrong place."""
    probe = exact_probe(bench)
    probe.judge(bench, bench.call(probe.operands))


def check_calls(count: int) -> Check:
    """Return a check that repeats one exact probe ``count`` times, over memory with new contents each time."""

    def check(bench: Bench) -> None:
        probe = exact_probe(bench)
        for number in range(1, count + 1):
            with stage(bench, f"call {number} of {count}"):
                probe.judge(bench, bench.call(probe.operands))

    return check


def keeps_significands(bench: Bench) -> bool:
    """Return True if one input times 1 keeps every bit, by the claims."""
    claims, problem = bench.claims, bench.problem
    own = dtype_info(problem.dtype).unit_roundoff
    held = (claims.accumulate, claims.partials, claims.epilogue_input)
    reads = claims.input_mode in ("ieee", "parts", problem.precision.input_mode)
    return reads and all(dtype_info(dtype).unit_roundoff <= own for dtype in held)


def exact_integers(bench: Bench) -> Operands | None:
    """Return integers whose sums every claimed dtype holds in any order, or None if K is too large for that."""
    limit, scaled = exact_limit(bench.problem, bench.claims), MOST_SCALED ** max(1, scales_along_k(bench.problem))
    if scaled * MOST_PRODUCT * bench.problem.terms + MOST_ADDED <= limit:
        return bench.given(bench.probes.filled("integers", "integers", general=False))
    if ZEROED * scaled * bench.problem.terms + MOST_ADDED <= limit:
        return bench.given(bench.probes.integers())
    return None


def made(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of that layout with these values, in a new buffer."""
    return placed(layout, values.device, values.contiguous())


def made_b(problem: Problem, numbers: torch.Tensor) -> torch.Tensor:
    """Return a b with these numbers (..., K, N), packed if the problem's b is packed."""
    return made(problem.b, packed(numbers) if problem.encoding else numbers)


def overwrite(operands: Operands, new: Operands) -> None:
    """Copy the values of ``new``, with the same layouts, into ``operands`` on the current stream. Addresses do not change."""
    values = new.named
    for name, tensor in operands.named.items():
        for old, other in zip(parts(tensor), parts(values[name]), strict=True):
            storage_bits(old).copy_(storage_bits(other))


def fill_bits(tensor: torch.Tensor, payload: int) -> None:
    """Fill every element of ``tensor`` with the bit pattern ``payload``. Gaps between elements are left alone."""
    element_bits(tensor).fill_(payload)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors of one size and dtype are equal bit by bit. Strides may differ."""
    return torch.equal(element_bits(x.contiguous()), element_bits(y.contiguous()))


@contextmanager
def stage(bench: Bench, words: str) -> Iterator[None]:
    """Prefix the failures recorded in the block with the stage of the check, which ends there if there are any."""
    before = len(bench.failures)
    try:
        yield
    finally:
        bench.failures[before:] = [
            dataclasses.replace(failure, message=f"{words}: {failure.message}") for failure in bench.failures[before:]
        ]
    if len(bench.failures) > before:
        raise NoResult
