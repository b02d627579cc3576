"""Every backend of ours through the conformance suite: op × dtype × strides × scalars, each property at level smoke.

There is one test for each backend and property. It runs the property's cases one after the other, and a failure names the bad ones.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from executed import OPERATIONS, WITHOUT_ANYTHING, WITHOUT_PRODUCTS, note
from rotation import rotated
from torch_faults import drops_beta_in_float16, makes_nan_of_infinity

from gemmtune import settings
from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.gemms import backends as ours
from gemmtune.conformance.properties.table import PROPERTIES, property_named
from gemmtune.conformance.runs.isolation import InProcessRunner
from gemmtune.declaration.labels import GROUPED, OPS, SCALES, SINGLE, WEIGHTS
from gemmtune.declaration.subject import SubjectSpec
from gemmtune.problem import Problem

ON_GPU = ("aten", "cublaslt")
COMPILED_ON_GPU = ("triton",)
EVERY_ON_GPU = 3
"""Number of parts of the cases. Each commit takes one."""
EVERY_COMPILED = 4
"""Number of parts for compiled backends, where nearly each case compiles a kernel. Each commit takes one."""
PARTS_COMPILED = 2
"""Number of tests for each property of a compiled backend. They run in several processes."""
NAMES = [p.name for p in PROPERTIES if p.name not in WITHOUT_PRODUCTS]
KNOWN = {
    ("aten", "cpu"): (
        "*:baddbmm-bf16-*alpha.zero*",
        *(("*:baddbmm-f16-*alpha.zero*",) if drops_beta_in_float16() else ()),
        *(("infinity:*-bf16-*",) if makes_nan_of_infinity() else ()),
    ),
    ("aten", "cuda"): ("alpha-beta:baddbmm-f16-*variant.large*",),
}
"""Cases that torch itself gets wrong, here or everywhere (see docs/conformance.md). Verification leaves such a choice out of every
pick."""
FORWARD = ("sm75", "sm80")
"""Older architectures, whose kernels run on a newer GPU as PTX that the driver translates."""
EVERY_FORWARD = 7
"""Number of parts for older architectures, where each case compiles and translates a kernel. Each commit takes one."""
EVERY = 128
"""Number of parts on a CPU. They differ between properties and commits. `gemmtune conformance backend:cpp` runs all."""


@functools.cache
def runner(backend: str, device: str) -> InProcessRunner:
    return InProcessRunner(SubjectSpec(target=f"gemmtune.conformance.gemms.backends:{backend}"), device)


def cases_of(name: str, backend: str, device: str) -> list[Case]:
    scope = Scope(traits=runner(backend, device).describe().traits, device_type=device, level=Level.SMOKE)
    wanted = property_named(name)
    reason = wanted.needs(scope)
    if reason is not None:
        pytest.skip(f"{backend} on {device}: {reason}")
    known = KNOWN.get((backend, device), ())
    return [case for case in wanted.cases(scope) if not any(fnmatch.fnmatch(case.id, pattern) for pattern in known)]


def check(backend: str, name: str, device: str, every: int = 1, part: int = 0, parts: int = 1, op: str | None = None) -> None:
    everything = [case for case in cases_of(name, backend, device) if op in (None, case.op)]
    cases = rotated(everything, every, name)
    run = runner(backend, device).run
    outcomes = [run(case) for case in cases[part::parts] or cases[:1]]
    for case in everything:  # if the backend refuses this whole part, up to the first case that it accepts
        if any(outcome.status is not CaseStatus.REFUSED for outcome in outcomes):
            break
        outcomes.append(run(case))
    assert_conforming(outcomes)
    note(backend, {name, *(outcome.case.op for outcome in outcomes if outcome.status is CaseStatus.PASSED)})


def properties_of(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return each backend with each of its tested properties."""
    return [(backend, name) for backend in backends for name in NAMES if name not in WITHOUT_ANYTHING.get(backend, ())]


