"""The problems that a gate takes when none are named: one for each regime that kernels differ in, a minute in all."""

from __future__ import annotations

import torch

from ..problem import Problem

__all__ = ["default_problems"]


def default_problems(device_type: str) -> list[Problem]:
    """The problems that are judged where none are named, on ``cpu`` or ``cuda``."""
    return _cpu() if device_type == "cpu" else _cuda(device_type)


def _cpu() -> list[Problem]:
    sizes = [
        (torch.float32, 256, 512, 512),
        (torch.float32, 16, 1024, 1024),
        (torch.float32, 129, 257, 383),
        (torch.float16, 128, 256, 512),
        (torch.bfloat16, 256, 512, 512),
    ]
    return [
        *(Problem.mm(m, n, k, dtype=dtype, device_type="cpu") for dtype, m, n, k in sizes),
        Problem.addmm(128, 384, 512, dtype=torch.float32, device_type="cpu"),
        Problem.bmm(8, 64, 128, 96, dtype=torch.float32, layout="nn", device_type="cpu"),
    ]


def _cuda(device_type: str) -> list[Problem]:
    sizes = [(1, 4096, 4096), (32, 6144, 4096), (384, 4096, 4096), (3072, 4096, 4096), (256, 256, 32768), (999, 1001, 1000)]
    return [
        *(Problem.mm(m, n, k, dtype=torch.bfloat16, device_type=device_type) for m, n, k in sizes),
        Problem.mm(2048, 2048, 2048, dtype=torch.float16, layout="nn", device_type=device_type),
        Problem.mm(1024, 1024, 1024, dtype=torch.float32, device_type=device_type),
        Problem.addmm(1024, 3072, 768, dtype=torch.bfloat16, device_type=device_type),
        Problem.bmm(64, 256, 256, 128, dtype=torch.bfloat16, layout="nn", device_type=device_type),
    ]
