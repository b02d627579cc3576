"""Composable Kernel's kernels compiled for AMD GPUs, on any machine: what the compiler says of them is what legality predicted.

Needs CK's headers and a clang. Without them everything here is left out with the reason; with them one kernel is compiled by
default, all the others by ``-m ck_build`` or the marker of their architecture, half a minute each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re

import pytest
import torch
from rotation import rotated

from gemmtune import settings
from gemmtune.architectures import inspect_choices
from gemmtune.backends.ck import BACKEND
from gemmtune.backends.ck.choice import CkChoice
from gemmtune.backends.ck.source import KERNEL, Work
from gemmtune.backends.ck.toolkit import find_toolkit
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.codeobject import assembly_path, find_hip_compiler


@functools.cache
def missing() -> str:
    """Return why nothing can be compiled here; empty if it can."""
    try:
        find_hip_compiler()
        find_toolkit(settings.current().ck_dir)
    except UnavailableError as error:
        return str(error)
    return ""


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
needs_ck = pytest.mark.skipif(bool(missing()), reason=missing())
pytestmark = pytest.mark.timeout(600)


def mm(m: int, n: int, k: int, **options: object) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **options)


def scaled(a: torch.dtype, b: torch.dtype, **options: object) -> Problem:
    return Problem.scaled_mm(64, 512, 1024, dtype=a, dtype_b=b, scales="row", device_type="cuda", **options)


def fused(m: int = 384, k: int = 768) -> Problem:
    problem = mm(m, 640, k)
    bias, gate = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in ((640,), (m, 640)))
    epilogue = trace(lambda acc, x, y: torch.nn.functional.gelu(acc + x) * torch.tanh(y), problem.accumulator, (bias, gate))
    return dataclasses.replace(problem, epilogue=epilogue)


def turned() -> Problem:
    problem = mm(384, 640, 768)
    return dataclasses.replace(problem, out=dataclasses.replace(problem.out, stride=(1, problem.m)))


BADDBMM = Problem.baddbmm(3, 100, 120, 1000, dtype=torch.float16, layout="nn", alpha=2.0, beta=0.5, device_type="cuda")
SMALL = {
    "bf16-v3": (mm(512, 512, 512), "_64x64x64.*_v3_"),
    "bf16-v1-without-loop": (mm(512, 512, 64), "_64x64x64.*_v1_"),
    "bf16-v1-interwave": (mm(512, 512, 1024, layout="tt"), "_128x128x64.*_v1_inter"),
    "bf16-v2-interwave": (mm(16, 4096, 4096), "_16x16x128.*_v2_inter"),
    "bf16-v4": (mm(512, 512, 512, layout="tt"), "_128x64x64.*_v4_"),
    "bf16-v5": (mm(512, 512, 512, layout="tn"), "_128x128x64_x32.*_v5_"),
    "f16-odd": (mm(500, 504, 1001, dtype=torch.float16, layout="nn"), "_16x64x64.*_v2_intra"),
    "f16-baddbmm": (BADDBMM, "_64x64x64.*_v1_intra"),
    "f32-few-columns": (mm(512, 24, 512, dtype=torch.float32, layout="tn"), "_64x32x32.*_v1_"),
    "bf16-fused": (fused(), "_64x64x64.*_v3_"),
    "bf16-turned": (turned(), "_64x128x64.*_v3_"),
    "bf16-split": (mm(16, 512, 4096), "_16x64x64.*_v2_intra.*_k4$"),
    "bf16-split-fused": (fused(m=16, k=4096), "_16x32x64.*_v1_intra.*_k4$"),
    "bf16-split-v4": (mm(128, 128, 4096), "_128x64x64.*_v4_.*_k4$"),
    "f16-split-baddbmm": (BADDBMM, "_64x64x64.*_v1_intra.*_k2$"),
}
"""Cases by name: a problem and its instance.

