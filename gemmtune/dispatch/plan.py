"""Plans: a choice bound to one problem and device, with nothing left to decide."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..choice import Choice, Kernel, RunNew, Scalars, Tensors
from ..numerics.block_sparse import PARTS, parts
from ..problem import Layout, Problem
from ..problem.operations import ROLES
from .ranges import Origin, RangePlan

_guards = getattr(torch._C, "_dynamo", None)
_guards = getattr(_guards, "guards", None)
_empty_cuda = getattr(_guards, "_empty_strided_cuda", None)
_empty_cpu = getattr(_guards, "_empty_strided_cpu", None)
"""Allocator of Inductor's generated code: half the time of torch.empty, on the current device."""


def new_output(layout: Layout, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor of ``layout`` on the device of ``like``, which must be the current device."""
    empty = _empty_cuda if like.is_cuda else _empty_cpu
    if empty is not None:
        out: torch.Tensor = empty(layout.size, layout.stride, layout.dtype)
        return out
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice made ready for operands of exactly the problem's layouts.

    ``origin`` is the source of the choice: the store, a tuning in this call, the only choice, the table of its range of M, a
    table by rule (``selector.defaults``), the pick of the nearest tuned M, or torch as the fallback.
    """

    problem: Problem
    choice: Choice
    kernel: Kernel
    origin: Origin
    lasting: bool = True
    """True if later calls may use the plan. False if torch runs only because a CUDA graph is being captured."""

    shared: RangePlan | None = None
    """Table of the choice. Calls that differ only in M use its other choices."""

    new: RunNew = field(init=False)
    """``new(tensors, scalars)`` runs and returns a new tensor."""

    spans: tuple[int | None, ...] = field(init=False)
    """Bytes from the first to just past the last element of out and of each tensor read; None for parts of a sparse weight."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "new", self.kernel.run_new or _into_new(self.kernel, self.problem.out))
        p = self.problem
        sparse = p.sparsity is not None
        read = [x for role in ROLES if (x := getattr(p, role)) is not None and not (sparse and role == "b")]
        spans = [x.span * x.dtype.itemsize for x in (p.out, *read, *(p.epilogue.operands if p.epilogue else ()))]
        object.__setattr__(self, "spans", (*spans, *[None] * (PARTS * sparse)))

    @property
    def plan(self) -> "Plan":
        """The plan itself. Tables hold plans and objects that have one."""
        return self

    def apart(self, out: torch.Tensor, tensors: Tensors) -> bool:
        """Return True if the memory of ``out`` lies wholly before or after that of each tensor that is read."""
        spans = self.spans
        if spans[-1] is None:
            tensors = (tensors[0], *tensors[2:], *parts(tensors[1]))
        first = out.data_ptr()
        end = first + spans[0]  # type: ignore[operator]
        i = 1
        for x in tensors:
            address, span = x.data_ptr(), spans[i]
            if address < end and first < address + (x.nbytes if span is None else span):
                return False
            i += 1
        return True

    def into(self, out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        """Run into ``out`` and increment its version, by which autograd detects overwritten tensors."""
        self.kernel.run(out, tensors, scalars)
        torch._C._increment_version((out,))
        return out


def _into_new(kernel: Kernel, layout: Layout) -> RunNew:
    run = kernel.run

    def new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        out = new_output(layout, tensors[0])
        run(out, tensors, scalars)
        return out

    return new


class Ready(Protocol):
    """Entry of the table of ready calls: a Plan, or one with a gradient."""

    @property
    def plan(self) -> Plan:
        """The plan that is run."""

    @property
    def new(self) -> RunNew:
        """Function that runs the plan: ``new(tensors, scalars)`` returns a new tensor."""
