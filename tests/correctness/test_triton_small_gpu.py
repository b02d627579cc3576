"""Kernels for few rows on a GPU, and launches that overlap the previous kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from chains import assert_chains_agree

from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.padding import padded_choices
from gemmtune.backends.triton.swap import swapped_choices
from gemmtune.backends.triton.vec import vector_choices
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.precompile import precompile
from gemmtune.selector.verify import Verifier
from gemmtune.settings import current

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _few_rows(problem: Problem, count: int | None = None) -> list[Choice]:
    """Return every family for few rows, with the variants."""
    device = detect("cuda")
    choices: list[Choice] = [*swapped_choices(problem, device, count or 6), *vector_choices(problem, device, count)]
    return [*choices, *(variant for choice in choices for variant in choice.launch_variants())]


def _silu(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(acc) * x


PROBLEMS = {
    "1-bf16-nt": Problem.mm(1, 1024, 4096, device_type="cuda"),
    "4-f16-nn": Problem.mm(4, 1024, 2048, dtype=torch.float16, layout="nn", device_type="cuda"),
    "3-f32-nt": Problem.addmm(3, 1000, 999, dtype=torch.float32, bias="n", alpha=2, beta=0.5, device_type="cuda"),
    "2-f64-tt": Problem.mm(2, 512, 640, dtype=torch.float64, layout="tt", device_type="cuda"),
    "16-bf16-nt": Problem.addmm(16, 1024, 4096, bias="mn", device_type="cuda"),
    "30-bf16-nn": Problem.mm(30, 1000, 1000, layout="nn", device_type="cuda"),
    "bmm-bf16": Problem.bmm(3, 4, 520, 1024, device_type="cuda"),
    "4-silu-mul": replace(
        Problem.mm(4, 512, 1024, device_type="cuda"),
        epilogue=trace(_silu, torch.float32, [torch.zeros(4, 512, dtype=torch.bfloat16)]),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_every_choice_with_its_own_claims(name: str) -> None:
    problem = PROBLEMS[name]
    choices = _few_rows(problem)
    assert choices
    assert not precompile(choices, current())
    verifier = Verifier(problem, CUDA)
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


WIDTH = 1024
_SMALL = Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4)
CHAINS: dict[str, Callable[[], Iterator[Choice]]] = {
    "split": lambda: iter([_direct(Config(block_m=16, block_n=64, block_k=64, stages=4, warps=4, split_k=4, pdl=True))]),
    "swapped": lambda: iter(swapped_choices(_square(16), detect("cuda"), 1)),
    "vector": lambda: iter(vector_choices(_square(4), detect("cuda"), 1)),
    "copies": lambda: iter(padded_choices(_odd(), detect("cuda"), lambda x: [TritonChoice.of(x, detect("cuda"), _SMALL)])),
}


def _square(m: int) -> Problem:
    return Problem.mm(m, WIDTH, WIDTH, dtype=torch.float16, device_type="cuda")


def _odd() -> Problem:
    return Problem.mm(33, WIDTH - 1, WIDTH - 1, dtype=torch.float16, device_type="cuda")


def _direct(config: Config) -> Choice:
    return TritonChoice.of(_square(16), detect("cuda"), config)


@pytest.mark.parametrize("name", CHAINS)
def test_overlapping_launches_read_the_previous_kernels_results(name: str) -> None:
    choice = next(CHAINS[name]())
    if not choice.launch_variants():
        pytest.skip("this GPU launches in order")
    (ordered,) = choice.launch_variants()
    assert_chains_agree(choice, ordered)
