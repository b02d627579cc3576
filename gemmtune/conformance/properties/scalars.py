"""alpha, beta and the added operand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope
from .coverage import ADDED, Sample, Size, fitted
from .property import Property
from .special import added_needs
from .values import expect_integers

__all__ = ["PROPERTIES"]

VALUES: dict[str, tuple[float, float]] = {"plain": (2.0, -3.0), "half": (-0.5, 3.0), "odd": (0.3, -1.7), "large": (100.0, 0.01)}
"""alpha and beta of class general, by variant. The first two are exact; the others are for random data, within the bound."""
EXACT = ("plain", "half")
_SIZES: tuple[Size, ...] = ((17, 33, 65), (64, 64, 64), (33, 40, 129), (48, 48, 31), (1, 48, 257), (65, 1, 48), (130, 129, 16))
_STRIDES: dict[str, tuple[str, ...]] = {
    "n": ("row", "every2", "row@3"),
    "mn": ("row", "col", "row+8", "every2", "row@1", "rows0", "cols0"),
    "m1": ("row", "row+3", "row@1"),
    "1n": ("row", "every2", "row@3"),
    "scalar": ("row", "row@1"),
}
"""Layouts of the added operand that are tried for each of its shapes."""


def check_alpha_beta(bench: Bench) -> None:
    """The case's classes of alpha and beta, and for the general one the values of its variant."""
    variant = bench.case.variant or "plain"
    alpha, beta = VALUES[variant]
    operands = bench.probes.integers() if variant in EXACT else bench.probes.random()
    if bench.case.alpha == "general":
        operands = dataclasses.replace(operands, alpha=alpha)
    if bench.case.beta == "general":
        operands = dataclasses.replace(operands, beta=beta)
    if variant in EXACT:
        expect_integers(bench, operands)
    else:
        bench.expect(bench.call(operands), operands, name=f"alpha {operands.alpha}, beta {operands.beta}")


def check_bias(bench: Bench) -> None:
    """Integers, of which the added ones are seldom alike."""
    expect_integers(bench, bench.probes.integers())


def _scalar_cases(scope: Scope) -> Iterator[Case]:
    classes = list(
        itertools.product(
            ("general", "zero", "one") if scope.traits.alpha else ("one",),
            ("general", "zero", "one") if scope.traits.beta else ("one",),
        )
    )
    variants = [
        f"{alpha}.{beta}.{name}" for name in VALUES for alpha, beta in classes if name == "plain" or "general" in (alpha, beta)
    ]
    return Sample(
        name="alpha-beta",
        budget=(64, 256, 1500),
        shapes=fitted(*_SIZES),
        variants=tuple(variants),
        ops=ADDED,
        finish=_with_scalars,
    )(scope)


def _with_scalars(case: Case) -> Case:
    alpha, beta, name = case.variant.split(".")
    return case.changed(alpha=alpha, beta=beta, variant="" if name == "plain" else name)


def _bias_cases(scope: Scope) -> Iterator[Case]:
    variants = tuple(f"{shape}.{i}" for shape in scope.traits.bias for i in range(len(_STRIDES[shape])))
    return Sample(
        name="bias",
        budget=(64, 256, 1500),
        shapes=fitted(*_SIZES),
        variants=variants,
        ops=ADDED,
        finish=_with_bias,
    )(scope)


def _with_bias(case: Case) -> Case:
    shape, number = case.variant.split(".")
    return case.changed(bias=shape, inp=_STRIDES[shape][int(number)], variant="")


def _scalar_needs(scope: Scope) -> str | None:
    declared = scope.traits.alpha or scope.traits.beta
    return added_needs(scope) or (None if declared else "neither alpha= nor beta= is declared")


PROPERTIES = (
    Property(
        name="alpha-beta",
        meaning="alpha and beta of 0, 1 and other values count, each where it belongs",
        check=check_alpha_beta,
        cases=_scalar_cases,
        needs=_scalar_needs,
    ),
    Property(
        name="bias",
        meaning="the added operand in each declared shape and several strides",
        check=check_bias,
        cases=_bias_cases,
        needs=added_needs,
    ),
)
