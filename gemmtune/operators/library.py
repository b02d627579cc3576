"""The operators as torch has them: defined when this module is imported, once in a process."""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ..dispatch.arguments import Call
from ..dispatch.call import finished
from ..dispatch.checks import why_not_ours
from ..dispatch.statement import epilogue_of, noted, problem_of
from ..problem import Problem
from .kernels import autocast, batched, fake, followed, into, kernel, refusing
from .schema import NAMESPACE, OPERATORS, Operator, callers_epilogue

COUNTER = "torch.utils.flop_counter"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
"""A weight stays as it lies in memory: no compiler may copy it into another order."""


def _define(operator: Operator) -> None:
    name = operator.name
    for out in (False, True):
        _LIBRARY.define(operator.schema(out=out), tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel(operator), device)
        _LIBRARY.impl(f"{name}.out", functools.partial(into, operator), device)
        _LIBRARY.impl(name, functools.partial(autocast, operator, device.lower()), f"Autocast{device}")
    _LIBRARY.impl(name, followed(operator), "Autograd", with_keyset=True)
    _LIBRARY.impl(f"{name}.out", functools.partial(refusing, operator), "Autograd")
    torch.library.register_fake(operator.qualified, functools.partial(fake, operator), lib=_LIBRARY)
    torch.library.register_fake(f"{operator.qualified}.out", lambda *_, **__: None, lib=_LIBRARY)
    torch.library.register_vmap(operator.qualified, functools.partial(batched, operator), lib=_LIBRARY)


def formula(operator: Operator, *shapes: Sequence[int] | None, **_: Any) -> int:
    """Two for each multiplication and addition of each product, given the shapes of the operator's arguments."""
    given = dict(zip(operator.tensors, shapes, strict=False))
    pairs = [("a", "b"), *([("c", "d")] if operator.row.second else [])]
    return sum(2 * math.prod(given[left] or ()) * (given[right] or ())[-1] for left, right in pairs)


def register(module: ModuleType) -> None:
    """Tell the counter every operator's formula."""
    for operator in OPERATORS.values():
        module.register_flop_formula(getattr(torch.ops.gemmtune, operator.name))(functools.partial(formula, operator))


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


for _operator in OPERATORS.values():
    _define(_operator)
count_flops()


def by_operator(call: Call) -> torch.Tensor:
    """Do a call by its operator, then the caller's epilogue and the copy into ``out`` by torch's operations."""
    operator = OPERATORS[call.name]
    tensors, words = operator.arguments(call)
    whole = call.out is not None or call.packed is not None or callers_epilogue(call)[0] is not None
    # A call that is traced is noted when its graph runs.
    is_noted = whole and not call.wants_grad and not torch.compiler.is_dynamo_compiling()
    with noted(functools.partial(_problem_of, call)) if is_noted else contextlib.nullcontext():
        return finished(call, operator.overload(*tensors, **words), *callers_epilogue(call))


def _problem_of(call: Call) -> Problem | None:
    """The problem that a call states where nothing watches; None where it is torch's."""
    reason = why_not_ours([x for _, x in call.inputs], floats=call.operation.floats)
    return problem_of(call, epilogue_of(call)) if reason is None else None
