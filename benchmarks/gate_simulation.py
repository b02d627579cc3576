"""Simulated processes for the performance gate: the noise that is put in is known, and so is the truth.

A sample of a kernel takes exp(0.6%·z) of its true time, z standard normal, and one in twenty up to half as long again, as when the
system takes the core away. The log ratio of two kernels in one process is off by a normal number of standard deviation τ: where
memory lies, which clocks a GPU settles at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemmtune.perf_gate.sampling import ProcessSample, Sampling, Series, collect
from gemmtune.perf_gate.statistics import Decision, Estimate, Judgement, Rule, judge

__all__ = ["Noise", "decisions", "rates"]

PROCESSES = 7
CHUNK = 5000
"""Problems simulated at a time: about 100 MB of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Of log times: ``sample`` and ``process`` are standard deviations, ``outliers`` a share of the samples."""

    process: float
    sample: float = 0.006
    outliers: float = 0.05
    most_outlying: float = 0.5


def medians(slower: np.ndarray, noise: Noise, generator: np.random.Generator) -> np.ndarray:
    """The log ratio that one process finds for each candidate that takes exp(``slower``) of its reference's time."""
    blocks = Sampling().blocks
    times = noise.sample * generator.standard_normal((len(slower), blocks, 4), dtype=np.float32)
    hit = generator.random((len(slower), blocks, 4), dtype=np.float32) < noise.outliers
    times += np.where(hit, np.log1p(noise.most_outlying * generator.random(hit.shape, dtype=np.float32)), 0)
    log_ratios = (times[:, :, :2].sum(axis=2) - times[:, :, 2:].sum(axis=2)) / 2
    return slower + noise.process * generator.standard_normal(len(slower)) + np.median(log_ratios, axis=1)


def decisions(slower: Sequence[float], noise: Noise, rule: Rule, seed: int, *, baseline: bool) -> list[Decision]:
    """The decision on a candidate for each of ``slower``, its true log ratio to the reference.

    With ``baseline`` the reference is what a gate measured and stored when that ratio was 1.
    """
    generator = np.random.default_rng(seed)
    found: list[Decision] = []
    for start in range(0, len(slower), CHUNK):
        found += _chunk(np.array(slower[start : start + CHUNK]), noise, rule, generator, baseline=baseline)
    return found


def _chunk(slower: np.ndarray, noise: Noise, rule: Rule, generator: np.random.Generator, *, baseline: bool) -> list[Decision]:
    stored: list[Estimate | None] = [None] * len(slower)
    if baseline:
        values = np.stack([medians(np.zeros(len(slower)), noise, generator) for _ in range(2 * PROCESSES)], axis=1)
        stored = [Estimate.of(row) for row in values.tolist()]

    def process(matches: Sequence[int], _turn: int) -> list[ProcessSample]:
        values = medians(slower[list(matches)], noise, generator).tolist()
        return [ProcessSample(log_ratio=v, candidate_us=math.exp(v), reference_us=1.0, blocks=Sampling().blocks) for v in values]

    def judged(index: int, series: Series) -> Judgement:
        return judge(series.values, rule, stored[index])

    matches = range(len(slower))
    series = collect(matches, process, judged, processes=PROCESSES, whole=False, tell=lambda _: None)
    return [judged(i, s).decision for i, s in enumerate(series)]


def rates(found: Sequence[Decision]) -> dict[str, float]:
    """The share of each decision that occurs."""
    return {str(decision): found.count(decision) / len(found) for decision in Decision if decision in found}