Each pipeline, scheduler, layout, dtype, padding and instruction occurs at least once.
"""
NARROW = {
    "e4m3-rows": (Problem.scaled_mm(512, 512, 1024, scales="row", device_type="cuda"), "_64x64x128.*_v3_"),
    "e4m3-tensor": (Problem.scaled_mm(32, 512, 1024, scales="tensor", device_type="cuda"), "_16x32x128.*_v2_intra"),
    "e5m2": (scaled(E5M2, E5M2), "_64x32x64.*_v1_"),
    "e4m3-e5m2": (scaled(E4M3, E5M2, layout="nn"), "_32x64x64.*_v2_intra"),
    "e4m3fnuz": (scaled(torch.float8_e4m3fnuz, torch.float8_e4m3fnuz), "_64x64x128.*_v3_"),
    "e5m2fnuz": (scaled(torch.float8_e5m2fnuz, torch.float8_e5m2fnuz), "_32x64x128.*_v1_"),
}
LARGE = {
    "bf16-large": (mm(4096, 4096, 4096), "_256x256x32_x32.*_v3_"),
    "bf16-large-v4": (mm(4096, 4096, 4096), "_256x256x32_x32.*_v4_"),
    "bf16-large-v5": (mm(4096, 4096, 4096), "_256x256x32_x32.*_v5_"),
    "e4m3-large": (Problem.scaled_mm(4096, 4096, 4096, scales="row", device_type="cuda"), "_128x128x128_x32.*_v5_"),
    "bf16-large-16": (mm(4096, 4096, 4096), "_256x256x32_x16.*_v3_"),
}
CASES = {
    **{f"gfx90a-{name}": ("gfx90a", *case) for name, case in SMALL.items()},
    **{f"gfx942-{name}": ("gfx942", *case) for name, case in (SMALL | NARROW | LARGE).items()},
}
SAMPLED = rotated([f"{arch}-{name}" for arch in ("gfx90a", "gfx942") for name in SMALL], 2 * len(SMALL), "ck")


def first(name: str) -> CkChoice:
    arch, problem, allow = CASES[name]
    allow = allow if "_k" in allow else rf"^(?!.*_k\d).*{allow}"  # K is in one part unless a case says otherwise
    with settings.patch(choice_allowlist_regex=allow) as chosen:
        found = BACKEND.enumerate(problem, preset(arch), chosen).choices[0]
    assert isinstance(found, CkChoice)
    assert re.search(allow, found.name)
    return found


def marked(name: str) -> object:
    """Return the case with two markers: its architecture, and ``slow`` if it is sampled, else ``ck_build``."""
    marks = [getattr(pytest.mark, CASES[name][0]), pytest.mark.slow if name in SAMPLED else pytest.mark.ck_build]
    return pytest.param(name, marks=marks)


def test_every_case_is_offered_under_its_name() -> None:
    """This needs no compiler: the kernel's name does not depend on its compilation."""
    assert len({first(name).name for name in CASES}) > len(CASES) // 2
    assert all(first(name).problem == CASES[name][1] for name in CASES)


@needs_ck
@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_a_kernel_has_the_predicted_resources_and_instruction(name: str) -> None:
    choice = first(name)
    [inspection] = inspect_choices([choice], dataclasses.replace(settings.current(), compile_timeout_s=500.0))
    assert inspection.status is Status.OK, inspection.problems
    assert not inspection.problems, inspection.problems
    assert inspection.shared_bytes == choice.config.lds_bytes
    assert inspection.stack_bytes == 0, "no scratch"
    assert inspection.registers is not None
    assert inspection.registers <= 512 // choice.config.instance.waves_per_simd
    text = assembly_path(choice.path).read_text()
    # The only argument is the block of parameters that a launch fills in.
    assert re.search(rf"\.args:\s+- \.offset:\s+0\s+\.size:\s+{ctypes.sizeof(Work)}\s+\.value_kind:\s+by_value", text)
    assert f".symbol:         {KERNEL}.kd" in text
    assert re.search(r"\.wavefront_size: +64", text)
    assert choice.path.read_bytes().startswith(b"\x7fELF")


@needs_ck
@pytest.mark.ck_build
def test_one_search_of_the_matrix_is_built_once() -> None:
    choice = first("gfx942-bf16-v3")
    before = choice.make().stat().st_mtime_ns
    assert choice.compiled
    assert choice.obstacle is None
    assert choice.make().stat().st_mtime_ns == before
