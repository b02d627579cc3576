"""Values of an untrusted GEMM: the conformance suite, with the GEMM in a process of its own and with seeds that nobody knows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..conformance.bench.outcome import Failure, Outcome, Verdict
from ..conformance.cases.case import Case
from ..conformance.options import RunOptions
from ..conformance.runs.isolation import Ground, judge
from ..conformance.runs.run import Run
from ..declaration.subject import Subject
from ..untrusted.candidate import Candidate, CandidateEnded
from .levels import Level

MOST_SEED = 2**31
NOT_HERE = ("large-offsets",)
"""Properties whose operands do not fit into the memory that is shared."""


class UntrustedRunner:
    """Runner of cases for a subject whose calls go to another process. A case in which that process ends is a failure."""

    def __init__(self, subject: Subject, candidate: Candidate) -> None:
        self._subject = subject
        self._candidate = candidate

    def describe(self) -> Ground:
        """Return the GEMM's name and declarations, and the device."""
        device, name, sm = self._candidate.device, "CPU", 0
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            name, sm = found.name, found.major * 10 + found.minor
        return Ground(name=self._subject.name, traits=self._subject.traits, device=str(device), device_name=name, sm=sm)

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        """Run one case."""
        try:
            return judge(self._subject, case, self._candidate.device, examine=examine)
        except CandidateEnded as error:
            failure = Failure(property_name=case.property_name, message=str(error))
            return Outcome(case=case, verdict=Verdict.CRASHED, reason=str(error), failures=(failure,))

    def close(self) -> None:
        """Do nothing: the candidate belongs to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Outcomes of the suite's cases."""

    outcomes: tuple[Outcome, ...] = ()

    @property
    def executed(self) -> tuple[Outcome, ...]:
        """Outcomes in which the GEMM did not refuse."""
        return tuple(x for x in self.outcomes if x.verdict is not Verdict.REFUSED)

    @property
    def bad(self) -> tuple[Outcome, ...]:
        """Outcomes that count against the GEMM."""
        return tuple(x for x in self.outcomes if x.verdict.bad)

    @property
    def refused(self) -> int:
        """Number of cases that the GEMM refused."""
        return len(self.outcomes) - len(self.executed)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Input dtypes that the GEMM took."""
        return tuple(dict.fromkeys(x.case.dtype for x in self.executed))


def judge_values(subject: Subject, candidate: Candidate, level: Level) -> Values:
    """Return the outcomes of a sample of the suite's cases. The sample and the numbers differ from run to run."""
    runner = UntrustedRunner(subject, candidate)
    options = RunOptions(
        backend=str(candidate.target), device=str(candidate.device), max_cases=level.cases, max_seconds=level.values_s,
        seed=secrets.randbelow(MOST_SEED), strict_lists=False,
    )  # fmt: skip
    run = Run(options, runner.describe(), runner)
    return Values(outcomes=tuple(_outcomes(run, run.cases())))


def _outcomes(run: Run, cases: Sequence[Case]) -> list[Outcome]:
    found: list[Outcome] = []
    for case in cases:
        if case.property_name in NOT_HERE:
            continue
        record = run.judge(case.changed(seed=secrets.randbelow(MOST_SEED)))
        if record.outcome is not None:
            found.append(record.outcome)
    return found
