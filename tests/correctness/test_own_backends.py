"""Every backend of ours through the conformance suite: op × dtype × strides × scalars, each property at level smoke.

One test for each backend and property; the cases of a property run one after the other, and a failure names those that failed.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from gemmtune.conformance.case import Case
from gemmtune.conformance.isolation import InProcessRunner
from gemmtune.conformance.outcome import Outcome, Verdict
from gemmtune.conformance.properties import PROPERTIES, property_named
from gemmtune.conformance.scope import Level, Scope
from gemmtune.conformance.subject import SubjectSpec

ON_CPU = ("aten", "cpp")
ON_GPU = ("aten", "cublaslt", "triton")
EVERY = 3
"""On a CPU each third case, another third for each property: `gemmtune conformance gemmtune.conformance.own:cpp` runs all."""


@functools.cache
def runner(backend: str, device: str) -> InProcessRunner:
    return InProcessRunner(SubjectSpec(target=f"gemmtune.conformance.own:{backend}"), device)


def cases_of(name: str, backend: str, device: str) -> list[Case]:
    scope = Scope(traits=runner(backend, device).describe().traits, device_type=device, level=Level.SMOKE)
    wanted = property_named(name)
    reason = wanted.needs(scope)
    if reason is not None:
        pytest.skip(f"{backend} on {device}: {reason}")
    return list(wanted.cases(scope))


def check(backend: str, name: str, device: str, every: int = 1) -> None:
    cases = cases_of(name, backend, device)
    start = sum(map(ord, name)) % every
    outcomes = [runner(backend, device).run(case) for case in cases[start::every] or cases[:1]]
    assert_conforming(outcomes)


def assert_conforming(outcomes: list[Outcome]) -> None:
    counts = Counter(o.verdict for o in outcomes)
    bad = [o for o in outcomes if o.verdict.bad]
    lines = [
        f"{o.case.id} ({o.choice}): {o.verdict}: " + "; ".join(f"{f.message} [{f.diagnosis}]" for f in o.failures) for o in bad
    ]
    assert not bad, f"{dict(counts)}\n" + "\n".join(lines[:10])
    assert counts[Verdict.PASSED] > 0, f"nothing was executed: {dict(counts)}; {outcomes[0].reason}"


@pytest.mark.parametrize("name", [p.name for p in PROPERTIES])
@pytest.mark.parametrize("backend", ON_CPU)
def test_backend_conforms_on_the_cpu(backend: str, name: str) -> None:
    check(backend, name, "cpu", EVERY)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [p.name for p in PROPERTIES])
@pytest.mark.parametrize("backend", ON_GPU)
def test_backend_conforms_on_a_gpu(backend: str, name: str) -> None:
    if backend == "cublaslt":
        pytest.importorskip("nvmath", reason="the cublaslt backend needs gemmtune[cublaslt]")
    check(backend, name, "cuda")
    torch.cuda.empty_cache()
