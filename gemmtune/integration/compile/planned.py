"""The product that takes the place of a GEMM in a compiled graph: a function that writes into ``out``, and an operator of torch.

Code that Inductor generates calls ``run_planned`` with memory that Inductor planned; no dispatcher is between. Where only operators
can be called (AOTInductor) it is ``torch.ops.gemmtune.planned``. A call never tunes: the store's pick runs, or torch.
Nothing here imports Inductor: a graph may run without it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import settings as settings_module
from ...choice import Run
from ...device import detect
from ...dispatch.plan import Plan
from ...dispatch.ready import plan_for
from ...dispatch.strategies import fallback
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ...toolchain.launcher import ORDERED_STREAMS
from ..measured import in_models
from .library import LIBRARY
from .threads import in_a_thread

Tensor = torch.Tensor

LIBRARY.define("planned(Tensor[] tensors, str problem, *, bool dynamic=False, float alpha=1.0, float beta=1.0) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.planned.default
"""``tensors`` are those of ``Problem.operands`` and then the epilogue's, ``problem`` is ``Problem.key``. With ``dynamic`` the sizes
in it are only those of the example that was compiled, and each call looks for the plan of its own."""

_CAPACITY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A bound kernel, and where its operands lie in memory: the remainder of each address by 16 bytes."""

    run: Run
    remainders: tuple[int, ...]
    scaled: bool


_launches: dict[tuple[str, int], Launch] = {}
"""Kernels for exactly the layouts of the problem, by its text and the device's index."""
_by_layout: dict[Hashable, tuple[Run, bool]] = {}
"""Kernels by the problem's text and the layouts that a call has."""


@functools.lru_cache(_CAPACITY)
def problem_of_text(text: str) -> Problem:
    """The Problem whose ``key`` this is."""
    return Problem.from_json(json.loads(text))


def ready_plan(problem: Problem, index: int) -> Plan:
    """Make the plan of a problem now: kernels are loaded and launches bound before the first call, and so before any capture."""
    return _ready(problem, index)[0]


def ready_launch(text: str, index: int) -> Launch:
    """Return the launch of the problem with this text, made now unless there is one: code out of a cache comes without a plan."""
    found = _launches.get((text, index))
    if found is None:
        found = _launches[text, index] = _ready(problem_of_text(text), index)[1]
    return found


def _ready(problem: Problem, index: int) -> tuple[Plan, Launch]:
    plan = _plan(problem, index)
    if index >= 0 and not torch.cuda.is_current_stream_capturing():
        in_a_thread(functools.partial(_take_memory, plan, index, _graph_stream(index)))
    tensors = [layout for _, layout in problem.operands] + [*(problem.epilogue.operands if problem.epilogue else ()), problem.out]
    remainders = tuple(layout.offset * layout.dtype.itemsize % ALIGNED_BYTES for layout in tensors)
    launch = Launch(run=plan.kernel.run, remainders=remainders, scaled=bool(problem.operation.scalars))
    _launches[problem.key, index] = launch
    return plan, launch


def _graph_stream(index: int) -> torch.cuda.Stream:
    """The stream on which the compiled graph will be captured, where Inductor makes CUDA graphs; else the current one."""
    inductor_config = sys.modules.get("torch._inductor.config")
    if inductor_config is None or not inductor_config.triton.cudagraphs:
        return torch.cuda.current_stream(index)
    from torch._inductor.cudagraph_trees import get_manager  # noqa: PLC0415 - only where there is CUDA

    manager = get_manager(index)
    assert manager is not None
    stream: torch.cuda.Stream = manager.stream
    ORDERED_STREAMS.add(stream.cuda_stream)
    return stream


