"""Properties of calls: repeated, from several threads, on another stream, in a CUDA graph, with other rows or another GEMM."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from ...declaration.labels import OPS, STRIDED
from ...declaration.subject import Refused, SubjectSpec, load
from ...numerics.guards import guarded_out
from ...numerics.hard_rows import with_hard_rows
from ...numerics.operands import Operands
from ...numerics.some_rows import first_other_row, some_rows
from ...timing.contenders import capturing
from ..bench.bench import Bench
from ..bench.outcome import NoResult
from ..cases.sampling import Sample, Size
from ..cases.scope import Scope
from ..diagnose.match import AT_ONCE
from .property import Probe, Property, declared, exact_probe, fill_bits, overwrite, same_bits, stage

SAME_RUNS = 20
RIGHT_RUNS = 24
THREADS = 4
RUNS_OF_THREAD = 6
SIZES: tuple[Size, ...] = ((64, 64, 64), (48, 56, 1024), (130, 129, 96), (16, 16, 4096), (256, 256, 128), (33, 47, 65))
SHORT_CYCLES, LONG_CYCLES = 30_000_000, 300_000_000
"""About 15 ms and 150 ms of a GPU's clock, several times the host time of a call."""
WARM_UPS = 3
REPLAYS = 3
ON_CUDA: tuple[Size, ...] = ((64, 64, 64), (130, 129, 96), (16, 256, 1024))


def check_determinism(bench: Bench) -> None:
    """Check that repeated calls on random data give the same bits, with the result in other memory each time."""
    operands = bench.probes.random() if not bench.problem.groups else bench.groups.random().operands
    first = bench.call(operands)
    for number in range(2, SAME_RUNS + 1):
        result = bench.call(operands, watch=False)
        if not same_bits(result, first):
            with stage(bench, f"call {number} of {SAME_RUNS}"):
                if bench.expect_equal(result, first, operands, name="the bits of the first call", known=False):
                    bench.fail("the first call gave the same numbers with another sign of 0, or another NaN")


def check_repeatability(bench: Bench) -> None:
    """Check the same exact probe many times, since a race shows on some runs only."""
    probe = exact_probe(bench)
    first = bench.call(probe.operands)
    for number in range(2, RIGHT_RUNS + 1) if probe.judge(bench, first) else ():
        result = bench.call(probe.operands, watch=False)
        if not same_bits(result, first):
            with stage(bench, f"call {number} of {RIGHT_RUNS}"):
                probe.judge(bench, result)


def check_threads(bench: Bench) -> None:
    """Check concurrent calls from several threads with separate operands. Variant ``sizes``: each thread has another M."""
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
                if not probe.judge(own, own.received(result)) and _is_right_alone(own, probe):
                    failure = bench.failures[-1]
                    also = tuple(filter(None, (failure.diagnosis, *failure.also)))
                    bench.failures[-1] = dataclasses.replace(failure, diagnosis=AT_ONCE, also=also)


def _is_right_alone(bench: Bench, probe: Probe) -> bool:
    """Return True if a call of its own is right. Record no failure."""
    noted = len(bench.failures)
    try:
        return probe.judge(bench, bench.call(probe.operands))
    except (Refused, NoResult):
        return False
    finally:
        del bench.failures[noted:]


def check_streams(bench: Bench) -> None:
    """Check a call on a side stream. Its inputs are written late on that stream, and its result is read there at once.

    The operands hold other numbers before, which a GEMM computes with if it runs elsewhere and too early. In the variant
    ``busy_default`` the default stream is busy, so that work on it comes too late.
    """
    old, new = exact_probe(bench), exact_probe(bench)
    with stage(bench, "default stream"):  # gets compilation and tuning of the first call done
        old.judge(bench, bench.call(old.operands))
    side = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side), stage(bench, "side stream, for the first time"):  # allocates its memory
        old.judge(bench, bench.call(old.operands))
    # Overwrite the inputs late on the side stream, then call there.
    torch.cuda.synchronize(bench.device)
    if bench.case.variant == "busy_default":
        torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(SHORT_CYCLES)  # type: ignore[no-untyped-call]
        overwrite(old.operands, new.operands)
        result = bench.call(old.operands, watch=False, wait=False)
        consumed = result.clone()
    torch.cuda.synchronize(bench.device)
    with stage(bench, "side stream"):
        new.judge(bench, consumed)


def check_graph_replay(bench: Bench) -> None:
    """Check a captured call, replayed with other numbers in the same operands and poison in the result."""
    probe = exact_probe(bench)
    live = probe.operands
    with stage(bench, "before the capture"):
        probe.judge(bench, bench.call(live))
    # Capture.
    out = guarded_out(bench.problem.out, bench.device, bench.next_payload())[0] if bench.case.out else None
    # Finish the GEMM's set-up on a side stream before the capture, as torch's documentation asks.
    side = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            bench.launch(live, out, wait=False)
    torch.cuda.current_stream(bench.device).wait_stream(side)
    torch.cuda.synchronize(bench.device)
    graph = torch.cuda.CUDAGraph()
    result = bench.received(_captured(bench, live, out, graph), out)
    # Replay.
    for number in range(1, REPLAYS + 1):
        if number > 1:
            probe = exact_probe(bench)
            overwrite(live, probe.operands)
        fill_bits(result, bench.next_payload())
        graph.replay()
        torch.cuda.synchronize(bench.device)
        with stage(bench, f"replay {number} of {REPLAYS}"):
            probe.judge(bench, result)


