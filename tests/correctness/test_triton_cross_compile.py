"""The Triton backend's configs, compiled for architectures that this machine lacks.

In an ordinary run a sample of each; ``pytest -m sm90`` (and so ``tox -e sm90``) compiles the whole default set of each problem.
Compared with the predicate: shared memory, registers and spills; looked for: the tensor-core instruction.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gemmtune.backends import load
from gemmtune.device import DeviceInfo, preset
from gemmtune.problem import Precision, Problem
from gemmtune.settings import Settings
from gemmtune.templates.triton.build import TritonChoice
from gemmtune.templates.triton.legality import Predicate

triton = pytest.importorskip("triton", reason="compiles with Triton")

MARKED = ("sm75", "sm80", "sm90", "sm100", "gfx942")
ARCHS = MARKED
TF32 = Precision(input_mode="tf32")
MM = {
    "bf16-nt": Problem.mm(512, 6144, 4096, device_type="cuda"),
    "fp16-nn-small-m": Problem.mm(16, 6144, 4096, dtype=torch.float16, layout="nn", device_type="cuda"),
    "bf16-unaligned": Problem.mm(1000, 1001, 999, device_type="cuda"),
    "bf16-long-k": Problem.mm(128, 128, 65536, device_type="cuda"),
    "fp32": Problem.mm(500, 504, 1000, dtype=torch.float32, layout="tn", device_type="cuda"),
    "tf32": Problem.mm(512, 1024, 1024, dtype=torch.float32, layout="nt", precision=TF32, device_type="cuda"),
    "fp64": Problem.mm(512, 1024, 1024, dtype=torch.float64, layout="tt", device_type="cuda"),
    "baddbmm": Problem.baddbmm(8, 256, 512, 512, dtype=torch.float16, bias="m1", alpha=2, beta=0.5, device_type="cuda"),
}
SAMPLED = ("bf16-nt", "bf16-unaligned", "fp32")
SPILLS_BYTES = 128
"""Stack of one thread that is let pass: a few registers outside of the loop."""
LARGE_BYTES = 49152
LOOSE = 1.5
"""How far above a large kernel's real shared memory the predicate may be."""


class Built(NamedTuple):
    choice: TritonChoice
    kernel: Any


def _build(choice: TritonChoice) -> Built:
    assert choice.target is not None
    choice.compile()
    assert choice.compiled
    return Built(choice, choice.kernel())


def _choices(problem: Problem, device: DeviceInfo, search: str) -> list[TritonChoice]:
    offers = load("triton").enumerate(problem, device, Settings(search=search))  # type: ignore[arg-type]
    distinct = {c.compile_key: c for c in offers.choices if isinstance(c, TritonChoice)}
    return list(distinct.values())


def _stack_bytes(kernel: Any, folder: Path) -> int | None:
    """Local memory of one thread as the cubin says; None where Triton's package has no cuobjdump or this is no cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if "cubin" not in kernel.asm or not tool.exists():
        return None
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    return int(found[1]) if found else None


INSTRUCTIONS = {
    "sm75": {"fma": "fma.rn"},
    "sm80": {"mma": "mma.sync", "fma": "fma.rn"},
    "sm90": {"mma": "mma.sync", "warp_group": "wgmma.mma_async", "fma": "fma.rn"},
    "sm100": {"mma": "mma.sync", "warp_group": "tcgen05.mma", "fma": "fma.rn"},
    "gfx942": {"mma": "v_mfma", "fma": "v_"},
}


def _check(built: Built, device: DeviceInfo, folder: Path) -> list[str]:
    """What is wrong with a compiled choice."""
    choice, kernel = built
    predicate = Predicate(choice.problem, device)
    need, real = predicate.resources(choice.config), kernel.metadata.shared
    wrong = []
    if not real <= need.smem_bytes <= device.smem_per_block_bytes:
        wrong.append(f"shared memory: {real} bytes, predicted at most {need.smem_bytes}, limit {device.smem_per_block_bytes}")
    converted = choice.config.block_m * choice.config.block_n * choice.problem.accumulator.itemsize
    if device.type == "cuda" and need.smem_bytes > max(LOOSE * real, converted + 1024, LARGE_BYTES):
        wrong.append(f"shared memory: {real} bytes, but {need.smem_bytes} predicted: too loose")
    stack_bytes = _stack_bytes(kernel, folder)
    if stack_bytes is not None and stack_bytes > SPILLS_BYTES:
        wrong.append(f"{stack_bytes} bytes of registers spilled")
    text = kernel.asm["ptx" if device.type == "cuda" else "amdgcn"]
    instruction = INSTRUCTIONS[device.arch][predicate.instruction(choice.config)]
    if instruction not in text:
        wrong.append(f"no {instruction} in the code")
    return [f"{choice.name} for {choice.problem}: {text}" for text in wrong]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All problems for an architecture that is asked for by its marker, and for sm90; a few for the others."""
    if "arch" in metafunc.fixturenames:
        asked = str(metafunc.config.getoption("markexpr"))
        metafunc.parametrize(
            ("arch", "name"),
            [
                pytest.param(arch, name, marks=getattr(pytest.mark, arch) if arch in MARKED else ())
                for arch in ARCHS
                for name in MM
                if name in SAMPLED or arch == "sm90" or arch in asked
            ],
        )


def test_configs_compile_within_the_predicates_resources(
    arch: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    device = preset(arch)
    if arch in str(request.config.getoption("markexpr")):
        choices = _choices(MM[name], device, "default")
    else:
        choices = _choices(MM[name], device, "quick")[: 2 if name in SAMPLED else 1]
    assert choices
    wrong = [text for choice in choices for text in _check(_build(choice), device, tmp_path)]
    assert not wrong, "\n".join(wrong)


def test_wide_loads_are_used_where_the_layout_allows_them() -> None:
    aligned, odd = (_build(_choices(MM[name], preset("sm90"), "quick")[0]).kernel for name in ("bf16-nt", "bf16-unaligned"))
    assert "cp.async.cg.shared.global" in aligned.asm["ptx"]
    assert "st.global.v4.b32" in aligned.asm["ptx"]
    assert "cp.async" not in odd.asm["ptx"]


def test_a_refusal_of_the_compiler_is_a_compile_error() -> None:
    from gemmtune.errors import CompileError
    from gemmtune.templates.triton.kernels import compile_kernel

    choice = _choices(MM["bf16-nt"], preset("sm90"), "quick")[0]
    assert choice.target is not None
    source = choice.source
    broken = type(source)(
        text=source.text.replace("tl.dot(", "tl.no_such_function("), function=source.function, arguments=source.arguments
    )
    with pytest.raises(CompileError, match="no_such_function"):
        compile_kernel(choice.name, broken, "broken", choice.target, stages=2, warps=4)