def _take_memory(plan: Plan, index: int, stream: torch.cuda.Stream) -> None:
    """Run the plan once on a stream, so that what it keeps for that is there, and lies in no graph's memory pool.

    In a thread of its own: what one thread allocates while Inductor warms a graph up goes to the graph's pool, and may not stay.
    """
    problem, device = plan.problem, torch.device("cuda", index)
    layouts = [layout for _, layout in problem.operands] + [*(problem.epilogue.operands if problem.epilogue else ())]
    with torch.cuda.device(index), torch.cuda.stream(stream):
        out, *tensors = (_zeros(layout, device) for layout in (problem.out, *layouts))
        plan.kernel.run(out, tuple(tensors), (1.0, 1.0) if problem.operation.scalars else ())
        stream.synchronize()


def _zeros(layout: Layout, device: torch.device) -> Tensor:
    memory = torch.zeros(layout.offset + layout.span, dtype=layout.dtype, device=device)
    return memory.as_strided(layout.size, layout.stride, layout.offset)


def run_planned(*tensors: Tensor, out: Tensor, problem: str, dynamic: bool = False, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Write the problem's result into ``out``.

    Operands that lie at other addresses than the problem says, which a compiler cannot always know, go to the plan for theirs.
    """
    if not dynamic:
        index = out.get_device()
        launch = _launches.get((problem, index)) or ready_launch(problem, index)
        for x, remainder in zip((*tensors, out), launch.remainders, strict=True):
            if x.data_ptr() % ALIGNED_BYTES != remainder:
                break
        else:
            launch.run(out, tensors, (alpha, beta) if launch.scaled else ())
            return
    run_as_laid_out(*tensors, out=out, problem=problem, alpha=alpha, beta=beta)


def run_as_laid_out(*tensors: Tensor, out: Tensor, problem: str, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Run the plan for the sizes, strides and addresses of these tensors."""
    key = (problem, *((x.shape, x.stride(), x.data_ptr() % ALIGNED_BYTES) for x in (*tensors, out)))
    found = _by_layout.get(key)
    if found is None:
        here = _as_laid_out(problem_of_text(problem), tensors, out)
        if here.empty:
            return
        plan = _plan(here, out.get_device())
        found = (plan.kernel.run, bool(here.operation.scalars))
        if plan.lasting:
            if len(_by_layout) >= _CAPACITY:
                _by_layout.clear()
            _by_layout[key] = found
    run, scaled = found
    run(out, tensors, (alpha, beta) if scaled else ())


def _as_laid_out(problem: Problem, tensors: Sequence[Tensor], out: Tensor) -> Problem:
    roles = [role for role, _ in problem.operands]
    fields: dict[str, Any] = {role: Layout.of(x) for role, x in zip(roles, tensors, strict=False)}
    if problem.epilogue is not None:
        extra = tuple(Layout.of(x) for x in tensors[len(roles) :])
        fields["epilogue"] = replace(problem.epilogue, operands=extra)
    return replace(problem, out=Layout.of(out), **fields)


def _plan(problem: Problem, index: int) -> Plan:
    device = detect("cpu" if index < 0 else torch.device("cuda", index))
    settings = in_models(replace(settings_module.current(), tune="never"), device)
    with settings_module.use(settings):
        return fallback(problem, device, settings) if 0 in problem.summed else plan_for(problem, index)


def forget_launches() -> None:
    """Drop every launch, so that the next call asks the store again."""
    _launches.clear()
    _by_layout.clear()


def _new(tensors: Sequence[Tensor], problem: str, *, dynamic: bool = False, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    out = _empty(tensors, problem)
    run_planned(*tensors, out=out, problem=problem, dynamic=dynamic, alpha=alpha, beta=beta)
    return out


def _empty(tensors: Sequence[Tensor], problem: str, **_: object) -> Tensor:
    known = problem_of_text(problem)
    return tensors[0].new_empty(out_size(known, [x.shape for x in tensors]), dtype=known.out.dtype)


def out_size(problem: Problem, shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The size of the result for tensors of these shapes, which may be symbols."""
    given = {role: shape for (role, _), shape in zip(problem.operands, shapes, strict=False)}
    return list(problem.operation.given(given, gated=problem.gated).out_size(given))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("planned", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::planned", _empty, lib=LIBRARY)