def _captured(bench: Bench, operands: Operands, out: torch.Tensor | None, graph: torch.cuda.CUDAGraph) -> object:
    """Return the result of a captured call. Raises Refused if the call cannot be captured."""
    try:
        with capturing(graph):
            return bench.launch(operands, out, wait=False)
    except Exception as error:
        raise Refused(f"while captured in a CUDA graph: {' '.join(str(error).split())[:400]}") from error


def _on_cuda(trait: str) -> Callable[[Scope], str | None]:
    return lambda scope: "needs a GPU" if scope.device_type != "cuda" else declared(trait)(scope)


def check_batch_invariance(bench: Bench) -> None:
    """Check that the first row, the last row and the first half keep their bits without the other rows."""
    for name, operands in _sets(bench):
        _check_rows(bench, bench, name, operands)


def check_reduction(bench: Bench) -> None:
    """Check that the GEMM and the one of ``same_bits`` give equal bits, for all rows and for rows in batches of other sizes."""
    target = bench.subject.traits.same_bits
    other = Bench(load(SubjectSpec(target=target)), bench.case, bench.device, examine=bench.examine)
    other.failures = bench.failures
    for name, operands in _sets(bench):
        with stage(bench, f"against {target}"):
            _check_rows(other, bench, name, operands)


def _sets(bench: Bench) -> Iterator[tuple[str, Operands]]:
    """Yield random operands, then operands with rows on which another order of summation shows."""
    in_groups = bench.groups.random(bench.groups.patterns["uneven"]).operands if bench.problem.groups else None
    random = bench.probes.random() if in_groups is None else in_groups
    yield "random", dataclasses.replace(random, extra=bench.extra)
    hard = with_hard_rows(bench.problem, random)
    if hard is not None:
        yield "hard", dataclasses.replace(hard, extra=bench.extra)


def _check_rows(whole_of: Bench, bench: Bench, name: str, operands: Operands) -> None:
    """Check that ``bench`` gives rows the bits that ``whole_of`` gives them among all rows."""
    whole = whole_of.call(operands)
    m, traits = bench.problem.m, bench.subject.traits
    unit = traits.multiples[0]
    fewest = max(-(-traits.least[0] // unit), 1) * unit
    half = max(m // 2 // unit * unit, fewest)
    for begin, count in dict.fromkeys(((0, m), (0, fewest), (m - fewest, fewest), (0, half))):
        if count == m and whole_of is bench:
            continue
        part = bench.sibling(m=count)
        given = some_rows(operands, part.problem, begin)
        if given.offs is not None:
            given = dataclasses.replace(given, offs=(given.offs - begin).clamp(0, count))
        result = part.call(given)
        row = first_other_row(whole, result, begin)
        if row is not None:
            with stage(bench, f"{name} rows {begin} to {begin + count - 1} without the others"):
                expected = whole[..., begin : begin + count, :]
                if part.expect_equal(result, expected, given, name="the bits among all rows", known=False):
                    bench.fail(f"row {row} has the same numbers with another sign of 0, or NaN in other places")


# 128 rows that share a scale cannot be separated. Strides of one row say nothing about the others.
_SEPARABLE = Sample(
    budget=(18, 72, 300),
    shapes=SIZES,
    ops=(*STRIDED, "grouped_mm", "mixed_grouped_mm", "scaled_grouped_mm"),
    admits=lambda case: case.scales != "block_128x128" or case.row.grouped,
)
PROPERTIES = (
    Property(
        "determinism", "equal inputs give equal bits", check_determinism,
        Sample(budget=(18, 72, 300), shapes=SIZES, ops=OPS), needs=declared("deterministic"),
    ),
    Property(
        "repeatability", "the same call is right every time", check_repeatability,
        Sample(budget=(18, 72, 300), shapes=SIZES, ops=OPS),
    ),
    Property(
        "threads", "calls from several threads at once are right", check_threads,
        Sample(budget=(18, 72, 200), shapes=((64, 64, 64), (72, 129, 96), (48, 56, 256)), variants=("sizes", ""), ops=OPS),
        needs=declared("threads"),
    ),
    Property(
        "streams", "work goes to the current stream, which need not be the default one", check_streams,
        Sample(budget=(24, 72, 200), shapes=ON_CUDA, variants=("late_inputs", "busy_default"), ops=OPS), needs=_on_cuda("streams"),
    ),
    Property(
        "graph-replay", "a captured CUDA graph computes from the numbers that its operands have when it is replayed",
        check_graph_replay,
        Sample(budget=(24, 72, 200), shapes=ON_CUDA, variants=("", {"out": "row"}), ops=OPS), needs=_on_cuda("capturable"),
    ),
    Property(
        "batch-invariance", "the bits of a row do not depend on the other rows, nor on their number", check_batch_invariance,
        _SEPARABLE, needs=lambda scope: declared("batch_invariant")(scope) if not scope.traits.reduction else None,
    ),
    Property(
        "reduction", "a row has the bits that the GEMM of same_bits gives it, in batches of any size", check_reduction,
        _SEPARABLE, needs=declared("same_bits"),
    ),
)  # fmt: skip
