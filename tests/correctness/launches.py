"""What every compiled kernel's launches have to stand: captures, streams, a thread's first use of CUDA; and where groups end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

import gemmtune
from gemmtune import settings
from gemmtune.choice import Choice, Run, Status
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans, widened
from gemmtune.selector.verify import Verifier

GPU = torch.device("cuda")


def call(run: Run, out: torch.Tensor, x: Operands) -> torch.Tensor:
    run(out, x.tensors, x.scalars)
    return out


def operands_for(choice: Choice, seed: int) -> Operands:
    """Random operands as the choice's kernel is given them."""
    x = random_operands(choice.problem, GPU, seed=seed)
    if choice.packed_format is None:
        return x
    packed = choice.pack(x.named["b"])
    return dataclasses.replace(x, b=packed) if x.weight is None else dataclasses.replace(x, weight=packed)


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


def patterns(m: int, groups: int) -> dict[str, list[int]]:
    """The ends of groups of rows."""
    uneven = sorted((7919 * (g + 1)) % (m + 1) for g in range(groups - 1))
    return {
        "even": [m * (g + 1) // groups for g in range(groups)],
        "uneven": [*uneven, m],
        "empty": [m * ((g + 1) // 2) // (groups // 2) for g in range(groups)],
        "all-in-one": [0] * (groups // 2) + [m] * (groups - groups // 2),
        "end-early": [m // 3 * (g + 1) // groups for g in range(groups)],
        "no-rows": [0] * groups,
    }


def grouped_operands(problem: Problem, device: torch.device = GPU) -> tuple[torch.Tensor, ...]:
    """a, b and scales of random numbers, and offsets of groups without rows."""
    *given, _ = random_operands(problem, device, seed=5).tensors
    return *given, torch.zeros(problem.groups, dtype=torch.int32, device=device)


def assert_by_loop(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: list[int], name: str) -> None:
    """Each group against its own float32 product, and rows behind the last group are as they were."""
    for g, (begin, end) in enumerate(spans(ends, a.shape[0])):
        want, told = a[begin:end].float() @ b[g].float(), f"{name}, group {g}: "
        torch.testing.assert_close(out[begin:end].float(), want, rtol=1e-2, atol=5e-3 * a.shape[1] ** 0.5, msg=told.__add__)
    assert out[ends[-1] :].isnan().all(), f"{name}: rows of no group were written"


def assert_follows_offsets(choice: Choice) -> None:
    """Launch after launch, and replay after replay, of a kernel for groups of rows."""
    problem, run = choice.problem, choice.build().run
    *given, offs = grouped_operands(problem)
    a, b, *scales = given
    wide = widened(b, *scales, problem.encoding, a.dtype) if scales else b
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out, (*given, offs), ())
    found = patterns(problem.m, problem.groups)
    for pattern in (*found, *reversed(found)):
        offs.copy_(torch.tensor(found[pattern], dtype=torch.int32))
        for launch in (lambda: run(out, (*given, offs), ()), graph.replay):
            out.fill_(torch.nan)
            launch()
            assert_by_loop(out, a, wide, found[pattern], pattern)


def assert_touches_nothing_else(run: Run, problem: Problem, device: torch.device = GPU) -> None:
    """Offsets that are none: whatever is stored is a whole sum of the rows that the result has."""
    *ones, _ = (torch.ones_like(x) for x in grouped_operands(problem, device))
    last = [problem.m] * (problem.groups - 4)
    for ends in ([9, 3, 4000, 12], [-7, 5, 2, 99], [2**31 - 1, -(2**31), 40, 41]):
        memory = torch.full((problem.m + 512, problem.n), -1.0, dtype=problem.dtype, device=device)
        run(memory[256:-256], (*ones, torch.tensor(ends + last, dtype=torch.int32, device=device)), ())
        assert (memory[:256] == -1).all()
        assert (memory[-256:] == -1).all()
        assert {*memory.unique().tolist()} <= {-1.0, torch.tensor(float(problem.k), dtype=problem.dtype).item()}


def assert_tuned_and_captured(backend: str) -> None:
    """Calls by a backend alone: what a capture has follows offsets that changed."""
    a, b, offs = grouped_operands(Problem.grouped_mm(64, 128, 256, groups=4, device_type="cuda"))
    out = torch.empty(64, 128, dtype=a.dtype, device=GPU)
    with settings.patch(backends=(backend,), search="quick", max_profiling_configs=1, tune_in_subprocess=False):
        gemmtune.grouped_mm(a, b, offs, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemmtune.grouped_mm(a, b, offs, out=out)
        for ends in ([0, 0, 64, 64], [1, 2, 3, 64], [64, 64, 64, 64]):
            offs.copy_(torch.tensor(ends, dtype=torch.int32))
            out.fill_(torch.nan)
            graph.replay()
            assert_by_loop(out, a, b, ends, str(ends))
