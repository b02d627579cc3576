"""Cases in a worker process. A GEMM that crashes, hangs or breaks its device fails one case and not the run."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...declaration.subject import Impossible, Refused, Subject, SubjectSpec, is_fatal, load
from ...declaration.traits import Traits
from ...errors import GemmtuneError, SubjectError, TraitsError, UnavailableError
from ...untrusted.candidate import Candidate, CandidateEnded
from ...untrusted.conduct import Conduct, Finding
from ...untrusted.subject import Unsuitable, subject_of
from ...untrusted.target import Target, roots_of
from ...workers.worker import Worker, WorkerCrashed, WorkerTimedOut
from ..bench.bench import Bench
from ..bench.outcome import IMPOSSIBLE, CaseStatus, Failure, NoResult, Outcome
from ..cases.case import Case
from ..cases.scope import Scope
from ..diagnose.match import INPUT_RETURNED
from ..properties.table import property_named

IMPORT_TIMEOUT_S = 60.0
"""Minimum seconds for importing the GEMM, even if the time limit of a case is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Facts about the GEMM, which the parent process never imports, and about the device."""

    name: str
    traits: Traits
    device: str
    """cpu, or cuda with its number."""
    device_name: str
    sm: int
    """Compute capability times ten, or 0 off CUDA."""
    trusted: str = ""
    """Reason for which a GEMM of others could deceive the suite, or "" if it could not."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return torch.device(self.device).type


class InProcessRunner:
    """Runner of cases in this process, for debugging and for harmless GEMMs."""

    def __init__(self, spec: SubjectSpec, device: str) -> None:
        self._spec = spec
        self._device = device

    def describe(self) -> Ground:
        """Return the GEMM's name and declarations, and the device."""
        return _describe(self._spec, self._device)

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        """Run one case. Without ``examine``, a wrong result is not diagnosed."""
        return _job(self._spec, case, self._device, examine)

    def close(self) -> None:
        """Do nothing: there is no worker to end."""


class IsolatedRunner:
    """Runner in a worker process, replaced if a case kills it, takes over ``timeout_s`` with compilation, or breaks the device."""

    def __init__(self, spec: SubjectSpec, device: str, *, timeout_s: float = 120.0) -> None:
        self._spec = spec
        self._device = device
        self._timeout_s = timeout_s
        self._worker: Worker | None = None

    def describe(self) -> Ground:
        """Return the GEMM's name and declarations, and the device.

        Raises SubjectError if the GEMM cannot be loaded, or its import crashed or hung, and TraitsError for illegal declarations.
        """
        try:
            return self._imported(self._ready())
        except (WorkerCrashed, WorkerTimedOut) as error:
            raise SubjectError(f"{self._spec.target}: the process that imported it: {error}") from error

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        """Run one case. A crash or hang of the worker becomes the status. Without ``examine``, nothing is diagnosed."""
        try:
            outcome = self._ready().call(_job, self._spec, case, self._device, examine, timeout_s=self._timeout_s)
        except WorkerTimedOut as error:
            return _bad(case, CaseStatus.TIMED_OUT, str(error))
        except WorkerCrashed as error:
            return _bad(case, CaseStatus.CRASHED, str(error))
        if outcome.status is CaseStatus.CRASHED:  # the CUDA context is unusable
            self.close()
        return outcome

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = Worker(gpu=self._device != "cpu")
            self._imported(self._worker)
        return self._worker

    def _imported(self, worker: Worker) -> Ground:
        return worker.call(_describe, self._spec, self._device, timeout_s=max(self._timeout_s, IMPORT_TIMEOUT_S))


NOT_SHARED = ("large-offsets", "large-sizes")
"""Properties whose operands do not fit into the memory that is shared with an untrusted process."""
OF_ITS_PROCESS = (*NOT_SHARED, "result", "unwritten", "fresh-pointers", "changed-in-place", "threads", "streams", "graph-replay")
"""Properties of memory, threads and streams in the GEMM's own process."""
HERE = {"threads": False, "streams": False, "capturable": False}
"""Declarations that calls of another process cannot show."""


class UntrustedRunner:
    """Runner of cases for a subject whose calls go to another process. A case in which that process ends is a failure."""

    def __init__(self, candidate: Candidate, subject: Subject) -> None:
        self._subject = subject
        self._candidate = candidate

    def describe(self) -> Ground:
        """Return the GEMM's name and the declarations that its calls can show, and the device."""
        ground = _ground(self._subject, str(self._candidate.device))
        return dataclasses.replace(ground, traits=ground.traits.changed(HERE))

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        before = self._candidate.findings
        try:
            outcome = _outcome(self._subject, case, self._candidate.device, examine=examine)
        except CandidateEnded as error:
            return _bad(case, CaseStatus.TIMED_OUT if error.kind is Conduct.HUNG else CaseStatus.CRASHED, str(error))
        if outcome.status is CaseStatus.CRASHED:
            self.close()
        return _with_conduct(outcome, [x for x in self._candidate.findings if x not in before])

    def close(self) -> None:
        """End the process of the GEMM."""
        self._candidate.close()


