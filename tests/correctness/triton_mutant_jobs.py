"""What a process whose Triton interprets does for the tests of the mutants' Triton kernel."""

from __future__ import annotations

import torch
from interpreter import MEMORY
from mutants import triton_kernels
from mutants.triton_kernels import TritonGemm

M, N, K = 67, 70, 45
BESIDE = 7.0
"""Fills what lies behind out."""
TOLERANCE = 2.0**-10
"""Sums of so many numbers from [0, 1) in float32, rounded to float16, are that close."""


def wrong_elements(gemm: TritonGemm) -> dict[str, int]:
    """How many elements of out are wrong, how many behind it were written, and whether anything else was touched."""
    generator = torch.Generator().manual_seed(6)
    memory = torch.rand(40_000, generator=generator).half()
    a, b = memory.as_strided((M, K), (K + 5, 1), 300), memory.as_strided((K, N), (N + 10, 1), 7000)
    whole = torch.full((200, N), BESIDE, dtype=torch.float16)
    MEMORY.ranges, MEMORY.outside = [], []
    gemm.mm(a, b, out=whole[:M])
    outside, MEMORY.outside = MEMORY.outside, None
    right = a.double() @ b.double()
    wrong = ((whole[:M].double() - right).abs() > TOLERANCE * right).sum()
    return {"wrong": int(wrong), "beside": int((whole[M:] != BESIDE).sum()), "outside": bool(outside)}


def spoiled() -> dict[str, dict[str, int]]:
    """``wrong_elements`` of all kernels of the module, by name."""
    gemms = {name: getattr(triton_kernels, name) for name in triton_kernels.__all__}
    return {name: wrong_elements(gemm) for name, gemm in gemms.items() if isinstance(gemm, TritonGemm)}
