"""Choices on aligned copies, launched."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemmtune.backends.triton import BACKEND
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Layout, Problem
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu


def shifted(problem: Problem) -> Problem:
    return dataclasses.replace(problem, b=dataclasses.replace(problem.b, offset=3))


PROBLEMS = {
    "odd k nt": lambda: Problem.mm(100, 77, 131, layout="nt", device_type="cuda"),
    "odd all nn": lambda: Problem.mm(101, 77, 131, layout="nn", device_type="cuda"),
    "odd all tn": lambda: Problem.mm(101, 77, 131, layout="tn", device_type="cuda", dtype=torch.float16),
    "odd all tt": lambda: Problem.mm(301, 513, 1003, layout="tt", device_type="cuda"),
    "float32": lambda: Problem.mm(65, 66, 67, layout="nt", device_type="cuda", dtype=torch.float32),
    "float64": lambda: Problem.mm(65, 66, 67, layout="nn", device_type="cuda", dtype=torch.float64),
    "batch": lambda: Problem.bmm(3, 33, 35, 37, layout="nn", device_type="cuda"),
    "bias": lambda: Problem.addmm(33, 35, 37, layout="nt", device_type="cuda", bias="n", alpha=2.0, beta=0.5),
    "pointer": lambda: shifted(Problem.mm(64, 64, 64, layout="nt", device_type="cuda")),
    "strided": lambda: Problem(
        op="mm", device_type="cuda", a=Layout(size=(64, 48), stride=(192, 2), dtype=torch.float16),
        b=Layout.contiguous((48, 80), torch.float16), out=Layout.contiguous((64, 80), torch.float16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_values(name: str):
    problem = PROBLEMS[name]()
    verifier = Verifier(problem, torch.device("cuda"))
    choices = [c for c in BACKEND.enumerate(problem, detect("cuda"), Settings()).choices if c.name.endswith("_pad")][:3]
    assert choices
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, verdict.reason


def test_in_a_graph_with_changed_inputs():
    problem = Problem.mm(100, 77, 131, device_type="cuda")
    choice = next(c for c in BACKEND.enumerate(problem, detect("cuda"), Settings()).choices if c.name.endswith("_pad"))
    kernel = choice.build()
    x = random_operands(problem, torch.device("cuda"), seed=0)
    kernel.run(x.out, (x.a, x.b), ())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(x.out, (x.a, x.b), ())
    y = random_operands(problem, torch.device("cuda"), seed=1)
    x.a.copy_(y.a)
    x.b.copy_(y.b)
    x.out.fill_(torch.nan)
    graph.replay()
    want = (x.a.double() @ x.b.double()).to(torch.bfloat16)
    assert (x.out.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
