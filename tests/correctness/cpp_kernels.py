"""Kernels of the cpp backend for tests: every instruction set of this machine, blocks small enough to have many of them."""

from __future__ import annotations

import pytest
import torch

from gemmtune.device import detect, preset
from gemmtune.problem import Problem
from gemmtune.templates.cpp import BACKEND
from gemmtune.templates.cpp.build import CppChoice
from gemmtune.templates.cpp.configs import Config, refusal

CPU = torch.device("cpu")
ORDER = ("portable", "avx2", "avx512")
HERE = ORDER[: ORDER.index(detect("cpu").arch) + 1]
needs_compiler = pytest.mark.skipif(not BACKEND.available(detect("cpu")).ok, reason="needs a C++ compiler")
on_each_isa = pytest.mark.parametrize("arch", HERE)


def mr_for(arch: str, dtype: torch.dtype) -> int:
    """Rows of the micro-tile: all that register allocation may get wrong on the widest, few to compile for the others."""
    return 14 if arch == "avx512" and dtype == torch.float32 else 3


def choice_for(problem: Problem, arch: str, **changes: object) -> CppChoice:
    """A choice with small blocks, so that small problems have many of them."""
    values = {
        "mr": mr_for(arch, problem.dtype),
        "nv": 2,
        "mode": "steps",
        "kc": 40,
        "task_m": 2,
        "task_n": 2,
        "direct": False,
    } | changes
    config = Config(**values)
    assert refusal(config, problem, preset(arch)) is None
    (found,) = BACKEND.choices_of((config,), problem, preset(arch)).choices
    return found


def call(problem: Problem, arch: str, *operands: torch.Tensor, inp=None, alpha=1.0, beta=0.0, extra=(), **changes) -> torch.Tensor:
    out = torch.full(problem.out.size, float("nan"), dtype=problem.out.dtype)
    choice_for(problem, arch, **changes).build().run(out, *operands, inp, alpha, beta, extra)
    return out
