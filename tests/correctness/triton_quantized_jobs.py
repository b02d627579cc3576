"""Jobs of the interpreter tests of quantized operations for a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.mixed.words import WordsChoice, WordsConfig
from gemmtune.backends.triton.vec import WordsVectorChoice
from gemmtune.choice import Choice
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.selector.samples import Sample
from gemmtune.selector.verify import Verifier

CPU = preset("portable")
SMALLEST_TILE = 16
"""Minimum rows for a tensor core; a config of fewer rows belongs to a template without tensor cores."""


def _choice(problem: Problem, config: Config) -> Choice:
    make: Callable[..., Choice] = WordsChoice.of if isinstance(config, WordsConfig) else TritonChoice.of
    if config.block_m < SMALLEST_TILE:
        make = WordsVectorChoice.of
    return make(problem, CPU, config)


def verdicts(problem: Problem, configs: Sequence[Config]) -> list[Sample]:
    """Return the verification result of each config: exact probes, and random data against float64."""
    verifier = Verifier(problem, torch.device("cpu"))
    choices = [_choice(problem, config) for config in configs]
    return [verifier.check(choice, choice.build()) for choice in choices]


def result(problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor, extra: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the result for the caller's operands."""
    out = torch.empty(problem.out.size, dtype=problem.out.dtype)
    _choice(problem, config).build().run(out, (a, b, *extra), ())
    return out
