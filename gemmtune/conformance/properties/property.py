"""A property: what is asserted of every GEMM, by which check, on which cases; and the exact probes that checks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...numerics.block_sparse import parts
from ...numerics.bounds import exact_limit
from ...numerics.buffers import placed, storage_bits
from ...numerics.expectation import Expectation
from ...numerics.one_hot import OneHotProbe
from ...numerics.operands import Operands
from ...numerics.quantized import packed, scales_along_k
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_info
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope

Check: TypeAlias = Callable[[Bench], None]
"""Calls the GEMM of a bench for its case and states what it expects."""
Needs: TypeAlias = Callable[[Scope], str | None]
"""The reason why a property is not tested within a scope (something undeclared, no such device), None if it is."""


@dataclass(frozen=True, slots=True)
class Property:
    """One row of the suite's table: name, meaning, check, cases, and under which conditions.

    ``enumerate`` makes the cases of the property's name and a scope's level, in a fixed order; ``drawn`` says whether hypothesis
    may draw further ones, by changing sizes, strides, dtype and seed of those.
    """

    name: str
    meaning: str
    check: Check
    enumerate: Callable[[str, Scope], Iterable[Case]]
    needs: Needs = lambda _: None
    drawn: bool = False

    def cases(self, scope: Scope) -> Iterable[Case]:
        """The cases of a scope, in a fixed order."""
        return self.enumerate(self.name, scope)


def declared(trait: str, word: str = "") -> Needs:
    """The trait has to be declared; ``word`` is what it is called if not by its name."""
    return lambda scope: None if getattr(scope.traits, trait) else f"{word or trait} is not declared"


def tested(ops: Collection[str], otherwise: str) -> Needs:
    """One of these operations has to be tested."""
    return lambda scope: None if set(ops) & set(scope.tested_ops) else otherwise


MOST_PRODUCT = 64
"""The largest product of integers of the fill ``integers``."""
MOST_SCALED = 4
"""The largest factor of alpha or of one scale that changes along K, in exact probes."""
ZEROED = 2
"""How much larger a · b may be than a · (b − zero_b), in exact probes."""
MOST_ADDED = 27
"""beta times the added operand, in exact probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Operands with one right result."""

    operands: Operands
    one_hot: OneHotProbe | None = None
    """The probe whose result is known exactly without a product; None: integers, whose reference product is exact."""
    grouped: Expectation | None = None
    """What is known of a product of each group."""

    def judge(self, bench: Bench, result: torch.Tensor) -> bool:
        """Whether ``result`` is the right one; if not, ``bench`` has a failure more."""
        if self.grouped is not None:
            return bench.expect_that(result, self.grouped)
        if self.one_hot is not None:
            return bench.expect_one_hot(result, self.one_hot)
        return bench.expect(result, self.operands, name="integers", exact=True)


def exact_probe(bench: Bench) -> Probe:
    """Other numbers each time: cancelling integers where strides let elements be chosen, one-hot lines if in one operand alone.

    Each element of the result then depends on where in memory a GEMM reads.
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
    """One call with an exact probe, by which every element is seen to be read from and written to its place."""
    probe = exact_probe(bench)
    probe.judge(bench, bench.call(probe.operands))


def check_calls(count: int) -> Check:
    """The same exact probe so many times, over memory with other contents each time; none changes the operands."""

    def check(bench: Bench) -> None:
        probe = exact_probe(bench)
        for number in range(1, count + 1):
            with stage(bench, f"call {number} of {count}"):
                if not probe.judge(bench, bench.call(probe.operands)):
                    return

    return check


def keeps_significands(bench: Bench) -> bool:
    """Whether one input times 1 comes out with every bit, by the claims."""
    claims, problem = bench.claims, bench.problem
    own = dtype_info(problem.dtype).unit_roundoff
    held = (claims.accumulate, claims.partials, claims.epilogue_input)
    reads = claims.input_mode in ("ieee", "parts", problem.precision.input_mode)
    return reads and all(dtype_info(dtype).unit_roundoff <= own for dtype in held)


def exact_integers(bench: Bench) -> Operands | None:
    """Integers whose sums every claimed number holds, in any order and grouping; None where K is too large for that."""
    limit, scaled = exact_limit(bench.problem, bench.claims), MOST_SCALED ** max(1, scales_along_k(bench.problem))
    if scaled * MOST_PRODUCT * bench.problem.terms + MOST_ADDED <= limit:
        return bench.given(bench.probes.filled("integers", "integers", general=False))
    if ZEROED * scaled * bench.problem.terms + MOST_ADDED <= limit:
        return bench.given(bench.probes.integers())
    return None


def made(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """A tensor of that layout with these values, in a buffer of its own."""
    return placed(layout, values.device, values.contiguous())


def made_b(problem: Problem, numbers: torch.Tensor) -> torch.Tensor:
    """A b of these numbers [.., K, N], packed if the problem's b is."""
    return made(problem.b, packed(numbers) if problem.encoding else numbers)


def overwrite(operands: Operands, new: Operands) -> None:
    """Give the tensors of ``operands`` the values of ``new``, of the same layouts, on the current stream. Their addresses stay."""
    values = new.named
    for name, tensor in operands.named.items():
        for old, other in zip(parts(tensor), parts(values[name]), strict=True):
            storage_bits(old).copy_(storage_bits(other))


def fill_bits(tensor: torch.Tensor, payload: int) -> None:
    """Fill every element of ``tensor``, and nothing between them, with the bit pattern ``payload``."""
    tensor.view(storage_bits(tensor).dtype).fill_(payload)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bitwise equality of two tensors of one size and dtype, whatever their strides."""
    bits = storage_bits(x).dtype
    return torch.equal(x.contiguous().view(bits), y.contiguous().view(bits))


@contextmanager
def stage(bench: Bench, words: str) -> Iterator[None]:
    """Say in the failures that come up in the block at which stage of the check that was."""
    before = len(bench.failures)
    try:
        yield
    finally:
        bench.failures[before:] = [
            dataclasses.replace(failure, message=f"{words}: {failure.message}") for failure in bench.failures[before:]
        ]
