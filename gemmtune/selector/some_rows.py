"""Verification of a choice at many numbers of rows with one set of operands: smaller Ms use the first rows of the largest."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..choice import Choice, Kernel, Status
from ..numerics.bounds import Claims, exact_limit
from ..numerics.buffers import POISONS, allocate
from ..numerics.expectation import Expectation, OneHotExpectation, referenced
from ..numerics.grouped import random_operands
from ..numerics.guards import Watch, guarded_out
from ..numerics.hard_rows import with_hard_rows
from ..numerics.judging import Judge
from ..numerics.probes import Probes
from ..numerics.slots import tight_problem
from ..numerics.some_rows import first_other_row, some_rows
from ..problem import Problem
from .samples import Sample

Build = Callable[[Choice], Kernel]
"""Function that returns the kernel of a choice."""
Packed = dict[tuple[int, str], torch.Tensor]
"""Packed copies of b, by number or id of their set of operands and format."""


class RowsVerifier:
    """Verifier of choices for ``problem`` or fewer rows, between guard bands, with operands and references made once.

    Each choice runs on the probe with cancelling sums, which gives every element exactly, and on random operands.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        self._probes = Probes(tight_problem(problem), device)
        self._free = self._probes.free_a and self._probes.free_b
        self._extra = self._probes.extra()
        self._random = referenced(problem, self._probes.random(), name="random")
        self._by_limit: dict[int, Expectation] = {}
        self._packed: Packed = {}
        self._inputs = Watch(self._random.operands.named)

    def check(self, choice: Choice, kernel: Kernel) -> Sample:
        """Run the kernel of a choice for the same number of rows or fewer. Propagate its exceptions. Synchronize the device."""
        ratio = 0.0
        for number, expectation in enumerate((*self._exact(choice.claims), self._random)):
            found, error_over_bound = self._wrong(number, expectation, choice, kernel)
            ratio = max(ratio, error_over_bound)
            if found:
                return Sample(status=Status.WRONG_RESULT, error_over_bound=ratio, reason=f"{expectation.name}: {found}")
        changed = [name for name, flag in zip(self._inputs.names, self._inputs.changed(), strict=True) if bool(flag)]
        if changed:
            self._inputs = Watch(self._random.operands.named)
            return Sample(status=Status.WRONG_RESULT, error_over_bound=ratio, reason=f"the call changed its input: {changed[0]}")
        return Sample(status=Status.OK, error_over_bound=ratio)

    def _wrong(self, number: int, expectation: Expectation, choice: Choice, kernel: Kernel) -> tuple[str, float]:
        """Return the error of one call, "" for none, and the largest error over its bound."""
        part = choice.problem
        operands = some_rows(dataclasses.replace(expectation.operands, extra=self._extra), part, 0)
        a, b, *rest = operands.tensors
        payload = POISONS[part.out.dtype][number]
        out, guards = guarded_out(part.out, a.device, payload)
        kernel.run(out, (a, _b(self._packed, id(expectation), choice, b), *rest), operands.scalars)
        judge = Judge(part, choice.claims, operands.extra)
        finding = judge.find(out, expectation.of_first_rows(part.m), payload)
        *state, ratio, broken, where = torch.cat([finding.state, finding.ratio.reshape(1), guards.broken(payload)]).tolist()
        bad = finding.bad_element(state, batched=part.batched)
        return guards.describe(int(where)) if broken else bad.text() if bad is not None else "", ratio

    def _exact(self, claims: Claims) -> list[Expectation]:
        if not self._free:
            return []
        limit = exact_limit(self._problem, claims)
        if limit not in self._by_limit:
            self._by_limit[limit] = OneHotExpectation.of(self._probes.cancel(limit))
        return [self._by_limit[limit]]


class RowBits:
    """Comparison of choices with the ``reference`` on random and hard rows: the first and last ones for a choice with fewer."""

    def __init__(self, reference: Choice, device: torch.device, build: Build) -> None:
        self.problem = reference.problem
        self._build = build
        self._packed: Packed = {}
        drawn = random_operands(tight_problem(self.problem), device)
        hard = with_hard_rows(self.problem, random_operands(tight_problem(self.problem), device))
        self._sets = [("random", drawn), *([("hard", hard)] if hard is not None else [])]
        self._whole = [self._result(i, reference, 0) for i in range(len(self._sets))]

    def difference(self, choices: Sequence[Choice]) -> str | None:
        """Return where the bits of a choice for as many rows or fewer first differ from the reference, or None."""
        found = ((choice.problem.m, self._difference(choice)) for choice in choices)
        return next((f"M = {m}: {reason}" for m, reason in found if reason is not None), None)

    def _difference(self, choice: Choice) -> str | None:
        last = self.problem.m - choice.problem.m
        for i, (name, _) in enumerate(self._sets):
            for begin in dict.fromkeys((0, last)):
                row = first_other_row(self._whole[i], self._result(i, choice, begin), begin)
                if row is not None:
                    rows = f"{name} rows {begin} to {begin + choice.problem.m - 1}"
                    return f"{rows} have other bits alone than among {self.problem.m} rows, first row {row}"
        return None

    def _result(self, i: int, choice: Choice, begin: int) -> torch.Tensor:
        """Return the result of a choice on the rows of a set of operands from ``begin`` on."""
        part = choice.problem
        operands = some_rows(self._sets[i][1], part, begin)
        if operands.offs is not None and not part.divides_terms:
            operands = dataclasses.replace(operands, offs=(operands.offs - begin).clamp(0, part.m))
        a, b, *rest = operands.tensors
        out = allocate(part.out, a.device)
        self._build(choice).run(out, (a, _b(self._packed, i, choice, b), *rest), operands.scalars)
        return out


def _b(packed: Packed, operands: int, choice: Choice, b: torch.Tensor) -> torch.Tensor:
    """Return b of a set of operands, packed if the choice needs it. Packed copies of one format are kept for the next M."""
    name = choice.packed_format
    if name is None:
        return b
    if any(kept != name for _, kept in packed):
        packed.clear()
    if (operands, name) not in packed:
        packed[operands, name] = choice.pack(b)
    return packed[operands, name]
