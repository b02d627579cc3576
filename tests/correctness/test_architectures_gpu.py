"""Kernels give right results: those for older architectures from their PTX, those for this GPU natively.

An ordinary ``-m gpu`` run takes a sample of each architecture. ``-m sm80`` runs the whole default set of each problem.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from planted_choices import triton_choice

from gemmtune.architectures import Runner, how_to_run, inspect_choices, matrix_choices, matrix_problems, run_matrix
from gemmtune.backends.triton.configs import Config
from gemmtune.choice import Status
from gemmtune.device import DeviceInfo, detect

pytest.importorskip("triton", reason="runs Triton kernels")
pytestmark = pytest.mark.gpu

RUNNABLE = ("sm75", "sm80", "sm90")
SAMPLED = (
    "mm-bf16-nt", "mm-f16-tn", "mm-f32-nn", "mm-tf32-nt", "mm-f64-tt", "addmm-bf16-tn", "bmm-f16-nn", "baddbmm-f32-nt",
    "mm-bf16-nt-offset", "mm-bf16-nt-out-t", "mm-bf16-nt-silu-mul", "mm-bf16-nt-1x1x1",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate tests of all problems for an architecture selected by its marker, and of a few for the others."""
    if "name" in metafunc.fixturenames:
        asked = str(metafunc.config.getoption("markexpr"))
        metafunc.parametrize(
            ("arch", "name"),
            [
                pytest.param(arch, name, marks=getattr(pytest.mark, arch))
                for arch in RUNNABLE
                for name in matrix_problems()
                if name in SAMPLED or arch in asked
            ],
        )


@pytest.fixture(scope="module")
def gpu() -> DeviceInfo:
    return detect("cuda")


@pytest.fixture(scope="module")
def runner(gpu: DeviceInfo) -> Iterator[Runner]:
    with Runner(gpu) as runner:
        yield runner


def test_choices_give_right_results(arch: str, name: str, gpu: DeviceInfo, runner: Runner, request: pytest.FixtureRequest) -> None:
    way = how_to_run(arch, gpu)
    if way.mode is None:
        pytest.skip(way.reason)
    problems = {name: matrix_problems()[name]}
    if arch in str(request.config.getoption("markexpr")):
        choices = matrix_choices(arch, "default", problems=problems)
    else:
        choices = matrix_choices(arch, "quick", problems=problems, most=2)
    wrong = [f"{inspection}: {text}" for inspection in inspect_choices(choices) for text in inspection.problems]
    for choice in choices:
        result = runner.run(choice)
        if result.status is not Status.OK:
            wrong.append(f"{choice.name} for {name}, {way.mode}: {result.status}: {result.reason}")
    assert choices
    assert not wrong, "\n".join(wrong)


def test_forward_makes_an_older_kernel_run(gpu: DeviceInfo) -> None:
    """Check sm75: the driver of any newer GPU refuses its cubin, and runs its PTX."""
    choice = triton_choice("sm75", Config(block_m=32, block_n=32, block_k=32, stages=1, warps=4))
    if how_to_run("sm75", gpu).mode != "forward":
        pytest.skip(f"{gpu.name} is {gpu.arch}: sm75 is not older")
    with pytest.raises(RuntimeError, match=r"Triton Error \[CUDA\]"):
        choice.build()
    with Runner(gpu) as runner:
        result = runner.run(choice)
    assert result.status is Status.OK, result.reason


def test_the_report_of_a_run(gpu: DeviceInfo) -> None:
    arch = next(a for a in ("sm80", "sm75", gpu.arch) if how_to_run(a, gpu).mode is not None)
    few = {name: matrix_problems()[name] for name in ("mm-bf16-nt", "addmm-f16-tn")}
    report = run_matrix(arch, search="quick", device=gpu, run=True, problems=few, most=2)
    assert report.failures == ()
    assert report.executed == 2 * len(report.inspections) == 8
    assert f"4 of 4 right on {gpu.name} ({gpu.arch})" in report.text()
