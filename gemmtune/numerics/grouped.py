"""Expected results of grouped products: difficult offsets, inputs with exact results, and random inputs within the bound.

The offsets are known here, so a reference is one product for each group. Each pattern of offsets has separate operands:

==============  ==================================================================================================================
``integers``    −1, 0 and 1, different in every group: exact. Finds the matrix of a neighbouring group, rows at a boundary that went
                to the wrong group, rows and groups left out, offsets off by one.
``one-hot``     one row of a, or column of b, picks one number for each result: bit for bit. Finds inputs that are narrowed.
``poisoned``    NaN where no group or only one group may read: rows behind the last offset, the first and last rows of a group's
                matrix. Finds reads across boundaries that a neighbouring zero hides.
``random``      standard normal numbers, within the bound of each group's sums.
==============  ==================================================================================================================
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..problem import Layout, Problem
from ..problem.grouped_compositions import spans
from .buffers import allocate, distinct, distinct_size, held_size, overlapping, placed
from .expectation import Expectation
from .grouped_expectation import GroupedExpectation, of_rows, of_terms
from .operands import Operands, drawn_routes, fill_random, random_scale, weight_unit
from .probes import Probes
from .reference import regions

SEED = 23
EXPENSIVE_MACS = {"cpu": 2**30, "cuda": 2**40}
"""Number of multiplications above which fewer patterns are tried."""


def random_operands(problem: Problem, device: torch.device) -> Operands:
    """Return random operands of any problem, with offsets for groups and the epilogue's operands. Equal problems get equal ones."""
    probes = Probes(problem, device)
    drawn = GroupedProbes(problem, device).random().operands if problem.groups else probes.random()
    return dataclasses.replace(drawn, extra=probes.extra())


def grouped_expectations(problem: Problem, device: torch.device) -> list[Expectation]:
    """Return all expectations of a grouped problem, random data last."""
    made = GroupedProbes(problem, device)
    cheap = problem.flops <= 2 * EXPENSIVE_MACS["cpu" if device.type == "cpu" else "cuda"]
    patterns = made.patterns
    names = list(patterns) if cheap else ["uneven", "one group has all"]
    found: list[Expectation] = [made.integers(name, patterns[name]) for name in names]
    one_hot = made.one_hot(patterns["uneven"])
    found += [one_hot] if one_hot is not None else []
    poisoned = made.poisoned(patterns["ends early"])
    found += [poisoned] if poisoned is not None else []
    return [*found, made.random(patterns["uneven"])]