ON_MEMORY = {Conduct.ALIAS: ("result", INPUT_RETURNED), Conduct.INPUTS: ("inputs-unchanged", "")}
"""Conduct that the copies of operands and results hide from this process, with the property and diagnosis of a failure."""


def _with_conduct(outcome: Outcome, findings: Iterable[Finding]) -> Outcome:
    """Return an outcome with a failure for each new finding about memory, unless its property failed already."""
    failed = {failure.property_name for failure in outcome.failures}
    shown = [(*ON_MEMORY[x.kind], f"it {x}") for x in findings if x.kind in ON_MEMORY]
    more = [Failure(property_name=of, message=message, diagnosis=bug) for of, bug, message in shown if of not in failed]
    if not more:
        return outcome
    status = CaseStatus.FAILED if outcome.status is CaseStatus.PASSED else outcome.status
    return dataclasses.replace(outcome, status=status, failures=(*outcome.failures, *more))


class WalledRunner:
    """Runner for a GEMM of others: its values are judged out of its reach, and only what needs its process is judged in it."""

    def __init__(self, spec: SubjectSpec, device: str, *, timeout_s: float) -> None:
        self._spec = spec
        module, _, name = spec.target.partition(":")
        target = Target(kind="module", path=module, name=name, roots=roots_of(module), words=spec.target)
        self._candidate = Candidate(target, device, timeout_s=timeout_s)
        self._outside: UntrustedRunner | None = None
        self._inside = IsolatedRunner(spec, device, timeout_s=timeout_s)

    def describe(self) -> Ground:
        """Do what ``IsolatedRunner.describe`` does. Without a process for the GEMM, say so and trust it."""
        return self._ground

    @functools.cached_property
    def _ground(self) -> Ground:
        try:
            of_file = Traits.from_file(Path(self._spec.traits_file)) if self._spec.traits_file else {}
            subject = subject_of(self._candidate, of_file | dict(self._spec.declared))
        except (UnavailableError, Unsuitable) as error:
            return dataclasses.replace(self._inside.describe(), trusted=str(error))
        self._outside = UntrustedRunner(self._candidate, subject)
        return _ground(subject, str(self._candidate.device))

    def run(self, case: Case, *, examine: bool = True) -> Outcome:
        self.describe()
        runner = self._inside if self._outside is None or case.property_name in OF_ITS_PROCESS else self._outside
        return runner.run(case, examine=examine)

    def close(self) -> None:
        """End the processes of the GEMM."""
        self._candidate.close()
        self._inside.close()


Runner = InProcessRunner | IsolatedRunner | UntrustedRunner | WalledRunner
_loaded = functools.cache(load)


def _describe(spec: SubjectSpec, device: str) -> Ground:
    return _ground(_loaded(spec), device)


def _ground(subject: Subject, device: str) -> Ground:
    where = torch.device(device)
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        name, sm = properties.name, properties.major * 10 + properties.minor
    else:
        name, sm = "CPU", 0
    return Ground(name=subject.name, traits=subject.traits, device=device, device_name=name, sm=sm)


def _job(spec: SubjectSpec, case: Case, device: str, examine: bool) -> Outcome:
    return _outcome(_loaded(spec), case, torch.device(device), examine=examine)


def _outcome(subject: Subject, case: Case, device: torch.device, *, examine: bool) -> Outcome:
    """Return the outcome of a case. An error that no case expects is one."""
    try:
        return judge(subject, case, device, examine=examine)
    except (SubjectError, TraitsError, CandidateEnded):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if is_fatal(error):
            return _bad(case, CaseStatus.CRASHED, reason)
        if isinstance(error, GemmtuneError):
            raise
        return _bad(case, CaseStatus.RAISED, reason)


def _bad(case: Case, status: CaseStatus, reason: str) -> Outcome:
    return Outcome(case=case, status=status, reason=reason, failures=(Failure(property_name=case.property_name, message=reason),))


def judge(subject: Subject, case: Case, device: torch.device, *, examine: bool = True) -> Outcome:
    """Run a case and return its outcome. Without ``examine``, a wrong result is not diagnosed.

    Raises any exception that made the device unusable, or that a fault of the suite caused.
    """
    started = time.perf_counter()
    scope = Scope(traits=subject.traits, device_type=device.type)
    bench = Bench(subject, case, device, examine=examine)
    status, reason, complete = CaseStatus.PASSED, "", False
    try:
        with subject.conditions(bench.problem), contextlib.suppress(NoResult):
            property_named(case.property_name).check(bench)
            complete = True
    except Refused as refusal:
        status = CaseStatus.REFUSED if scope.may_refuse(case) else CaseStatus.RAISED
        reason = str(refusal)
    except Impossible as obstacle:
        status, reason = CaseStatus.REFUSED, f"{IMPOSSIBLE}{obstacle}"
    failures = tuple(bench.failures)
    if status is CaseStatus.RAISED:
        failures += (Failure(property_name=case.property_name, message=f"raised for what it declares: {reason}"),)
    elif failures:
        status = CaseStatus.FAILED
    return Outcome(
        case=case,
        status=status,
        failures=failures,
        reason=reason,
        choice=bench.choice,
        error_over_bound=bench.error_over_bound,
        grade=bench.grade,
        seconds=time.perf_counter() - started,
        complete=complete,
    )
