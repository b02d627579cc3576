"""What the performance gate finds and what it mistakes: by simulation, and on this machine's CPU.

    python benchmarks/gate_operating_point.py simulation
    python benchmarks/gate_operating_point.py cpu --processes 42

Each part replaces its own in the result file and keeps the other. ``cpu`` times a kernel against itself and against itself made 5%
slower, in that many fresh processes, and judges batches drawn from those; it wants an otherwise idle machine.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from environment import describe_environment
from gate_planted import Slowed
from gate_simulation import PROCESSES, Noise, decisions, rates

from gemmtune import Problem, settings
from gemmtune.device import detect
from gemmtune.perf_gate.sampling import FreshProcess, Match, ProcessSample, Sampling
from gemmtune.perf_gate.statistics import Decision, Rule, judge
from gemmtune.perf_gate.subjects import TORCH, subject_for

RESULT = Path(__file__).parent / "results" / "gate-operating-point.json"
SUITE = 20
PLANTED = 0.05
DRAWS = 20_000


@click.group()
def main() -> None:
    """Measure the gate's operating point."""


@main.command()
@click.option("--suites", default=5000, show_default=True, help="Simulated suites without a slow-down.")
@click.option("--planted", default=2000, show_default=True, help="Simulated problems for each slow-down.")
@click.option("--json", "out", default=str(RESULT), show_default=True)
def simulation(suites: int, planted: int, out: str) -> None:
    """Suites of 20 problems, of which none, or one, is slower."""
    rows = []
    for tau in (0.005, 0.01):
        for baseline in (False, True):
            rows.append(_simulated(Noise(process=tau), suites, planted, baseline=baseline))
            click.echo(json.dumps(rows[-1]))
    noise = Noise(process=0.0)
    facts = {
        "problems_in_a_suite": SUITE,
        "suites": suites,
        "planted": planted,
        "processes_in_a_batch": PROCESSES,
        "blocks": Sampling().blocks,
        "sample_noise": noise.sample,
        "outliers": {"share": noise.outliers, "up_to": noise.most_outlying},
        "level": Rule.for_suite(SUITE).level,
    }
    _write(out, "simulation", facts | {"rows": rows})


def _simulated(noise: Noise, suites: int, planted: int, *, baseline: bool) -> dict[str, Any]:
    rule = Rule.for_suite(SUITE)

    def play(slower: float, problems: int, seed: int) -> list[Decision]:
        return decisions([slower] * problems, noise, rule, seed, baseline=baseline)

    equal = play(0.0, suites * SUITE, 1)
    at_limit = play(math.log(rule.limit), suites * SUITE // 5, 2)
    found = {f"+{percent}%": rates(play(math.log1p(percent / 100), planted, percent)) for percent in (3, 4, 5, 7)}
    return {
        "process_noise": noise.process,
        "reference": "baseline" if baseline else "torch",
        "equal": rates(equal),
        "suites_with_a_false_alarm": _suites_with_alarm(equal),
        "suites_with_an_alarm_if_all_are_slower_by_the_limit": _suites_with_alarm(at_limit),
        "slower": found,
    }


def _suites_with_alarm(found: list[Decision]) -> float:
    suites = [found[i : i + SUITE] for i in range(0, len(found), SUITE)]
    return sum(Decision.REGRESSED in suite for suite in suites) / len(suites)


@main.command()
@click.option("--processes", default=42, show_default=True, type=click.IntRange(min=2 * PROCESSES), help="Fresh processes.")
@click.option("--json", "out", default=str(RESULT), show_default=True)
def cpu(processes: int, out: str) -> None:
    """A kernel against itself, and against itself made 5% slower, on this machine."""
    device = detect("cpu")
    problems = [
        Problem.mm(256, 512, 512, dtype=torch.float32, device_type="cpu"),
        Problem.mm(16, 1024, 1024, dtype=torch.float32, device_type="cpu"),
        Problem.mm(256, 512, 512, dtype=torch.bfloat16, device_type="cpu"),
    ]
    process = FreshProcess(device=device, settings=settings.current(), sampling=Sampling.of("cpu"))
    kernels = [subject_for(TORCH, problem, device, settings.current()) for problem in problems]
    equal = [Match(problem=p, candidate=c, reference=c) for p, c in zip(problems, kernels, strict=True)]
    slowed = [Slowed.of(c, PLANTED) for c in kernels]
    matches = equal + [Match(problem=p, candidate=s, reference=c) for p, s, c in zip(problems, slowed, kernels, strict=True)]
    samples = []
    for turn in range(processes):
        samples.append(_measured(process, matches, turn))
        click.echo(f"process {turn + 1} of {processes}: " + " ".join(f"{100 * s.log_ratio:+.2f}%" for s in samples[-1]))
    rows = [
        _drawn(str(match.problem), "equal" if i < len(equal) else "+5%", [row[i].log_ratio for row in samples])
        for i, match in enumerate(matches)
    ]
    for row in rows:
        click.echo(json.dumps(row))
    _write(out, "cpu", {"environment": describe_environment(device), "processes": processes, "rows": rows})


def _measured(process: FreshProcess, matches: list[Match], turn: int) -> list[ProcessSample]:
    samples = list[ProcessSample]()
    for sample in process(matches, turn):
        if isinstance(sample, str):
            raise click.ClickException(sample)
        samples.append(sample)
    return samples


def _drawn(problem: str, planted: str, values: list[float]) -> dict[str, Any]:
    """The decisions on pairs of batches that are drawn from all processes, each process in at most one of the two."""
    rule, generator = Rule.for_suite(SUITE), np.random.default_rng(5)
    found = []
    for _ in range(DRAWS):
        drawn = generator.choice(values, 2 * PROCESSES, replace=False).tolist()
        found.append(judge([drawn[:PROCESSES], drawn[PROCESSES:]], rule).decision)
    return {
        "problem": problem,
        "planted": planted,
        "mean": statistics.fmean(values),
        "process_noise": statistics.stdev(values),
        "verdicts": rates(found),
        "log_ratios": [round(v, 5) for v in values],
    }


def _write(path: str, part: str, data: dict[str, Any]) -> None:
    file = Path(path)
    whole = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(whole | {part: data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