def awkward_ends(total: int, groups: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the group ends of patterns on which kernels go wrong, by name, two of them with rows behind the last group."""
    generator = torch.Generator().manual_seed(SEED)
    cuts = torch.randint(0, total + 1, (groups - 1,), generator=generator).sort().values.tolist()
    yield "uneven", [*cuts, total]
    yield "even", [total * (g + 1) // groups for g in range(groups)]
    middle = groups // 2
    yield "one group has all", [0] * middle + [total] * (groups - middle)
    # Every second group is empty, starting with the first. The last but one has a single row.
    every = [max(total - 1, 0) * (g // 2 + g % 2) // max(groups // 2, 1) for g in range(groups - 1)]
    yield "empty groups", [*every, total]
    covered = max(total - 3, 0)
    yield "ends early", [covered * (g + 1) // groups for g in range(groups)]
    yield "nothing", [0] * groups


class GroupedProbes:
    """Source of operands of one problem with their expected results, with new numbers each time."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = SEED) -> None:
        self.problem = problem
        self.device = device
        self.total = problem.k if problem.divides_terms else problem.m
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.patterns = dict(awkward_ends(self.total, problem.groups))
        """Group ends by name of the pattern."""
        self._names = itertools.cycle(self.patterns)

    def next_integers(self) -> GroupedExpectation:
        """Return an expectation of small integers for the next pattern of group ends."""
        name = next(self._names)
        return self.integers(name, self.patterns[name])

    def integers(self, name: str, ends: list[int]) -> GroupedExpectation:
        """Return an expectation of small integers in all operands."""
        return self._expected(f"integers, {name}", self._integers(self.problem.a), self._small(), ends, exactness="integers")

    def random(self, ends: list[int] | None = None) -> GroupedExpectation:
        """Return an expectation of standard normal numbers that are never read as 0, by default for uneven groups."""
        ends = self.patterns["uneven"] if ends is None else ends
        return self._expected("random", self._normal(self.problem.a), self._any_b(), ends)

    def one_hot(self, ends: list[int]) -> GroupedExpectation | None:
        """Return an expectation of one-hot rows of a over a random b, or None if a's elements share memory."""
        problem = self.problem
        if overlapping(problem.a) or distinct_size(problem.a) != problem.a.size or not problem.k:
            return None
        lines = problem.a.size[0]
        rows, terms = torch.arange(lines, device=self.device), torch.zeros(problem.a.size, device=self.device)
        pieces = spans(ends, problem.k) if problem.divides_terms else [(0, problem.k)]
        for begin, end in pieces:
            if begin < end:
                index = torch.randint(begin, end, (lines,), generator=self.generator, device=self.device)
                index[0], index[-1] = begin, end - 1
                terms[rows, index] = 1
        a = placed(problem.a, self.device, terms)
        one_number = not problem.gated and problem.weights is None
        return self._expected("one-hot a", a, self._any_b(), ends, exactness="bits" if one_number else "")

    def poisoned(self, ends: list[int]) -> GroupedExpectation | None:
        """Return an expectation with NaN behind the last group and infinities at the ends of one group's matrix or terms."""
        problem = self.problem
        if any(overlapping(x) or distinct_size(x) != x.size for x in (problem.a, problem.b)) or problem.epilogue is not None:
            return None
        a, b = self._normal(problem.a), self._any_b()
        routes: Mapping[str, torch.Tensor] | None = None
        if problem.divides_terms:
            distinct(a)[:, ends[-1] :] = math.nan
            distinct(b)[ends[-1] :] = math.nan
            begin, end = spans(ends, self.total)[problem.groups // 2]
            if begin < end:
                distinct(b)[begin, -1] = math.inf
                distinct(a)[-1, end - 1] = math.nan
        else:
            # NaN in rows of a that no group reads.
            routes = drawn_routes(problem, self.generator)
            picked = routes["rows"].long() if "rows" in routes else torch.arange(self.total, device=self.device)
            read = torch.zeros(problem.a.size[0], dtype=torch.bool, device=self.device)
            read[picked[: ends[-1]]] = True
            lines = distinct(a)  # torch cannot mask 8-bit floats
            lines.copy_(torch.where(read.unsqueeze(-1), lines.float(), math.nan))
            # Infinity and NaN in the first and the last row of one group's matrix, and in its last row of a.
            begin, end = spans(ends, self.total)[problem.groups // 2]
            if b.is_floating_point():
                distinct(b)[problem.groups // 2, 0, -1] = math.inf
                distinct(b)[problem.groups // 2, -1, 0] = math.nan
            if begin < end:
                distinct(a)[picked[end - 1], -1] = math.nan
        return self._expected("poisoned", a, b, ends, routes=routes)

    def _integers(self, layout: Layout) -> torch.Tensor:
        low = -1 if layout.dtype != torch.uint8 else 0
        values = torch.randint(low, 2, held_size(layout), generator=self.generator, device=self.device)
        return placed(layout, self.device, values)

    def _small(self) -> torch.Tensor:
        """Draw a b of small integers, which every encoding holds."""
        return self._integers(self.problem.b) if not self.problem.encoding else self._any_b()

    def _any_b(self) -> torch.Tensor:
        """Draw a b of normal numbers, or of all integers that it can hold."""
        layout = self.problem.b
        if layout.dtype.is_floating_point:
            return self._normal(layout)
        bounds = torch.iinfo(layout.dtype)
        values = torch.randint(bounds.min, bounds.max + 1, held_size(layout), generator=self.generator, device=self.device)
        return placed(layout, self.device, values)

    def _scale(self, layout: Layout | None, *, exact: bool) -> torch.Tensor | None:
        """Draw scales of any value, or powers of two if ``exact``."""
        if layout is None or not exact:
            return None if layout is None else random_scale(layout, self.generator, self.device, unit=weight_unit(self.problem))
        powers = torch.randint(0, 3, layout.size, generator=self.generator, device=self.device)
        return placed(layout, self.device, torch.exp2(powers.double()))

    def _normal(self, layout: Layout) -> torch.Tensor:
        values = torch.empty(held_size(layout), dtype=torch.float32, device=self.device)
        fill_random(values, self.generator)
        least = 2.0**-6
        return placed(layout, self.device, torch.where(values.abs() < least, least, values))

    def _expected(
        self,
        name: str,
        a: torch.Tensor,
        b: torch.Tensor,
        ends: list[int],
        *,
        exactness: str = "",
        routes: Mapping[str, torch.Tensor] | None = None,
    ) -> GroupedExpectation:
        problem = self.problem
        if routes is None:
            routes = drawn_routes(problem, self.generator, exact=bool(exactness))
        assert problem.offs is not None
        extra = tuple(torch.empty(0, device=self.device) for _ in (problem.epilogue.operands if problem.epilogue else ()))
        operands = Operands(
            a=a, b=b, out=allocate(problem.out, self.device), inp=None, extra=extra, alpha=1.0, beta=0.0,
            scale_a=self._scale(problem.scale_a, exact=bool(exactness)),
            scale_b=self._scale(problem.scale_b, exact=bool(exactness)),
            encoding=problem.encoding,
            offs=placed(problem.offs, self.device, torch.tensor(ends, device=self.device)), **routes,
        )  # fmt: skip
        return expectation_of(problem, operands, spans(ends, self.total), name=name, exactness=exactness)


def expectation_of(
    problem: Problem, operands: Operands, pieces: Sequence[tuple[int, int]], *, name: str, exactness: str = ""
) -> GroupedExpectation:
    """Return the expectation for operands whose groups have these beginnings and ends, by a float64 product for each group."""
    find = of_terms if problem.divides_terms else of_rows
    lines, each = problem.out.size[-2], problem.m // max(problem.out.size[-2], 1) if problem.slots is not None else 1
    whole = regions(problem.batch, lines, problem.n, each * -(-problem.k // problem.batch), operands.a.device)
    found = [find(problem, operands, list(pieces), region) for region in whole]
    values, magnitudes = zip(*found, strict=True)
    return GroupedExpectation(
        name=name,
        operands=operands,
        regions=whole,
        values=values,
        magnitudes=magnitudes,
        exactness=exactness,
        terms=tuple(end - begin for begin, end in pieces) if problem.divides_terms else (),
    )
