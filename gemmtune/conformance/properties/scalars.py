"""Properties of factors and terms other than a and b: alpha, beta, the added operand, scales and zero points."""

import dataclasses
import itertools

import torch

from ...declaration.labels import SCALES_OF, SINGLE
from ...numerics.bounds import exact_limit
from ...numerics.operands import Operands
from ...problem import Problem
from ..bench.bench import Bench
from ..cases.sampling import ADDED, Sample, Size, Variant
from ..cases.scope import Scope
from .property import Property, made, stage, tested
from .special import added_needs
from .values import check_integers

VALUES: dict[str, tuple[float, float]] = {
    "plain": (2.0, -3.0), "half": (-0.5, 3.0), "minus": (-1.0, -1.0), "odd": (0.3, -1.7), "large": (100.0, 0.01),
}  # fmt: skip
"""Values of alpha and beta in class ``general``, by variant."""
FAR_BITS = 26
"""Binary orders of magnitude by which scales move away from 1. float16 cannot hold such numbers."""
EXACT = ("plain", "half", "minus")
"""Variants that keep sums of integers exact. The others are for random data, within the bound."""
SIZES: tuple[Size, ...] = ((17, 33, 65), (64, 64, 64), (33, 40, 129), (48, 48, 31), (1, 48, 257), (65, 1, 48), (130, 129, 16))
STRIDES: dict[str, tuple[str, ...]] = {
    "n": ("row", "every2", "row@3"),
    "mn": ("row", "col", "row+8", "every2", "row@1", "rows0", "cols0", "row~0", "row~1", "row~i"),
    "m1": ("row", "row+3", "row@1"),
    "1n": ("row", "every2", "row@3"),
    "scalar": ("row", "row@1"),
}
"""Layouts of the added operand to try for each of its shapes."""
SCALED = tuple(op for op in SINGLE if op in SCALES_OF)
"""Operations with scales, without grouped ones."""


def check_alpha_beta(bench: Bench) -> None:
    """Check the case's classes of alpha and beta. In class ``general`` the variant sets the value."""
    variant = bench.case.variant or "plain"
    exact = variant in EXACT
    operands = bench.probes.integers() if exact else bench.probes.random()
    alpha, beta = VALUES[variant]
    if bench.case.alpha == "general":
        operands = dataclasses.replace(operands, alpha=alpha)
    if bench.case.beta == "general":
        operands = dataclasses.replace(operands, beta=beta)
    name = "integers" if exact else f"alpha {operands.alpha}, beta {operands.beta}"
    bench.expect(bench.call(operands), operands, name=name, exact=exact)


def check_bias(bench: Bench) -> None:
    """Check integers with the case's alpha and beta, then with both 1, for which many kernels have their own path."""
    check_integers(bench)
    if not bench.failures and (bench.case.alpha, bench.case.beta) != ("one", "one"):
        with stage(bench, "alpha 1, beta 1"):
            check_integers(bench.sibling(alpha="one", beta="one"))


def check_scales(bench: Bench) -> None:
    """Check scales and zero points with single products, with cancelling sums, and with random data.

    Single products take scales of any numbers and are held to a few roundings. Sums take powers of two, which differ between
    neighbours. Random data also comes with scales far from 1.
    """
    probes = bench.probes
    random = probes.random()
    if probes.free_a and bench.problem.scales:
        with stage(bench, "single products"):
            probe = probes.rows_of_b(random.b, scaled=True)
            bench.expect_one_hot(bench.call(probe.operands), probe, scaled=True)
    if probes.free_a and probes.free_b:
        with stage(bench, "sums"):
            probe = probes.cancel(exact_limit(bench.problem, bench.claims))
            bench.expect_one_hot(bench.call(probe.operands), probe)
    if bench.expect(bench.call(random), random) and (far := far_from_1(bench.problem, random)) is not None:
        with stage(bench, "scales far from 1"):
            bench.expect(bench.call(far), far)


def far_from_1(problem: Problem, operands: Operands) -> Operands | None:
    """Return operands with a smaller scale_b and, if there is one, a larger scale_a. None: a dtype cannot hold such numbers."""
    scale_a, scale_b = operands.scale_a, operands.scale_b
    if problem.scale_b is None or scale_b is None or torch.float16 in (scale_b.dtype, problem.dtype):
        return None
    less = made(problem.scale_b, scale_b * 2**-FAR_BITS)
    more = None if problem.scale_a is None or scale_a is None else made(problem.scale_a, scale_a * 2**FAR_BITS)
    return dataclasses.replace(operands, scale_b=less, scale_a=more)


def _classes(scope: Scope) -> list[Variant]:
    every = [("general", "zero", "one") if there else ("one",) for there in (scope.traits.alpha, scope.traits.beta)]
    return [
        {"alpha": alpha, "beta": beta, "variant": "" if name == "plain" else name}
        for name in VALUES
        for alpha, beta in itertools.product(*every)
        if name == "plain" or "general" in (alpha, beta)
    ]


PROPERTIES = (
    Property(
        "alpha-beta", "alpha and beta of 0, 1 and other values count, each where it belongs", check_alpha_beta,
        Sample(budget=(64, 256, 1500), shapes=SIZES, variants=_classes, ops=(*ADDED, "bsr_addmm")),
        needs=lambda scope: added_needs(scope)
        or (None if scope.traits.alpha or scope.traits.beta else "neither alpha= nor beta= is declared"),
    ),
    Property(
        "bias", "the added operand in each declared shape and several strides", check_bias,
        Sample(
            budget=(64, 256, 1500), shapes=SIZES,
            variants=lambda scope: [{"bias": shape, "inp": text} for shape in scope.traits.bias for text in STRIDES[shape]],
            ops=(*ADDED, "bsr_addmm"),
        ),
        needs=added_needs,
    ),
    Property(
        "scales", "scales and zero points of every declared kind count, each for the elements that it is for", check_scales,
        Sample(
            budget=(96, 400, 2500),
            # K is below, at and above the number of elements that share a scale, and a multiple of it. M and N exceed 128.
            shapes=(
                (33, 40, 300), (64, 64, 256), (5, 48, 96), (130, 136, 130),
                (17, 300, 128), (1, 64, 512), (64, 1, 66), (48, 129, 31),
            ),
            variants=tuple({"inp": text} for text in ("row", "col", "row+3", "every2", "row@1")),
            ops=SCALED,
        ),
        needs=tested(SCALED, f"none of {', '.join(SCALED)} is tested"), drawn=True,
    ),
)  # fmt: skip
