"""Verification of a choice at many numbers of rows with one set of operands: smaller Ms use the first rows of the largest."""

from __future__ import annotations

import dataclasses

import torch

from ..choice import Choice, Kernel, Status
from ..numerics.bounds import Claims, exact_limit
from ..numerics.buffers import POISONS
from ..numerics.expectation import Expectation, OneHotExpectation, referenced
from ..numerics.guards import Watch, guarded_out
from ..numerics.judging import Judge
from ..numerics.probes import Probes
from ..numerics.slots import tight_problem
from ..numerics.some_rows import some_rows
from ..problem import Problem
from .samples import Sample


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
        self._packed: tuple[str, dict[int, torch.Tensor]] = ("", {})
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
        kernel.run(out, (a, self._b(expectation, choice, b), *rest), operands.scalars)
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

    def _b(self, expectation: Expectation, choice: Choice, b: torch.Tensor) -> torch.Tensor:
        """Return b, packed if the choice needs it. The packed b is kept for the next M."""
        name = choice.packed_format
        if name is None:
            return b
        if self._packed[0] != name:
            self._packed = (name, {})
        packed = self._packed[1]
        if id(expectation) not in packed:
            packed[id(expectation)] = choice.pack(b)
        return packed[id(expectation)]
