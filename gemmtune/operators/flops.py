"""What ``torch.utils.flop_counter`` counts for each operator."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from .schema import OPERATORS, Operator

COUNTER = "torch.utils.flop_counter"


def formula(operator: Operator) -> Callable[..., int]:
    """Two for each multiplication and addition of each product, given the shapes of the operator's arguments."""
    names = operator.tensors
    pairs = [("a", "b"), *([("c", "d")] if operator.row.second else [])]

    def count(*shapes: Sequence[int] | None, **_: Any) -> int:
        given = dict(zip(names, shapes, strict=False))
        return sum(2 * math.prod(given[left] or ()) * (given[right] or ())[-1] for left, right in pairs)

    return count


def register(module: ModuleType) -> None:
    """Tell the counter every operator's formula."""
    for operator in OPERATORS.values():
        module.register_flop_formula(getattr(torch.ops.gemmtune, operator.name))(formula(operator))


def count_flops() -> None:
    """Register the formulas with the counter, now or when it is imported: it imports triton, which takes a quarter of a second."""
    module = sys.modules.get(COUNTER)
    if module is not None:
        register(module)
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the counter as others do, and registers the formulas when it has been executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
