"""Weights with scales are not refused when their addresses are not known yet: CUTLASS's own check, which needs no GPU."""

from __future__ import annotations

import types

import pytest
import torch
from test_cutlass_quantized_gpu import mixed_mm

from gemmtune.device import preset
from gemmtune.errors import ErrorFromChoice, UnavailableError
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.templates.cutlass import BACKEND
from gemmtune.templates.cutlass.toolkit import find_toolkit
from gemmtune.templates.nvcc import find_compiler


def missing() -> str | None:
    if torch.cuda.is_available():
        return "with a GPU, test_cutlass_quantized_gpu.py runs the kernels"
    try:
        find_toolkit(None)
        find_compiler()
    except UnavailableError as error:
        return str(error)
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=f"compiles CUTLASS: {missing()}")]
F16 = torch.float16


def int4(m: int, *, prepacked: bool) -> Problem:
    return mixed_mm(m, 8192, 8192, prepacked=prepacked, dtype=F16, encoding="int4", scales="group_128")


CASES: dict[str, tuple[str, list[Problem]]] = {
    "sliced": ("_64x16x128_.*slicedk2.*_shuffled", [int4(m, prepacked=True) for m in (1, 16, 64, 256)]),
    "as-they-are": ("_64x64x128_1x1x1_.*_pingpong", [int4(m, prepacked=False) for m in (16, 64, 256)]),
}
"""Of each, all problems have the same kernel."""


@pytest.mark.parametrize("name", CASES)
def test_only_the_gpu_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regex, problems = CASES[name]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    for problem in problems:
        found = BACKEND.enumerate(problem, preset("sm90"), Settings(search="exhaustive", cutlass_op_allowlist_regex=regex)).choices
        assert len({choice.compile_key for choice in found}) == 1
        # What CUTLASS accepts fails only when the device is asked for shared memory.
        with pytest.raises(ErrorFromChoice, match="CUTLASS: internal error"):
            found[0].build()
