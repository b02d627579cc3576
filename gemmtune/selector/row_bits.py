"""Bits of rows in batches of other sizes, compared with those of one reference choice at the largest M."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..choice import Choice, Kernel
from ..numerics.buffers import allocate
from ..numerics.grouped import random_operands
from ..numerics.hard_rows import with_hard_rows
from ..numerics.slots import tight_problem
from ..numerics.some_rows import first_other_row, some_rows

Build = Callable[[Choice], Kernel]
"""Function that returns the kernel of a choice."""


class RowBits:
    """Comparison of choices with the ``reference`` on random and hard rows: the first and last ones for a choice with fewer."""

    def __init__(self, reference: Choice, device: torch.device, build: Build) -> None:
        self.problem = reference.problem
        self._build = build
        self._packed: dict[tuple[int, str], torch.Tensor] = {}
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
        if operands.offs is not None:
            operands = dataclasses.replace(operands, offs=(operands.offs - begin).clamp(0, part.m))
        a, b, *rest = operands.tensors
        out = allocate(part.out, a.device)
        self._build(choice).run(out, (a, self._b(i, choice, b), *rest), operands.scalars)
        return out

    def _b(self, i: int, choice: Choice, b: torch.Tensor) -> torch.Tensor:
        """Return b, packed if the choice needs it. Packed copies are kept."""
        name = choice.packed_format
        if name is None:
            return b
        if (i, name) not in self._packed:
            self._packed[i, name] = choice.pack(b)
        return self._packed[i, name]
