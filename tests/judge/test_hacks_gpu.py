"""Verdicts on a GPU: hacks of clocks, streams and events, and honest GEMMs."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hack_table import HACKS, VALUES
from test_hacks import check_caught

import gemmtune
from gemmtune import settings
from gemmtune.choice import Status
from gemmtune.judging.verdict import Standing, Verdict, judge
from gemmtune.untrusted.conduct import Conduct as C

LIMITS = {"persisting_l2": (6, 24 * 2**20), "coarser_l2_fetches": (5, 32)}
"""Limits of a CUDA context that hacks set, by their numbers in the driver, with a value."""
pytestmark = [pytest.mark.gpu, pytest.mark.alone]
WRONG = {C.WRONG, C.SOMETIMES, VALUES}
TABLE = {
    "on_another_stream": WRONG,
    "another_stream_is_left_current": WRONG | {C.CLOCK, C.SETTINGS},
    "thread_after_return": WRONG,
    "patched_elapsed_time": {C.REPLACED},
    "patched_base_event": {C.REPLACED},
    "replayed_graph": {C.STALE},
    "by_data_ptr": {C.STALE},
    "persisting_l2": {C.SETTINGS},
    "coarser_l2_fetches": {C.SETTINGS},
    "tf32_sums": {C.SETTINGS},
    "unstated_half_sums": WRONG | {C.ROUGH},
    "torch_in_except": {C.TORCH},
}
HONEST = (
    "declared_torch", "side_stream_that_is_joined", "synchronises", "many_launches", "split_k", "joined_thread",
    "replays_a_graph", "by_triton",
)  # fmt: skip
AS_FAST_AS_TORCH = ("declared_torch", "side_stream_that_is_joined", "synchronises")
"""GEMMs that do little besides torch's product. A Python thread in each call takes longer than a launch hides."""


def why_not_settable(limit: int, value: int) -> str:
    """Return why this process cannot change a limit of its CUDA context, or "". The limit stays as it was."""
    driver, before, after = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_size_t()
    torch.zeros(1, device="cuda")
    status = driver.cuCtxGetLimit(ctypes.byref(before), limit) or driver.cuCtxSetLimit(limit, ctypes.c_size_t(value))
    status = status or driver.cuCtxGetLimit(ctypes.byref(after), limit) or driver.cuCtxSetLimit(limit, before)
    if status:
        return f"the driver does not let a process set its limit {limit}: status {status}"
    return f"limit {limit} stays {before.value} when it is set to {value}" if before.value == after.value else ""


def judged(target: str) -> Verdict:
    (verdict,) = judge(target, level="brief", device="cuda").verdicts
    return verdict


@pytest.mark.parametrize("name", TABLE)
def test_catches_hack(name: str) -> None:
    if name in LIMITS and (reason := why_not_settable(*LIMITS[name])):
        pytest.skip(reason)
    target = f"{HACKS / 'gpu.py'}:{name}"
    check_caught(target, TABLE[name], judged(target))


@pytest.mark.parametrize("name", HONEST)
def test_calls_honest_gemm_right(name: str) -> None:
    verdict = judged(f"{HACKS.parent / 'honest_gpu.py'}:{name}")
    assert verdict.standing is Standing.RIGHT, f"{verdict.findings} {verdict.values.bad[:3]} {verdict.reason}"
    assert verdict.speed is not None
    assert name not in AS_FAST_AS_TORCH or 0.5 < verdict.speed.ratio < 2


def tuned(*targets: str) -> gemmtune.TuningResult:
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with settings.patch(extra_choices=targets, backends=("aten",), busy="accept"):
        [result] = gemmtune.tune("mm", a, b, progress=False)
    return result


def test_no_deceiving_gemm_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HACKS.parent))
    tuner = [f"hacks.tuner:{name}" for name in ("forges_the_worker", "fast_among_choices", "stale_after_thirty")]
    result = tuned(*tuner, *(f"hacks.gpu:{name}" for name in ("by_data_ptr", "on_another_stream", "patched_elapsed_time")))
    assert result.pick == "aten:mm", [(x.name, x.status, x.reason) for x in result.outcomes]
    assert len(result.outcomes) > 6


def test_walls_pass_an_honest_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HACKS.parent))
    result = tuned("honest_gpu:declared_torch")
    (own,) = (x for x in result.outcomes if x.name == "own:honest_gpu:declared_torch")
    assert own.status is Status.OK, own.reason
