"""Tracing an epilogue costs little, for it may happen in every call."""

from __future__ import annotations

import time

import torch

from gemmtune.problem.trace import trace

LIMIT_S = 2e-3


def test_tracing_a_small_epilogue() -> None:
    scale = torch.ones(5, dtype=torch.bfloat16)
    times_s: list[float] = []
    for _ in range(50):
        begun = time.thread_time()
        trace(lambda acc, s: torch.relu(acc * s - 1.234), torch.float32, [scale])
        times_s.append(time.thread_time() - begun)
    assert min(times_s) < LIMIT_S, (
        f"got {min(times_s) * 1e3:.2f} ms at best of {len(times_s)}, expected less than {LIMIT_S * 1e3:.0f} ms"
    )
