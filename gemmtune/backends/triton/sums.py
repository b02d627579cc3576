"""mm_plus_mm: both products in one kernel, one after the other into the same sum, with the configs of the mm template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...device import DeviceInfo
from ...problem import Layout, Problem
from .artifact import Expected, expected_of
from .build import KernelChoice, TritonChoice
from .configs import Config
from .descriptors import turned
from .legality import Predicate
from .resources import Resources
from .spec import Staging


@dataclass(frozen=True, kw_only=True)
class SumChoice(KernelChoice):
    """The sum of two products with one config."""

    family = "sum"
    template = "sum.py.jinja"

    @classmethod
    def label(cls, problem: Problem) -> str:
        """The operation."""
        return problem.op

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """What the predicate of a sum says."""
        return SumPredicate(problem, device).check(config)

    @property
    def values(self) -> Mapping[str, Any]:
        """The operands of each product, and whether it has whole blocks along K."""
        spec = self.spec
        return {"products": (("a", "b", spec.even_k), ("c", "d", spec.even_k2))}

    def expected(self, device: DeviceInfo) -> Expected:
        """What the predicate says."""
        return expected_of(SumPredicate(self.problem, device), self.config)


class SumPredicate(Predicate):
    """What is legal for each product is legal for the sum: their loops follow each other, and share registers and memory.

    To the ranking model the sum is one product of K + K2.
    """

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(as_one(problem), device)
        self.asked = problem
        self._products = [Predicate(product, device) for product in products_of(problem)]
        self.least_bytes = problem.bytes

    def check(self, config: Config) -> str | None:
        """Why ``config`` may not be offered, or None."""
        whole = dataclasses.replace(config, split_k=1)
        reasons = (product.check(whole) for product in self._products)
        return next((reason for reason in reasons if reason is not None), None) or self.check_split(config)

    def resources(self, config: Config) -> Resources:
        """Those of the product that needs more."""
        needs = [product.resources(config) for product in self._products]
        return Resources(smem_bytes=max(x.smem_bytes for x in needs), registers=max(x.registers for x in needs) + SECOND_REGISTERS)

    def staging(self, config: Config) -> tuple[Staging, Staging]:
        """The staging of the product whose operands come by narrower accesses."""
        return min((product.staging(config) for product in self._products), key=lambda pair: [x.width for x in pair])


SECOND_REGISTERS = 8
"""Addresses and strides of c and d."""


def predicate_for(problem: Problem, device: DeviceInfo) -> Predicate:
    """The predicate of ``kernel_for``."""
    return Predicate(problem, device) if problem.c is None else SumPredicate(problem, device)


def kernel_for(problem: Problem, device: DeviceInfo, config: Config) -> KernelChoice:
    """The mm template with ``config``, or the sum of two products for mm_plus_mm."""
    return (TritonChoice if problem.c is None else SumChoice).of(problem, device, config)


def products_of(problem: Problem) -> tuple[Problem, Problem]:
    """a @ b and c @ d, each with the epilogue of the sum."""
    assert problem.c is not None
    assert problem.d is not None
    first = dataclasses.replace(problem, op="mm", c=None, d=None)
    return first, dataclasses.replace(first, a=problem.c, b=problem.d)


def as_one(problem: Problem) -> Problem:
    """A product with as many terms, of operands without gaps in the order of the first ones."""
    first, _ = products_of(problem)

    def resized(layout: Layout, size: tuple[int, int]) -> Layout:
        return Layout.contiguous(size[::-1], layout.dtype).transposed if turned(layout) else Layout.contiguous(size, layout.dtype)

    k = problem.terms
    return dataclasses.replace(first, a=resized(problem.a, (problem.m, k)), b=resized(problem.b, (k, problem.n)))