def assert_conforming(outcomes: list[Outcome]) -> None:
    counts = Counter(o.status for o in outcomes)
    bad = [o for o in outcomes if o.status.bad]
    lines = [f"{o.case.id} ({o.choice}): {o.status}: " + "; ".join(f"{f.message} [{f.diagnosis}]" for f in o.failures) for o in bad]
    assert not bad, f"{dict(counts)}\n" + "\n".join(lines[:10])
    assert counts[CaseStatus.PASSED] > 0, f"nothing was executed: {dict(counts)}; {outcomes[0].reason}"


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), properties_of(OPERATIONS))
def test_backend_conforms_on_the_cpu(backend: str, name: str) -> None:
    check(backend, name, "cpu", EVERY)


@pytest.mark.parametrize(("backend", "op"), [(backend, op) for backend, ops in OPERATIONS.items() for op in ops])
def test_each_operation_conforms_on_the_cpu(backend: str, op: str) -> None:
    """Check one case of each operation, since the sample of a property may lack it."""
    check(backend, "group-ends" if op in GROUPED else "integers", "cpu", EVERY, op=op)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "name"), properties_of(ON_GPU))
def test_backend_conforms_on_a_gpu(backend: str, name: str) -> None:
    if backend == "cublaslt":
        pytest.importorskip("nvmath", reason="the cublaslt backend needs gemmtune[cublaslt]")
    check(backend, name, "cuda", EVERY_ON_GPU)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS_COMPILED))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", COMPILED_ON_GPU)
def test_compiled_backend_conforms_on_a_gpu(backend: str, name: str, part: int) -> None:
    check(backend, name, "cuda", EVERY_COMPILED, part, PARTS_COMPILED)


@pytest.mark.parametrize("arch", FORWARD)
def test_subjects_for_an_older_architecture_use_its_kernels(arch: str) -> None:
    subject = getattr(ours, f"triton_{arch}")
    choice = subject.choice(Problem.mm(64, 64, 64, dtype=torch.float16, device_type="cuda"))
    assert choice.arch == arch
    assert arch in subject.name


@pytest.mark.parametrize(
    ("backend", "arch", "lacks"),
    [
        ("aten", None, set()),
        ("triton", None, set()),
        ("cpp", None, {"mm_plus_mm"}),
        ("cutlass", "sm80", {"mm_plus_mm", "mixed_mm", "scaled_mm", *GROUPED}),
        ("cutlass", "sm90", {"mm_plus_mm", *GROUPED}),
        ("cuda", "sm90", {"mm_plus_mm", "int_mm", "int_mm_mul", "scaled_mm", "scaled_grouped_mm"}),
        ("ck", "gfx942", {"mm_plus_mm", "int_mm", "int_mm_mul", "mixed_mm", *GROUPED}),
        ("cuda", "sm80", set()),  # it has nothing for sm80, and each call gives the reason
    ],
)
def test_a_backend_declares_its_operations(backend: str, arch: str | None, lacks: set[str]) -> None:
    traits = ours.BackendSubject(backend, ours.cpp.traits if arch is None and backend == "cpp" else ours.EVERYTHING, arch).traits
    assert set(OPS) - set(traits.ops or ()) == lacks


def test_a_backend_declares_equal_bits_only_if_the_settings_do() -> None:
    promised = ours.triton.traits
    assert ours.BackendSubject("triton", promised).traits.deterministic
    with settings.patch(deterministic=False):
        assert not ours.BackendSubject("triton", promised).traits.deterministic


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["integers", "bound"])
@pytest.mark.parametrize("arch", FORWARD)
def test_kernels_for_an_older_architecture_conform(arch: str, name: str) -> None:
    check(f"triton_{arch}", name, "cuda", EVERY_FORWARD)


@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operations_conform_where_nothing_is_multiplied(own_store: Path, device: str, name: str) -> None:
    declared = {
        "empty": True,
        "alpha": True,
        "beta": True,
        "ops": SINGLE,
        "scales": SCALES,
        "weights": tuple(WEIGHTS),
        "zeros": True,
    }
    gemm = InProcessRunner(SubjectSpec(target="gemmtune", declared=declared), device)
    scope = Scope(traits=gemm.describe().traits, device_type=device, level=Level.SMOKE)
    assert_conforming([gemm.run(case) for case in property_named(name).cases(scope)])
    note("gemmtune", [name])
