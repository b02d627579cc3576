"""Problems, and kernels around other kernels, for the tests of Verifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from broken_kernels import CPU, choice_of

from gemmtune.choice import Claims
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.selector.samples import Sample
from gemmtune.selector.verify import Verifier

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
Run = Callable[..., None]


def verdict(problem: Problem, run: Run, claims: Claims | None = None, **fields: Any) -> Sample:
    choice = choice_of(problem, run, claims, **fields)
    return Verifier(problem, CPU).check(choice, choice.build())


def mm(m: int = 33, n: int = 40, k: int = 129, dtype: torch.dtype = F32, layout: str = "nt", **fields: Any) -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cpu", **fields)


def addmm(bias: Any = "n", alpha: float = 1.5, beta: float = 0.5, m: int = 32, dtype: torch.dtype = F32) -> Problem:
    return Problem.addmm(m, 32, 96, dtype=dtype, bias=bias, alpha=alpha, beta=beta, device_type="cpu")


def with_epilogue(problem: Problem, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Problem:
    epilogue = trace(function, problem.accumulator, operands)
    out = dataclasses.replace(problem.out, dtype=epilogue.result_dtype or problem.out.dtype)
    return dataclasses.replace(problem, epilogue=epilogue, out=out)


def padded(problem: Problem, *, a: int = 0, out: int = 0, offset: int = 0) -> Problem:
    """The problem with ``a`` or ``out`` more elements between rows, and that offset for both."""

    def pad(layout: Layout, by: int) -> Layout:
        return dataclasses.replace(layout, stride=(layout.size[1] + by, 1), offset=offset) if by else layout

    return dataclasses.replace(problem, a=pad(problem.a, a), out=pad(problem.out, out))


def changed(run: Run, after: Callable[..., None]) -> Run:
    """``run`` and then ``after(out, a, b)``."""

    def both(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        run(out, a, b, *rest)
        after(out, a, b)

    return both


def before(run: Run, **replacements: Callable[..., Any]) -> Run:
    """``run`` with some of its arguments replaced."""
    names = ("out", "a", "b", "inp", "alpha", "beta", "extra")

    def replaced(*args: Any) -> None:
        values = dict(zip(names, args, strict=True))
        run(**(values | {name: f(values[name]) for name, f in replacements.items()}))

    return replaced
