"""Values of a GEMM that nobody vouches for, by cases of the conformance suite."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ..conformance.bench.outcome import CaseStatus, Outcome
from ..conformance.cases.case import Case
from ..conformance.options import RunOptions
from ..conformance.runs.isolation import NOT_SHARED, UntrustedRunner
from ..conformance.runs.run import Run
from ..declaration.subject import Subject
from ..untrusted.candidate import Candidate
from .levels import Level
from .sizes import dtype_of

MOST_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Outcomes of the suite's cases."""

    outcomes: tuple[Outcome, ...] = ()

    @property
    def executed(self) -> tuple[Outcome, ...]:
        """Outcomes in which the GEMM did not refuse."""
        return tuple(x for x in self.outcomes if x.status is not CaseStatus.REFUSED)

    @property
    def bad(self) -> tuple[Outcome, ...]:
        """Outcomes that count against the GEMM."""
        return tuple(x for x in self.outcomes if x.status.bad)

    @property
    def refused(self) -> int:
        """Number of cases that the GEMM refused."""
        return len(self.outcomes) - len(self.executed)


def judge_values(subject: Subject, candidate: Candidate, level: Level) -> Values:
    """Return the outcomes of a sample of the suite's cases. The sample and the numbers differ from run to run."""
    runner = UntrustedRunner(candidate, subject)
    options = RunOptions(
        backend=str(candidate.target), device=str(candidate.device), max_cases=level.cases, max_seconds=level.values_s,
        seed=secrets.randbelow(MOST_SEED), strict_lists=False, dtype=() if subject.traits.dtypes else dtype_of(candidate.inputs),
    )  # fmt: skip
    run = Run(options, runner.describe(), runner)
    return Values(outcomes=tuple(_outcomes(run, run.cases())))


def _outcomes(run: Run, cases: Sequence[Case]) -> list[Outcome]:
    found: list[Outcome] = []
    for case in cases:
        if case.property_name in NOT_SHARED:
            continue
        records = run.judge_or_replace(case, lambda x: x.changed(seed=secrets.randbelow(MOST_SEED)))
        found += [record.outcome for record in records if record.outcome is not None]
    return found
