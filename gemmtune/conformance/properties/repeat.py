"""The same call again: bit by bit if so declared, right every time at least, and from several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from ..bench.bench import Bench
from ..cases.scope import Scope
from .coverage import Sample, Size, fitted
from .probing import Probe, exact_probe, same_bits, stage
from .property import Property

__all__ = ["PROPERTIES"]

SAME_RUNS = 20
RIGHT_RUNS = 24
THREADS = 4
RUNS_OF_THREAD = 6
_SIZES: tuple[Size, ...] = ((64, 64, 64), (48, 56, 1024), (130, 129, 96), (16, 16, 4096), (256, 256, 128), (33, 47, 65))
_SMALL: tuple[Size, ...] = ((64, 64, 64), (72, 129, 96), (48, 56, 256))


def check_determinism(bench: Bench) -> None:
    """Random data, the same operands, other memory for the result each time: the same bits."""
    operands = bench.probes.random()
    first = bench.call(operands)
    for number in range(2, SAME_RUNS + 1):
        result = bench.call(operands, watch=False)
        if same_bits(result, first):
            continue
        with stage(bench, f"call {number} of {SAME_RUNS}"):
            if bench.expect_equal(result, first, operands, name="the bits of the first call", known=False):
                bench.fail("the first call gave the same numbers with another sign of 0, or another NaN")
        return


def check_repeatability(bench: Bench) -> None:
    """The same exact probe many times, since a race shows on some runs only."""
    probe = exact_probe(bench)
    first = bench.call(probe.operands)
    right = probe.judge(bench, first)
    for number in range(2, RIGHT_RUNS + 1):
        if not right:
            return
        result = bench.call(probe.operands, watch=False)
        with stage(bench, f"call {number} of {RIGHT_RUNS}"):
            right = same_bits(result, first) or probe.judge(bench, result)


def check_threads(bench: Bench) -> None:
    """Several threads call at once, each with operands of its own. The variant ``sizes``: and each with another M."""
    m, step = bench.case.m, bench.subject.traits.multiples[0]
    sizes = [m + i * step * (bench.case.variant == "sizes") for i in range(THREADS)]
    benches = [bench.sibling(m=size, seed=bench.case.seed + i) for i, size in enumerate(sizes)]
    jobs = [(own, [exact_probe(own) for _ in range(RUNS_OF_THREAD)]) for own in benches]
    start = Barrier(THREADS)

    def run(own: Bench, probes: list[Probe]) -> list[object]:
        start.wait()
        if bench.device.type == "cuda":
            torch.cuda.set_device(bench.device)
        return [own.launch(probe.operands) for probe in probes]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [waiting.result() for waiting in [pool.submit(run, *job) for job in jobs]]
    for thread, ((own, probes), received) in enumerate(zip(jobs, results, strict=True), 1):
        for number, (probe, result) in enumerate(zip(probes, received, strict=True), 1):
            with stage(bench, f"thread {thread} of {THREADS}, call {number}"):
                if not probe.judge(own, own.received(result)):
                    return


def _needs_deterministic(scope: Scope) -> str | None:
    return None if scope.traits.deterministic else "deterministic is not declared"


def _needs_threads(scope: Scope) -> str | None:
    return None if scope.traits.threads else "threads is not declared"


PROPERTIES = (
    Property(
        name="determinism",
        meaning="equal inputs give equal bits",
        check=check_determinism,
        cases=Sample(name="determinism", budget=(18, 72, 300), shapes=fitted(*_SIZES)),
        needs=_needs_deterministic,
    ),
    Property(
        name="repeatability",
        meaning="the same call is right every time",
        check=check_repeatability,
        cases=Sample(name="repeatability", budget=(18, 72, 300), shapes=fitted(*_SIZES)),
    ),
    Property(
        name="threads",
        meaning="calls from several threads at once are right",
        check=check_threads,
        cases=Sample(name="threads", budget=(18, 72, 200), shapes=fitted(*_SMALL), variants=("sizes", "")),
        needs=_needs_threads,
    ),
)
