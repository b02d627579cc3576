"""Verdicts on a GPU: hacks of clocks, streams and events, and honest GEMMs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hack_table import HACKS, VALUES
from test_hacks import check_caught

from gemmtune.judging.verdict import Standing, Verdict, judge
from gemmtune.untrusted.conduct import Conduct as C
from gemmtune.untrusted.process import close_all

PERSISTING_L2 = 6
"""``CU_LIMIT_PERSISTING_L2_CACHE_SIZE`` of the CUDA driver."""
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
    "tf32_sums": {C.SETTINGS},
    "unstated_half_sums": WRONG | {C.ROUGH},
    "torch_in_except": {C.TORCH},
}
HONEST = """
import torch

def declared(a, b):
    return torch.matmul(a, b)

def side_stream_that_is_joined(a, b):
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        out = torch.matmul(a, b)
    current.wait_stream(stream)
    out.record_stream(current)
    return out

def synchronises(a, b):
    out = torch.matmul(a, b)
    torch.cuda.synchronize()
    return out

declared.gemm_traits = side_stream_that_is_joined.gemm_traits = synchronises.gemm_traits = {"calls_torch": True}
"""


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    yield
    close_all()


def why_no_persisting_l2() -> str:
    """Return why this process cannot reserve L2 for itself, or "". The limit stays as it was."""
    driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    torch.zeros(1, device="cuda")
    status = driver.cuCtxGetLimit(ctypes.byref(size), PERSISTING_L2)
    status = status or driver.cuCtxSetLimit(PERSISTING_L2, ctypes.c_size_t(2**23)) or driver.cuCtxSetLimit(PERSISTING_L2, size)
    return f"the driver has no limit for persisting L2 here: status {status}" if status else ""


def judged(target: str) -> Verdict:
    (verdict,) = judge(target, level="brief", device="cuda").verdicts
    return verdict


@pytest.mark.parametrize("name", TABLE)
def test_catches_hack(name: str) -> None:
    if name == "persisting_l2" and (reason := why_no_persisting_l2()):
        pytest.skip(reason)
    target = f"{HACKS / 'gpu.py'}:{name}"
    check_caught(target, TABLE[name], judged(target))


@pytest.mark.parametrize("name", ["declared", "side_stream_that_is_joined", "synchronises"])
def test_calls_honest_gemm_right(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("honest") / "kernels.py"
    path.write_text(HONEST)
    verdict = judged(f"{path}:{name}")
    assert verdict.standing is Standing.RIGHT, f"{verdict.findings} {verdict.values.bad[:3]} {verdict.reason}"
    assert verdict.speed is not None
    assert 0.5 < verdict.speed.ratio < 2
