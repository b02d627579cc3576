"""What a run knows of one of its cases: the outcome, or why it was not run."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.outcome import Outcome, Verdict
from ..cases.case import Case

__all__ = ["Record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case with its outcome; None where it was not run, and ``reason`` says why.

    ``known`` is the reason with which the case is listed as known to fail, None if it is not.
    """

    case: Case
    outcome: Outcome | None
    reason: str = ""
    known: str | None = None
    drawn: bool = False
    sanitized: bool = False
    """Found by compute-sanitizer, which has to be there again to see it. It is none of the cases that are judged one by one."""

    @property
    def executed(self) -> bool:
        """The GEMM was called, and gave an answer or failed to."""
        return self.outcome is not None and self.outcome.verdict is not Verdict.REFUSED and not self.sanitized

    @property
    def refused(self) -> bool:
        """The GEMM said that it does not do this."""
        return self.outcome is not None and self.outcome.verdict is Verdict.REFUSED

    @property
    def bad(self) -> bool:
        """It failed, known or not."""
        return self.outcome is not None and self.outcome.verdict.bad

    @property
    def failed(self) -> bool:
        """It failed, and is not known to."""
        return self.bad and self.known is None

    @property
    def known_failure(self) -> bool:
        """It failed as it is known to."""
        return self.bad and self.known is not None

    @property
    def surprise(self) -> bool:
        """It is listed as known to fail, and passed."""
        return self.known is not None and self.outcome is not None and self.outcome.verdict is Verdict.PASSED
