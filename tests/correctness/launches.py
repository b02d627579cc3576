"""What every compiled kernel's launches have to stand: captures, streams, a thread's first use of CUDA."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from gemmtune.choice import Choice, Run, Status
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem
from gemmtune.selector.verify import Verifier

GPU = torch.device("cuda")


def call(run: Run, out: torch.Tensor, x: Operands) -> torch.Tensor:
    run(out, x.tensors, x.scalars)
    return out


def operands_for(choice: Choice, seed: int) -> Operands:
    """Random operands as the choice's kernel is given them."""
    x = random_operands(choice.problem, GPU, seed=seed)
    return x if choice.packed_format is None else dataclasses.replace(x, b=choice.pack(x.b))


def assert_right(problem: Problem, choices: Iterable[Choice]) -> None:
    """All that verification asks."""
    verifier = Verifier(problem, GPU)
    for choice in choices:
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, f"{choice.name}: {verdict.reason}"


def assert_replayable(choice: Choice) -> None:
    """A capture may have the first call, and its replays give the bits of a call."""
    run = choice.build().run
    x = operands_for(choice, seed=3)
    outs = [torch.empty_like(x.out) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            call(run, out, x)
    eager = call(run, torch.empty_like(x.out), x)
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, eager) for out in outs)


def assert_streams_apart(choice: Choice) -> None:
    """Calls of three streams, each with operands of its own, give the bits of calls on one: nothing of another's is seen."""
    run = choice.build().run
    operands = [operands_for(choice, seed) for seed in range(3)]
    expected = [call(run, torch.empty_like(x.out), x) for x in operands]
    outs = [torch.full_like(operands[0].out, float("nan")) for _ in range(90)]
    torch.cuda.synchronize()
    of_streams = list(zip([torch.cuda.Stream() for _ in operands], operands, expected, strict=True))
    for out, (stream, x, _) in zip(outs, itertools.cycle(of_streams), strict=False):
        with torch.cuda.stream(stream):
            call(run, out, x)
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out, (_, _, right) in zip(outs, itertools.cycle(of_streams), strict=False))


def assert_launched_by_a_new_thread(choice: Choice) -> None:
    """The first use of CUDA in a thread may be a launch."""
    run = choice.build().run
    x = operands_for(choice, seed=6)
    expected, out = call(run, torch.empty_like(x.out), x), torch.full_like(x.out, float("nan"))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(call, run, out, x).result(timeout=60)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
