"""Persistent kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chains import assert_chains_agree

from gemmtune.backends.triton import descriptors, launch
from gemmtune.backends.triton.launch import Launcher, takes_encoded
from gemmtune.backends.triton.padding import padded_choices
from gemmtune.backends.triton.persistent import persistent_choices
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.precompile import precompile
from gemmtune.selector.verify import Verifier
from gemmtune.settings import current

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _choices(problem: Problem, count: int | None = 6) -> list[Choice]:
    """Return the choices with their variants; none of them skips the test."""
    choices: list[Choice] = list(persistent_choices(problem, detect("cuda"), count))
    if not choices:
        pytest.skip("this GPU has no copy engine")
    return [*choices, *(variant for choice in choices for variant in choice.launch_variants())]


def test_copies_of_unaligned_operands() -> None:
    problem = Problem.mm(1000, 1001, 999, device_type="cuda")
    device = detect("cuda")
    choices: list[Choice] = list(padded_choices(problem, device, lambda aligned: persistent_choices(aligned, device, 3)))
    if not choices:
        pytest.skip("this GPU has no copy engine")
    choices += [variant for choice in choices for variant in choice.launch_variants()]
    assert not precompile(choices, current())
    verifier = Verifier(problem, CUDA)
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


def _silu(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(acc) * x


PROBLEMS = {
    "bf16-nt": Problem.mm(1024, 1024, 1024, device_type="cuda"),
    "bf16-nt-large": Problem.mm(2048, 2048, 1056, device_type="cuda"),
    "f16-nn-edges": Problem.mm(1000, 2056, 520, dtype=torch.float16, layout="nn", device_type="cuda"),
    "f16-tt-odd-out": Problem.mm(1000, 1001, 1000, dtype=torch.float16, layout="tt", device_type="cuda"),
    "bf16-tn": Problem.mm(1016, 1024, 1000, layout="tn", device_type="cuda"),
    "addmm-bf16-n": Problem.addmm(1024, 1032, 512, bias="n", device_type="cuda"),
    "addmm-f16-mn": Problem.addmm(1024, 1024, 512, dtype=torch.float16, bias="mn", alpha=2, beta=0.5, device_type="cuda"),
    "silu-mul": replace(
        Problem.mm(1024, 2048, 256, device_type="cuda"),
        epilogue=trace(_silu, torch.float32, [torch.zeros(1024, 2048, dtype=torch.bfloat16)]),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_verification_accepts_every_choice_with_its_own_claims(name: str) -> None:
    problem = PROBLEMS[name]
    choices = _choices(problem, count=None)
    assert not precompile(choices, current())
    verifier = Verifier(problem, CUDA)
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (choice.name, verdict.reason)


def test_overlapping_launches_read_the_previous_kernels_results() -> None:
    choice, *_ = _choices(Problem.mm(1024, 1024, 1024, dtype=torch.float16, device_type="cuda"), 1)
    (other,) = choice.launch_variants()
    overlapping, ordered = (choice, other) if choice.info["pdl"] else (other, choice)
    assert_chains_agree(overlapping, ordered)


def _product(choice: Choice, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and torch's."""
    operands = random_operands(choice.problem, CUDA, seed=seed)
    choice.build().run(operands.out, operands.tensors, operands.scalars)
    return operands.out, operands.a.float() @ operands.b.float()


def test_tritons_own_launcher_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, *_ = _choices(PROBLEMS["bf16-nt"], 1)
    direct, expected = _product(choice, 0)
    torch.testing.assert_close(direct.float(), expected, rtol=2e-2, atol=1e-1)
    monkeypatch.setattr(launch, "takes_encoded", lambda compiled, call: None)
    assert torch.equal(_product(choice, 0)[0], direct)


def test_the_installed_triton_takes_encoded_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, *_ = _choices(PROBLEMS["bf16-nt"], 1)
    taken = []

    def asked(compiled: object, call: Launcher) -> Launcher | None:
        taken.append(takes_encoded(compiled, call))
        return taken[-1]

    monkeypatch.setattr(launch, "takes_encoded", asked)
    choice.build()
    assert taken[0] is not None


def test_operands_at_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "MOST_KNOWN", 3)
    choice, *_ = _choices(Problem.mm(512, 512, 512, device_type="cuda"), 1)
    run = choice.build().run
    operands = [random_operands(choice.problem, CUDA, seed=seed) for seed in range(5)]
    for _ in range(2):
        for given in operands:
            given.out.fill_(torch.nan)
            run(given.out, (given.a, given.b), ())
            torch.testing.assert_close(given.out.float(), given.a.float() @ given.b.float(), rtol=2e-2, atol=1e-1)
