"""Two processes, or one alone: models sharded, replicated and saved by torch.distributed, quantized and optimized."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rotates(8),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed"),
]
CHECKS = (
    "fully_shard", "fully_shard_of_other_kinds", "fully_shard_of_experts_and_columns", "fully_shard_refuses", "tensor_parallel",
    "tensor_parallel_of_other_sizes", "distributed_tensors", "data_parallel", "collectives", "state_dicts", "checkpoints",
    "optimized", "optimized_and_trained", "compiled", "quantized_too_late",
)  # fmt: skip
"""Checks in ``sharded_models``. That module imports much of torch, so only the processes import it."""


def check(rank: int, folder: str, name: str, device_type: str) -> str:
    """Do a check as one of two processes, and return its traceback if it fails."""
    module = importlib.import_module("sharded_models")
    assert {*module.checks()} == {*CHECKS}
    result: str = module.run(rank, folder, name, device_type)
    return result


def alone(folder: str) -> str:
    """Shard models in a group of one process, and return the traceback if that fails."""
    result: str = importlib.import_module("sharded_models").run_alone(folder)
    return result


@pytest.fixture(scope="module")
def pair():
    """Yield two processes."""
    with process() as one, process() as two:
        yield one, two


@pytest.fixture(scope="module")
def both(pair):
    """Yield a function that does a check in two processes."""
    with ThreadPoolExecutor() as threads:
        yield lambda *args: list(threads.map(lambda job: job[0](check, job[1], *args), zip(pair, (0, 1), strict=True)))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(name, both, tmp_path):
    for rank, failure in enumerate(both(str(tmp_path), name, "cpu")):
        assert not failure, f"rank {rank}: {failure}"


def test_in_a_group_of_one_process(pair, tmp_path):
    assert not pair[0](alone, str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name, both, tmp_path):
    for rank, failure in enumerate(both(str(tmp_path), name, "cuda")):
        assert not failure, f"rank {rank}: {failure}"
