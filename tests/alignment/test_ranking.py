"""Choices that models rank first, and refusals. ``PYTHONPATH=tests python tests/alignment/test_ranking.py`` writes ranking.json.

The constants of the models are fitted to measurements, so a change of the order is a decision. Users read the refusals.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from extras import needs

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.table import load
from gemmtune.backends.triton.kernel_choice import KernelChoice
from gemmtune.backends.triton.mixed.offers import preferred_configs
from gemmtune.choice import Choice
from gemmtune.device import DeviceInfo, preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings

FILE = Path(__file__).with_name("ranking.json")
MOST = 16
"""Names of each backend in the file."""
BACKENDS = ("triton", "cuda", "cpp", "ck", pytest.param("cutlass", marks=needs("cutlass")))
FP16, FP32 = torch.float16, torch.float32
PROBLEMS: dict[str, tuple[tuple[str, ...], Problem]] = {
    "mm square": (("sm80", "sm90", "gfx942"), Problem.mm(4096, 4096, 4096, device_type="cuda")),
    "mm one row": (("sm75", "sm90"), Problem.mm(1, 4096, 14336, dtype=FP16, device_type="cuda")),
    "mm few rows": (("sm80", "sm90", "sm100"), Problem.mm(48, 6144, 4096, device_type="cuda")),
    "mm long sum": (("sm90", "gfx942"), Problem.mm(130, 200, 65536, device_type="cuda")),
    "mm odd": (("sm86", "sm90"), Problem.mm(301, 513, 1003, device_type="cuda")),
    "mm float32": (("sm80", "sm90"), Problem.mm(2048, 1024, 4096, dtype=FP32, layout="nn", device_type="cuda")),
    "mm float32 on a CPU": (("avx2", "avx512", "portable"), Problem.mm(256, 512, 768, dtype=FP32, device_type="cpu")),
    "mm float32 odd": (("sm90",), Problem.mm(70, 1001, 1003, dtype=FP32, layout="nn", device_type="cuda")),
    "addmm": (("sm90", "sm100"), Problem.addmm(2048, 2048, 4096, bias="mn", device_type="cuda")),
    "bmm": (("sm90",), Problem.bmm(32, 128, 1024, 128, device_type="cuda")),
    "mm_plus_mm": (("sm90",), Problem.mm_plus_mm(1024, 2048, 512, 1024, device_type="cuda")),
    "int_mm": (("sm80", "sm90"), Problem.int_mm(512, 4096, 4096, device_type="cuda")),
    "scaled_mm": (("sm90",), Problem.scaled_mm(256, 4096, 4096, device_type="cuda")),
    "scaled_mm of fnuz": (
        ("gfx942",),
        Problem.scaled_mm(512, 4096, 4096, dtype=torch.float8_e4m3fnuz, dtype_b=torch.float8_e4m3fnuz, device_type="cuda"),
    ),
    "scaled_mm of two formats": (
        ("sm89", "sm90"),
        Problem.scaled_mm(64, 4096, 4096, dtype=torch.float8_e5m2, dtype_b=torch.float8_e4m3fn, device_type="cuda"),
    ),
    "scaled_mm by blocks": (("sm90",), Problem.scaled_mm(64, 7168, 4096, scales="block_128x128", device_type="cuda")),
    "mixed_mm one row": (("sm90",), Problem.mixed_mm(1, 4096, 4096, scales="column", prepacked=True, device_type="cuda")),
    "grouped_mm": (("sm90",), Problem.grouped_mm(1024, 2048, 1024, groups=8, device_type="cuda")),
    "bsr_mm few rows": (("sm90",), Problem.bsr_mm(16, 4096, 4096, density=0.2, prepacked=True, device_type="cuda")),
    "bsr_mm": (("sm90",), Problem.bsr_mm(512, 4096, 4096, density=0.2, device_type="cuda")),
    **{
        f"mixed_mm {dtype} {encoding or 'int8'} {m} rows{' prepacked' * prepacked}": (
            ("sm90",) if prepacked else ("sm80", "sm90"),
            Problem.mixed_mm(
                m, 4096, 4096, dtype=getattr(torch, dtype), encoding=encoding, scales="group_128" if encoding else "column",
                prepacked=prepacked, device_type="cuda",
            ),
        )
        for dtype, encoding in (("float16", ""), ("bfloat16", ""), ("float16", "int4"), ("bfloat16", "uint4"))
        for m in (16, 60, 1000)
        for prepacked in (False, True)
    },
}  # fmt: skip


def described(choice: Choice, device: DeviceInfo) -> str:
    """Return the choice's name with what is predicted of it.

    This is the instruction and shared memory of a Triton kernel, or the modelled time of a CUDA kernel, its grid, and a digest of
    all that its launch gets.
    """
    if isinstance(choice, KernelChoice) and device.type != "cpu":
        expected = dataclasses.astuple(choice.expected(device))
        return f"{choice.name} {' '.join(map(str, expected))}"
    if not isinstance(choice, CudaChoice):
        return choice.name
    family, problem, config = choice.family, choice.problem, choice.config
    record = family.record(problem, config)
    digest = hashlib.sha256(repr((record, family.claims(problem, config))).encode()).hexdigest()[:8]
    return f"{choice.name} {family.estimate_us(problem, device, config):.4g} us, grid {record.grid} {digest}"


def ranked(backend: str) -> dict[str, list[str]]:
    """Return the first names that a backend offers and its refusals, by device and problem. Leave out where it offers nothing."""
    found = {}
    for name, (archs, problem) in PROBLEMS.items():
        for device in map(preset, archs):
            offers = load(backend).enumerate(problem, device, Settings())
            texts = [described(choice, device) for choice in offers.choices[:MOST]]
            if texts:
                found[f"{device.arch} {name}"] = texts + [f"{x.count} {x.name}: {x.reason}" for x in offers.refusals]
    return found


def preferred() -> dict[str, list[str]]:
    """Return the configs of the tables for mixed products with few, some and many rows: a change of a row is a decision."""
    found = {}
    for encoding, dtype, zeros, arch, m in itertools.product(
        ("", "int4"), ("float16", "bfloat16"), (False, True), ("sm80", "sm90"), (16, 64, 512)
    ):
        problem = Problem.mixed_mm(
            m,
            8192,
            8192,
            dtype=dtype,
            encoding=encoding,
            zeros=zeros,
            scales="group_128" if encoding else "column",
            device_type="cuda",
        )
        for groups in (False, True):
            configs = preferred_configs(problem, preset(arch), groups=groups)
            found[f"{arch} {problem}{' by warp groups' * groups}"] = [str(config) for config in configs]
    return found


def test_tables_of_mixed_products_have_the_same_configs() -> None:
    assert preferred() == json.loads(FILE.read_text())["preferred"]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_models_rank_choices_as_before(backend: str) -> None:
    assert ranked(backend) == json.loads(FILE.read_text())[backend]


if __name__ == "__main__":
    names = {name: ranked(name) for name in ("triton", "cuda", "cpp", "ck", "cutlass")} | {"preferred": preferred()}
    FILE.write_text(json.dumps(names, indent=1) + "\n")
