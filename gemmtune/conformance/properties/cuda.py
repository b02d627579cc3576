"""Streams and CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ...numerics.guards import guarded_out
from ...numerics.operands import Operands
from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from ..gemms.refusals import Refused
from .coverage import Sample, Size, fitted
from .probing import exact_probe, fill_bits, overwrite, stage
from .property import Property

__all__ = ["PROPERTIES"]

SHORT_CYCLES, LONG_CYCLES = 30_000_000, 300_000_000
"""About 15 ms and 150 ms of a GPU's clock: several times what the host needs for a call."""
WARM_UPS = 3
REPLAYS = 3
_SIZES: tuple[Size, ...] = ((64, 64, 64), (130, 129, 96), (16, 256, 1024))


def check_streams(bench: Bench) -> None:
    """Run on a stream other than the default one, with inputs that are written there late, and the result read there at once.

    Before, the same operands hold other numbers, so that a GEMM that runs elsewhere and too early computes those. With the variant
    ``busy_default`` the default stream is busy meanwhile: what is run there comes too late.
    """
    old, new = exact_probe(bench), exact_probe(bench)
    with stage(bench, "default stream"):  # whatever is compiled or tuned at the first call is, now
        if not old.judge(bench, bench.call(old.operands)):
            return
    side = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side), stage(bench, "side stream, for the first time"):  # its memory is there from now on
        if not old.judge(bench, bench.call(old.operands)):
            return
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
    """Captured once, replayed with other numbers in the same operands and poison in the result."""
    probe = exact_probe(bench)
    live = probe.operands
    with stage(bench, "before the capture"):
        if not probe.judge(bench, bench.call(live)):
            return
    out = guarded_out(bench.problem.out, bench.device, bench.next_payload())[0] if bench.case.out else None
    _warm_up(bench, live, out)
    graph = torch.cuda.CUDAGraph()
    result = bench.received(_captured(bench, live, out, torch.cuda.graph(graph)), out)
    for number in range(1, REPLAYS + 1):
        if number > 1:
            probe = exact_probe(bench)
            overwrite(live, probe.operands)
        fill_bits(result, bench.next_payload())
        graph.replay()
        torch.cuda.synchronize(bench.device)
        with stage(bench, f"replay {number} of {REPLAYS}"):
            if not probe.judge(bench, result):
                return


def _warm_up(bench: Bench, operands: Operands, out: torch.Tensor | None) -> None:
    """What a GEMM sets up on its first calls, it does before the capture, on a side stream as torch's documentation asks."""
    side = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            bench.launch(operands, out, wait=False)
    torch.cuda.current_stream(bench.device).wait_stream(side)
    torch.cuda.synchronize(bench.device)


def _captured(bench: Bench, operands: Operands, out: torch.Tensor | None, capture: AbstractContextManager[None]) -> object:
    """The result of a captured call.

    Raises:
        Refused: the call cannot be captured.
    """
    try:
        with capture:
            return bench.launch(operands, out, wait=False)
    except Exception as error:
        torch.cuda.synchronize(bench.device)  # raises where the broken capture has left the device unusable
        raise Refused(f"while captured in a CUDA graph: {' '.join(str(error).split())[:400]}") from error


def _given_out(case: Case) -> Case:
    return case.changed(out="row", variant="") if case.variant == "out" else case


def _needs(scope: Scope, trait: str) -> str | None:
    if scope.device_type != "cuda":
        return "needs a CUDA device"
    return None if getattr(scope.traits, trait) else f"{trait} is not declared"


PROPERTIES = (
    Property(
        name="streams",
        meaning="work goes to the current stream, which need not be the default one",
        check=check_streams,
        cases=Sample(name="streams", budget=(24, 72, 200), shapes=fitted(*_SIZES), variants=("late_inputs", "busy_default")),
        needs=lambda scope: _needs(scope, "streams"),
    ),
    Property(
        name="graph-replay",
        meaning="a captured CUDA graph computes from the numbers that its operands have when it is replayed",
        check=check_graph_replay,
        cases=Sample(name="graph-replay", budget=(24, 72, 200), shapes=fitted(*_SIZES), variants=("", "out"), finish=_given_out),
        needs=lambda scope: _needs(scope, "capturable"),
    ),
)
