"""The Triton backend's configs, compiled for architectures that this machine lacks, through the architecture matrix.

In an ordinary run one config of each of a few problems, other ones for each commit; ``pytest -m sm90`` (and so ``tox -e sm90``)
compiles the whole default set of each problem.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from rotation import rotated

from gemmtune.architectures import ARCHITECTURES, inspect_choices, matrix_choices, matrix_problems
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.errors import CompileError
from gemmtune.problem.dtypes import FLOAT8_FNUZ

pytest.importorskip("triton", reason="compiles with Triton")
pytestmark = pytest.mark.rotates(8)

SAMPLED = ("mm-bf16-nt", "addmm-f16-tn", "mm-f32-nt", "bmm-tf32-nn", "baddbmm-f64-tt", "mm-bf16-nt-silu-mul", "mm_plus_mm-f16-tn")


def _served(arch: str) -> list[str]:
    """Return all problems except AMD's own 8-bit floats, which only gfx942 multiplies."""
    return [name for name, problem in matrix_problems().items() if arch == "gfx942" or problem.a.dtype not in FLOAT8_FNUZ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests with all problems for an architecture selected by its marker, and one for each other architecture."""
    if "arch" in metafunc.fixturenames:
        asked = str(metafunc.config.getoption("markexpr"))
        metafunc.parametrize(
            ("arch", "name"),
            [
                pytest.param(arch, name, marks=getattr(pytest.mark, arch))
                for arch in ARCHITECTURES
                for name in (_served(arch) if arch in asked else rotated(SAMPLED, len(SAMPLED), arch))
            ],
        )


def test_choices_compile_within_predicted_resources_to_the_expected_instructions(
    arch: str, name: str, request: pytest.FixtureRequest
) -> None:
    problems = {name: matrix_problems()[name]}
    if arch in str(request.config.getoption("markexpr")):
        choices = matrix_choices(arch, "default", problems=problems)
    else:
        choices = rotated(matrix_choices(arch, "quick", problems=problems, most=2), 2, f"{arch} {name}")
    assert choices
    inspections = list(inspect_choices(choices))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)
    assert all(inspection.registers for inspection in inspections), "registers and spills could not be read"


@functools.cache
def _best(name: str) -> TritonChoice:
    choice = matrix_choices("sm90", "quick", problems={name: matrix_problems()[name]}, most=1)[0]
    assert isinstance(choice, TritonChoice)
    return choice


@pytest.mark.turn(6, 8)
def test_wide_loads_are_used_where_the_layout_allows_them() -> None:
    aligned, odd = (_best(name).kernels[0].compile() for name in ("mm-bf16-nt", "mm-f16-nt"))
    assert "cp.async.cg.shared.global" in aligned.asm["ptx"]
    assert "st.global.v4.b32" in aligned.asm["ptx"]
    assert "cp.async" not in odd.asm["ptx"]


def test_a_refusal_of_the_compiler_is_a_compile_error() -> None:
    choice = _best("mm-bf16-nt")
    assert choice.target is not None
    broken = replace(choice.source, text=choice.source.text.replace("tl.dot(", "tl.no_such_function("))
    with pytest.raises(CompileError, match="no_such_function"):
        replace(choice.kernels[0], source=broken).compile()
