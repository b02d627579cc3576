"""Properties run on GEMMs that are Python functions made in a test, right ones and ones broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemmtune.conformance.bench.outcome import Outcome, Verdict
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
    """torch's own operations, with everything declared that they have on a CPU."""
    return NamespaceSubject("torch", torch, Traits(**(TORCH_TRAITS | declared)))


def subject_of(function: Callable[..., object], **declared: Any) -> FunctionSubject:
    """A function as a GEMM."""
    return FunctionSubject("made", function, Traits(**declared))


def cases_of(name: str, subject: Subject, level: Level = Level.SMOKE, device: str = "cpu") -> list[Case]:
    """The cases of a property within what the subject declares."""
    scope = Scope(traits=subject.traits, device_type=device, level=level)
    wanted = property_named(name)
    assert wanted.needs(scope) is None, wanted.needs(scope)
    return list(wanted.cases(scope))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes small products in the calling thread, which is quicker where other tests run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def failed(subject: Subject, cases: Iterable[Case], device: torch.device = CPU) -> list[Outcome]:
    """The outcomes that count against the GEMM."""
    with one_thread():
        return [o for o in (judge(subject, case, device) for case in cases) if o.verdict.bad]


def texts(outcomes: Iterable[Outcome]) -> str:
    """All failures, a line each."""
    return "\n".join(f"{o.case.id}: {f.property_name}: {f.message} [{f.diagnosis}]" for o in outcomes for f in o.failures)


def assert_conforms(name: str, subject: Subject, *, every: int = 1, device: torch.device = CPU) -> None:
    """Every case of the property (or every so-manyth) passes or is refused, and some pass."""
    with one_thread():
        outcomes = [judge(subject, case, device) for case in cases_of(name, subject, device=device.type)[::every]]
    bad = [o for o in outcomes if o.verdict.bad]
    assert not bad, texts(bad)
    assert any(o.verdict is Verdict.PASSED for o in outcomes), outcomes[:1]


def assert_found(text: str, name: str, subject: Subject, *, device: torch.device = CPU) -> None:
    """Some case of the property fails with ``text`` in the line of a failure (see ``texts``). The cases after it do not run."""
    lines: list[str] = []
    for case in cases_of(name, subject, device=device.type):
        lines.append(texts(failed(subject, [case], device)))
        if text in lines[-1]:
            return
    raise AssertionError(f"{text!r} is not in\n" + "\n".join(filter(None, lines)))
