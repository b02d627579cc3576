"""Jobs of the interpreter tests for a child process, because Triton decides at import if it interprets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gemmtune.backends.table import load
from gemmtune.backends.triton.blocks.choice import BlocksChoice
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.grouped.choice import CombinedChoice, RowsChoice, TermsChoice
from gemmtune.backends.triton.grouped.words import WordRowsChoice
from gemmtune.backends.triton.mixed.words import WordsConfig
from gemmtune.backends.triton.parts import PartsChoice
from gemmtune.backends.triton.persistent import PersistentChoice, PersistentRunsChoice
from gemmtune.backends.triton.runs import RunsChoice, RunsConfig
from gemmtune.backends.triton.splits.decompose import decomposed_choice
from gemmtune.backends.triton.sums import SumChoice
from gemmtune.backends.triton.swap import SwappedChoice, transposed
from gemmtune.backends.triton.vec import VectorChoice
from gemmtune.choice import Kernel, Offers
from gemmtune.device import preset
from gemmtune.numerics.buffers import POISONS, poison
from gemmtune.numerics.guards import guarded_out
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem
from gemmtune.problem.dtypes import dtype_info
from gemmtune.problem.epilogue import evaluate
from gemmtune.problem.rows import row_classes
from gemmtune.selector.samples import Sample
from gemmtune.selector.some_rows import RowBits
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.toolchain.compiled import CompiledChoice

CPU = preset("portable")


def expected(problem: Problem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result in float64, allowed error) by the componentwise bound of any summation order."""
    info, acc = dtype_info(problem.out.dtype), dtype_info(problem.accumulator)
    a, b = operands.a.double(), operands.b.double()
    value, magnitude = operands.alpha * (a @ b), abs(operands.alpha) * (a.abs() @ b.abs())
    if operands.inp is not None and problem.beta != "zero":
        value = value + operands.beta * operands.inp.double()
        magnitude = magnitude + abs(operands.beta) * operands.inp.double().abs()
    allowed = (problem.k + 8) * acc.unit_roundoff * magnitude
    if problem.epilogue is not None:
        value = evaluate(problem.epilogue, value.to(problem.accumulator), operands.extra).double()
        # No tested function has a slope above 16.
        allowed = 16 * allowed + 64 * acc.unit_roundoff * (1 + value.abs())
    return value, (1 + info.unit_roundoff) * allowed + info.unit_roundoff * value.abs() + info.smallest_subnormal


def error_over_bound(problem: Problem, kernel: Kernel, *, seed: int = 0, nan_inp: bool = False) -> float:
    """Return the largest error of one run as a fraction of the allowed error.

    NaN means that an element is NaN or was never written.
    """
    operands = random_operands(problem, torch.device("cpu"), seed=seed)
    value, allowed = expected(problem, operands)
    if nan_inp and operands.inp is not None:
        operands.inp.fill_(torch.nan)
    operands.out.fill_(torch.nan)
    kernel.run(operands.out, operands.tensors, operands.scalars)
    return float(((operands.out.double() - value).abs() / allowed).max()) if operands.out.numel() else 0.0


Family = Callable[[Problem, Config], CompiledChoice]


def direct(problem: Problem, config: Config) -> CompiledChoice:
    """Return the mm template's choice."""
    return TritonChoice.of(problem, CPU, config)


def swapped(problem: Problem, config: Config) -> CompiledChoice:
    """Return the mm template's choice with swapped operands; ``config`` is for the transposed problem."""
    return SwappedChoice.around(problem, TritonChoice.of(transposed(problem), CPU, config), {})


