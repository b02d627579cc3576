"""GEMMs of other packages under the suite: some cases of each property. ``gemmtune conformance`` does whole runs."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
from mutants.trial import cases_of

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import InProcessRunner
from gemmtune.declaration.subject import SubjectSpec, load
from gemmtune.errors import SubjectError

PACKAGE = "adapters"
CASES = 3
MISSING = {
    "cupy_matmul": "cupy",
    "flag_gems_ops": "flag_gems",
    "helion_matmul": "helion",
    "jax_matmul": "jax",
    "quack_gemm": "quack",
}
"""Packages that gemmtune does not depend on, by the adapter's module."""
UNSOUND = ("alpha-beta", "subnormal")
"""Properties that torch's own operations fail in bfloat16 on some CPUs. docs/conformance.md has the findings."""


@pytest.mark.rotates(8)
@pytest.mark.parametrize("target", ["numpy_matmul", "torch_ops:dense", "torch_ops:float8_cpu", "torch_ops:weights"])
def test_passes_some_cases_of_each_property(target: str) -> None:
    runner = InProcessRunner(SubjectSpec(target=f"{PACKAGE}.{target}"), "cpu")
    traits = runner.describe().traits
    executed = 0
    for judging in PROPERTIES:
        if target == "torch_ops:dense" and judging.name in UNSOUND:
            continue
        for case in itertools.islice(cases_of(judging, traits, "cpu", (Level.SMOKE,)), CASES):
            outcome = runner.run(case)
            assert outcome.status in (CaseStatus.PASSED, CaseStatus.REFUSED), f"{case.id}: {outcome.reason} {outcome.failures}"
            executed += outcome.status is CaseStatus.PASSED
    assert executed >= CASES * len(PROPERTIES) // 2


@pytest.mark.parametrize(("module", "package"), MISSING.items())
def test_reports_a_missing_package(module: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(SubjectError, match=f"{module}.* cannot be imported: No module named '{package}'"):
        load(SubjectSpec(target=f"{PACKAGE}.{module}"))


@pytest.mark.parametrize(
    ("target", "ops"),
    [
        ("torch_ops:dense", ("mm", "addmm", "bmm", "baddbmm")),
        ("torch_ops:int8_cuda", ("int_mm",)),
        ("torch_ops:float8_cuda", ("scaled_mm",)),
        ("torch_ops:weights", ("mixed_mm",)),
        ("torch_ops:weights_int8_cpu", ("mixed_mm",)),
        ("inductor:static", ("mm", "addmm", "bmm")),
        ("inductor:dynamic", ("mm", "addmm", "bmm")),
    ],
)
def test_declares_its_operations(target: str, ops: tuple[str, ...]) -> None:
    assert load(SubjectSpec(target=f"{PACKAGE}.{target}")).traits.ops == ops
