"""mm_plus_mm: one kernel adds both products into one sum, one after the other, with the configs of the mm template."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...device import DeviceInfo
from ...problem import Layout, Problem
from .build import KernelChoice, TritonChoice
from .configs import Config, Resources
from .descriptors import is_transposed
from .legality import Predicate
from .spec import Staging

SECOND_REGISTERS = 8
"""Registers for addresses and strides of c and d."""


class SumPredicate(Predicate):
    """Predicate of a sum: legal for each product, whose loops share registers. The ranking model sees one product of K + K2."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(as_one(problem), device)
        self.split_problem = problem
        self._products = [Predicate(product, device) for product in products_of(problem)]
        self.least_bytes = problem.bytes

    def check(self, config: Config) -> str | None:
        whole = dataclasses.replace(config, split_k=1)
        reasons = (product.check(whole) for product in self._products)
        return next((reason for reason in reasons if reason is not None), None) or self.check_split(config)

    def resources(self, config: Config) -> Resources:
        needs = [product.resources(config) for product in self._products]
        return Resources(smem_bytes=max(x.smem_bytes for x in needs), registers=max(x.registers for x in needs) + SECOND_REGISTERS)

    def staging(self, config: Config) -> tuple[Staging, Staging]:
        return min((product.staging(config) for product in self._products), key=lambda pair: [x.width for x in pair])


@dataclass(frozen=True, kw_only=True)
class SumChoice(KernelChoice):
    """Sum of two products with one config."""

    family = "sum"
    template = "sum.py.jinja"
    predicate = SumPredicate

    @classmethod
    def label(cls, problem: Problem) -> str:
        return problem.op

    @property
    def values(self) -> Mapping[str, Any]:
        spec = self.spec
        return {"products": (("a", "b", spec.even_k), ("c", "d", spec.even_k2))}


def family_of(problem: Problem) -> type[KernelChoice]:
    """Return the mm template, or the sum of two products for mm_plus_mm."""
    return TritonChoice if problem.c is None else SumChoice


def predicate_for(problem: Problem, device: DeviceInfo) -> Predicate:
    return family_of(problem).predicate(problem, device)


def products_of(problem: Problem) -> tuple[Problem, Problem]:
    """Return a @ b and c @ d, each with the epilogue of the sum."""
    assert problem.c is not None
    assert problem.d is not None
    first = dataclasses.replace(problem, op="mm", c=None, d=None)
    return first, dataclasses.replace(first, a=problem.c, b=problem.d)


def as_one(problem: Problem) -> Problem:
    """Return one product with the terms of both, for ranking. Its operands are contiguous and keep the order of a and b."""
    first, _ = products_of(problem)

    def resized(layout: Layout, size: tuple[int, int]) -> Layout:
        return (
            Layout.contiguous(size[::-1], layout.dtype).transposed
            if is_transposed(layout)
            else Layout.contiguous(size, layout.dtype)
        )

    k = problem.terms
    return dataclasses.replace(first, a=resized(problem.a, (problem.m, k)), b=resized(problem.b, (k, problem.n)))