def summed(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice for a sum of two products."""
    return SumChoice.of(problem, CPU, config)


def vector(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice without tensor cores."""
    return VectorChoice.of(problem, CPU, config)


def persistent(problem: Problem, config: Config) -> CompiledChoice:
    """Return the persistent choice with three programs, which compute different numbers of tiles."""
    choice = PersistentChoice.of(problem, CPU, config)
    return replace(choice, where=replace(choice.where, programs=min(choice.where.grid[0], 3)))


def decomposed(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice with K cut into five slices that the mm template multiplies."""
    return decomposed_choice(problem, CPU, 5, config, pdl=False)


def decomposed_by_torch(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice with K cut into five slices that torch multiplies."""
    return decomposed_choice(problem, CPU, 5, None, pdl=False)


def blocked(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice for block-sparse weights."""
    return BlocksChoice.of(problem, CPU, config)


def grouped(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice for grouped products. For groups of rows three programs compute different numbers of tiles."""
    if problem.divides_terms:
        return TermsChoice.of(problem, CPU, config)
    words = isinstance(config, WordsConfig)
    family = WordRowsChoice if words else RowsChoice if problem.weights is None else CombinedChoice
    choice = family.of(problem, CPU, config)
    return replace(choice, where=replace(choice.where, programs=min(choice.where.grid[0], 3)))


def guarded(problem: Problem, config: Config, ends: list[int]) -> bool:
    """Return True if a grouped product with these offsets leaves the memory around its result unchanged."""
    operands = random_operands(problem, torch.device("cpu"), seed=0)
    out, guards = guarded_out(problem.out, torch.device("cpu"), POISONS[problem.out.dtype][0])
    poison(out, POISONS[problem.out.dtype][0])
    assert operands.offs is not None
    operands.offs.copy_(torch.tensor(ends))
    grouped(problem, config).build().run(out, operands.tensors, ())
    return not bool(guards.broken(POISONS[problem.out.dtype][0])[0])


def by_parts(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice of the mm template on parts of float32."""
    return PartsChoice.of(problem, CPU, config)


def result_by_parts(problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return its result for two operands."""
    out = torch.empty(problem.out.size)
    by_parts(problem, config).build().run(out, (a, b), ())
    return out


def errors(problem: Problem, configs: list[Config], *, nan_inp: bool = False, family: Family = direct) -> list[float]:
    """Return ``error_over_bound`` of each config."""
    return [error_over_bound(problem, family(problem, config).build(), nan_inp=nan_inp) for config in configs]


def verdicts(problem: Problem, configs: list[Config], *, family: Family = direct) -> list[Sample]:
    """Return the verification result of each config."""
    verifier = Verifier(problem, torch.device("cpu"))
    choices = [family(problem, config) for config in configs]
    return [verifier.check(choice, choice.build()) for choice in choices]


def in_parts(problem: Problem, config: Config) -> CompiledChoice:
    """Return the choice whose programs sum three parts of K in turn."""
    return RunsChoice.of(problem, CPU, RunsConfig.of(config, 3))


def persistent_in_parts(problem: Problem, config: Config) -> CompiledChoice:
    """Return the persistent choice whose three programs sum three parts of K in turn."""
    choice = PersistentRunsChoice.of(problem, CPU, RunsConfig.of(config, 3))
    return replace(choice, where=replace(choice.where, programs=min(choice.where.grid[0], 3)))


def difference_in_parts(problem: Problem, config: Config, rows: list[int]) -> str | None:
    """Return the difference between the bits of programs that split K and of programs that sum its parts in turn."""
    (rows_class,) = row_classes(problem)
    problems = [rows_class.at(m) for m in (problem.m, *rows)]
    families = [family for family in (TritonChoice, PersistentChoice) if family.why_not(problem, CPU, config) is None]
    made = [x for p in problems for family in families for x in family.of(p, CPU, config).with_parts(3, CPU)]
    assert len({choice.claims.reduction for choice in made}) == 1
    return RowBits(made[0], torch.device("cpu"), lambda choice: choice.build()).difference(made)


def result(problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor, extra: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the result for the caller's operands."""
    out = torch.full(problem.out.size, torch.nan, dtype=problem.out.dtype)
    TritonChoice.of(problem, CPU, config).build().run(out, (a, b, *extra), ())
    return out


def offers_of(problem: Problem, arch: str) -> Offers:
    """Return the backend's offers for a problem on a device that this machine lacks."""
    return load("triton").enumerate(problem, preset(arch), Settings())
