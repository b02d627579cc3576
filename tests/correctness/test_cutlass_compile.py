"""CUTLASS operations compiled with nvcc through the architecture matrix: resources and instructions.

An ordinary run compiles at most one kernel, depending on the commit. ``pytest -m sm90`` (and so ``tox -e sm90``) compiles one of
each family of an architecture.
"""

from __future__ import annotations

from unittest import mock

import pytest
from rotation import rotated, takes

from gemmtune import settings
from gemmtune.architectures import compile_and_inspect, matrix_choices, matrix_problems, run_matrix
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.operation import Operation
from gemmtune.backends.cutlass.toolkit import find_toolkit
from gemmtune.errors import UnavailableError
from gemmtune.toolchain.nvcc import find_compiler

FAMILIES = {
    "sm75": ("mm-f16-nt", "mm-f32-nt", "baddbmm-f64-tt"),
    "sm80": ("mm-bf16-nt", "addmm-f16-tn", "mm-tf32-nt", "mm-f32-nt", "baddbmm-f64-tt", "mm-bf16-nt-silu-mul", "mm-f16-nn-padded"),
    "sm90": ("mm-bf16-nt", "addmm-f16-tn", "mm-tf32-nt", "mm-f32-nt", "baddbmm-f64-tt", "mm-bf16-nt-silu-mul", "mm-f16-nn-padded"),
}  # fmt: skip
"""Names of the matrix's problems, by architecture: every element, with and without epilogue, aligned or not."""
MODERN = [("sm90", name) for name in FAMILIES["sm90"]]
SAMPLED = (
    *([("sm80", "mm-f16-nn-padded")] if takes("CUTLASS 2.x through the matrix") else ()),
    *(rotated(MODERN, len(MODERN)) if takes("CUTLASS 3.x") else ()),
)
"""Sample: some commits compile a kernel of CUTLASS 2.x, fewer one of 3.x, which takes a minute."""


def _missing() -> str | None:
    try:
        find_toolkit(None)
        find_compiler()
    except UnavailableError as error:
        return str(error)
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(_missing() is not None, reason=f"compiles CUTLASS: {_missing()}")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Return all families of an architecture whose marker is selected, and a few for the others."""
    if "name" not in metafunc.fixturenames:
        return
    asked = str(metafunc.config.getoption("markexpr"))
    metafunc.parametrize(
        ("arch", "name"),
        [
            pytest.param(arch, name, marks=getattr(pytest.mark, arch))
            for arch, names in FAMILIES.items()
            for name in names
            if (arch, name) in SAMPLED or arch in asked
        ],
    )


def test_operations_compile_to_expected_instructions_without_spills(arch: str, name: str) -> None:
    """Check instructions and spills, and that an instruction of an unexpected kind is found."""
    problems = {name: matrix_problems()[name]}
    with settings.patch(backends=("cutlass",), compile_timeout_s=250.0):
        report = run_matrix(arch, search="quick", problems=problems, most=1)
        with mock.patch.object(Operation, "sass", "SHFL*"):
            other = compile_and_inspect(*matrix_choices(arch, "quick", problems=problems, most=1))
    assert report.failures == ()
    [inspection] = report.inspections
    assert inspection.backend == "cutlass"
    assert inspection.stack_bytes is not None
    assert inspection.instructions
    assert inspection.shared_bytes
    [expected] = inspection.expected
    assert expected
    [text] = other.problems
    assert text.endswith(f"expected SHFL*, found {', '.join(instruction for instruction, _ in inspection.instructions)}")


@pytest.mark.sm80
def test_matrix_has_operations_if_backend_is_named() -> None:
    problems = {name: matrix_problems()[name] for name in FAMILIES["sm80"]}
    with settings.patch(backends=("cutlass",)):
        choices = matrix_choices("sm80", "quick", problems=problems, most=1)
    assert len(choices) == len(problems)
    assert all(isinstance(choice, CutlassChoice) and choice.arch == "sm80" for choice in choices)
