"""Properties run on GEMMs that a test makes from Python functions, right or broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.properties.table import property_named
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.subject import FunctionSubject, NamespaceSubject, Subject
from gemmtune.declaration.traits import Traits

CPU = torch.device("cpu")
TORCH_TRAITS: dict[str, Any] = {
    "alpha": True, "beta": True, "out": True, "empty": True, "threads": True, "bias": ("n", "mn", "m1", "1n", "scalar"),
}  # fmt: skip


def torch_subject(**declared: Any) -> NamespaceSubject:
    """Return torch's own operations, with everything declared that they support on a CPU."""
    return NamespaceSubject("torch", torch, Traits(**(TORCH_TRAITS | declared)))


def subject_of(function: Callable[..., object], **declared: Any) -> FunctionSubject:
    """Return a function as a GEMM."""
    return FunctionSubject("made", function, Traits(**declared))


def cases_of(name: str, subject: Subject, level: Level = Level.SMOKE, device: str = "cpu") -> list[Case]:
    """Return the cases of a property within the subject's declarations."""
    scope = Scope(traits=subject.traits, device_type=device, level=level)
    wanted = property_named(name)
    assert wanted.needs(scope) is None, wanted.needs(scope)
    return list(wanted.cases(scope))


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute small products in the calling thread, which is faster while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def failed(subject: Subject, cases: Iterable[Case], device: torch.device = CPU) -> list[Outcome]:
    """Return the outcomes that count against the GEMM."""
    with one_thread():
        return [o for o in (judge(subject, case, device) for case in cases) if o.status.bad]


def texts(outcomes: Iterable[Outcome]) -> str:
    """Return all failures, one line each."""
    return "\n".join(f"{o.case.id}: {f.property_name}: {f.message} [{f.diagnosis}]" for o in outcomes for f in o.failures)


def assert_conforms(name: str, subject: Subject, *, every: int = 1, device: torch.device = CPU) -> None:
    """Check that every case of the property, or every ``every``-th one, passes or is refused, and that some pass."""
    with one_thread():
        outcomes = [judge(subject, case, device) for case in cases_of(name, subject, device=device.type)[::every]]
    bad = [o for o in outcomes if o.status.bad]
    assert not bad, texts(bad)
    assert any(o.status is CaseStatus.PASSED for o in outcomes), outcomes[:1]


def assert_found(text: str, name: str, subject: Subject, *, device: torch.device = CPU) -> None:
    """Check that a case of the property fails with ``text`` in a line of ``texts``. Later cases do not run."""
    lines: list[str] = []
    for case in cases_of(name, subject, device=device.type):
        lines.append(texts(failed(subject, [case], device)))
        if text in lines[-1]:
            return
    raise AssertionError(f"{text!r} is not in\n" + "\n".join(filter(None, lines)))
