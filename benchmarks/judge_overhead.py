"""Cost of the judge's walls: torch's time in a process of its own, compared with its time by ``timing/`` in this process.

    python benchmarks/judge_overhead.py --device cuda --shape 2048x2048x1536 --json overhead.json

``overhead`` is the judged time over that of ``timing/``, minus 1. Both have operands that no cache holds. ``added_us`` is what the
judge has found that it adds to a call on a GPU, and has taken off; ``before`` is the overhead with it. ``calls_per_s`` counts whole
calls of the judge, with new operands and a checked result.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from environment import describe_environment

from gemmtune import settings
from gemmtune.device import DeviceInfo, detect
from gemmtune.problem import Problem
from gemmtune.selector.candidates import candidates_for
from gemmtune.timing.timer import Timer, collection_paused, conditions, median_margin
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.shape import Shape
from gemmtune.untrusted.subject import OF_TORCH, rival, subject_of
from gemmtune.untrusted.target import TORCH
from gemmtune.untrusted.trial import Trial

__all__ = ["judged", "timed_us"]

SAMPLES = 30


def timed_us(problem: Problem, device: DeviceInfo, mode: settings.Timing) -> list[float]:
    """Times of torch's own operation in this process."""
    with settings.patch(backends=("aten",)):
        found = candidates_for(problem, device, settings.current()).choices.values()
    choice = next(choice for choice in found if choice.baseline)
    with conditions(problem, device), collection_paused():
        contender = Timer(problem, device, mode).contender(choice, choice.build())
        contender.sample_us()
        return [contender.sample_us() for _ in range(SAMPLES)]


def judged(problem: Problem, device: DeviceInfo, calls: int) -> tuple[Shape, float]:
    """Calls of torch as the judge sees them, and the seconds of all of them with their checks."""
    where = "cpu" if device.type == "cpu" else str(device.torch_device)
    candidate = Candidate(TORCH, where)
    try:
        trial = Trial(subject_of(candidate, OF_TORCH), candidate, rival(where))
        trial.calls(problem, 5, timed=True, deadline=time.monotonic() + 60)
        begun = time.perf_counter()
        shape = trial.calls(problem, calls, timed=True, deadline=time.monotonic() + 60)
        seconds = time.perf_counter() - begun
    finally:
        candidate.close()
    if shape.wrong or shape.refused:
        raise click.ClickException(f"torch is wrong: {shape.wrong} {shape.refused}")
    return shape, seconds


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--shape", "shapes", multiple=True, default=("2048x2048x1536",), show_default=True)
@click.option("--calls", default=120, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(device: str, dtype: str, shapes: tuple[str, ...], calls: int, file: Path | None) -> None:
    """Compare the judge's times with those of timing/."""
    found, rows = detect(device), list[dict[str, Any]]()
    for text in shapes:
        m, n, k = map(int, text.split("x"))
        problem = Problem.mm(m, n, k, dtype=getattr(torch, dtype), device_type=found.torch_device.type)
        plain = timed_us(problem, found, "graph")
        shape, seconds = judged(problem, found, calls)
        own = [own_s * 1e6 for own_s, _ in shape.pairs]
        middle, half = median_margin(own)
        added_us, added_margin_us = (x * 1e6 for x in shape.added_s)
        alone = statistics.median(plain)
        rows.append({
            "problem": str(problem), "timing_us": alone, "judged_us": middle, "judged_margin_us": half,
            "overhead": middle / alone - 1, "added_us": added_us, "added_margin_us": added_margin_us,
            "before": (middle + added_us) / alone - 1, "judged_least_us": min(own), "timing_least_us": min(plain),
            "calls_per_s": calls / seconds,
        })  # fmt: skip
    result = json.dumps({"environment": describe_environment(found), "rows": rows}, indent=1)
    click.echo(result)
    if file is not None:
        file.write_text(result + "\n")


if __name__ == "__main__":
    main()
