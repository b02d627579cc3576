"""Products in a chain, each of which reads what the last kernel wrote: a launch that comes too early shows in the result."""

from __future__ import annotations

import torch

from gemmtune.choice import Choice, Kernel
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem

__all__ = ["Chain", "assert_chains_agree"]

CUDA = torch.device("cuda")


class Chain:
    """x ← x @ w over and over, with other kernels between, in two buffers: every kernel reads what the last one wrote."""

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        self.kernel = kernel
        operands = random_operands(problem, CUDA, seed=0)
        self.start, self.w = operands.a, operands.b.mul_(0.03)
        self.buffers = [torch.empty_like(operands.a) for _ in range(2)]

    def run(self, *, side: torch.cuda.Stream | None = None) -> None:
        """Eight products; between some of them a copy, a fill and, on another stream, a scaling."""
        self.buffers[0].copy_(self.start)
        for i in range(8):
            x, y = self.buffers[i % 2], self.buffers[1 - i % 2]
            if i % 3 == 1:
                y.fill_(torch.nan)
            self.kernel.run(y, (x, self.w), ())
            if i % 3 == 2:
                x.fill_(torch.nan)
            if i == 4 and side is not None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y.mul_(0.5)
                torch.cuda.current_stream().wait_stream(side)

    @property
    def result(self) -> torch.Tensor:
        """A copy of the last product."""
        return self.buffers[0].clone()


def assert_chains_agree(choice: Choice, ordered: Choice) -> None:
    """A chain of ``choice`` gives, bit by bit, what one of ``ordered`` gives: launched one by one, and replayed from a graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    expected = Chain(ordered.build(), choice.problem)
    expected.run(side=side)
    torch.cuda.synchronize()
    assert bool(expected.result.isfinite().all())
    chain = Chain(choice.build(), choice.problem)
    for _ in range(50):
        chain.run(side=side)
        assert torch.equal(chain.result, expected.result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(side=side)
        chain.run(side=side)
    for _ in range(50):
        graph.replay()
        assert torch.equal(chain.result, expected.result)
