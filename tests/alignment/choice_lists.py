"""Real lists of choices, of every backend that there is, for tests of what filters do to them."""

from __future__ import annotations

import functools

import torch

from gemmtune.backends.cublaslt.algorithm import choice_of
from gemmtune.backends.cublaslt.constants import AlgorithmAttribute
from gemmtune.backends.cublaslt.library import Algorithm
from gemmtune.backends.table import load
from gemmtune.choice import Choice
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.selector.offers import enabled_backends
from gemmtune.settings import Search, Settings

PROBLEMS: dict[str, tuple[Problem, str]] = {
    "sm90-mm-bf16": (Problem.mm(512, 1024, 768, device_type="cuda"), "sm90"),
    "sm90-mm-bf16-odd": (Problem.mm(301, 513, 1003, device_type="cuda"), "sm90"),
    "sm90-mm-fp16-long": (Problem.mm(64, 96, 16384, dtype=torch.float16, device_type="cuda"), "sm90"),
    "sm80-bmm-fp16": (Problem.bmm(4, 64, 96, 4096, dtype=torch.float16, device_type="cuda"), "sm80"),
    "gfx942-mm-bf16": (Problem.mm(512, 1000, 768, device_type="cuda"), "gfx942"),
    "sm75-addmm-fp32": (Problem.addmm(16, 4096, 4096, dtype=torch.float32, bias="n", device_type="cuda"), "sm75"),
    "avx512-mm-fp32": (Problem.mm(256, 512, 512, dtype=torch.float32, device_type="cpu"), "avx512"),
    "avx512-mm-fp32-few": (Problem.mm(3, 512, 512, dtype=torch.float32, layout="nn", device_type="cpu"), "avx512"),
    "avx2-bmm-fp64": (Problem.bmm(2, 64, 64, 64, dtype=torch.float64, device_type="cpu"), "avx2"),
    "portable-addmm-bf16": (Problem.addmm(33, 65, 129, bias="mn", device_type="cpu"), "portable"),
}
"""By name: a problem, and the preset device that it is for."""


@functools.cache
def choices_of(name: str, search: Search = "default") -> tuple[Choice, ...]:
    """Everything that is legal for one of PROBLEMS, before any filter."""
    (problem, arch), settings = PROBLEMS[name], Settings(search=search)
    device = preset(arch)
    names = (*enabled_backends(device, settings), "cutlass", "ck")  # which serve where they are named
    choices = [c for name in names for c in load(name).enumerate(problem, device, settings).choices]
    return (*choices, *(cublaslt_choices(problem) if problem.device_type == "cuda" else ()))


def cublaslt_choices(problem: Problem) -> tuple[Choice, ...]:
    """What cuBLASLt's answers become; only a GPU gives real ones."""
    answers = [(20, 1), (18, 1), (24, 4)]
    return tuple(choice_of(problem, _algorithm(tile, splits)) for tile, splits in answers)


def _algorithm(tile: int, splits: int) -> Algorithm:
    told = {AlgorithmAttribute.ID: 66, AlgorithmAttribute.TILE: tile, AlgorithmAttribute.SPLITK: splits}
    attributes = tuple((attribute, told.get(attribute, 0)) for attribute in AlgorithmAttribute)
    return Algorithm(opaque=bytes(64), attributes=attributes, workspace_bytes=0, waves=1.0)
