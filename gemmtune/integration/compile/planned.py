"""The product that replaces a GEMM in a compiled graph: a function that writes into ``out``, and an operator of torch.

Code that Inductor generates calls ``run_planned`` directly, with memory that Inductor planned. AOTInductor can only call operators,
and calls ``torch.ops.gemmtune.planned``. A call never tunes: it runs the store's pick or torch.
This module does not import Inductor, because a graph may run without it.
"""

import functools
import json
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import settings as settings_module
from ...bounded import Bounded
from ...choice import Run
from ...device import detect
from ...dispatch.plan import Plan
from ...dispatch.ranges import range_plan_for
from ...dispatch.ready import generation, plan_for
from ...dispatch.strategies import fallback
from ...operators.schema import NAMESPACE
from ...problem import Layout, Problem
from ...problem.layout import ALIGNED_BYTES
from ...settings import given
from ...threads import in_a_thread
from ..measured import in_models
from ..swap import swaps

Tensor = torch.Tensor

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
"""Library of the operators that only graphs of our pass name."""
LIBRARY.define("sum_of_experts(Tensor rows) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("sum_of_experts", lambda rows: rows.sum(1), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
SUM = torch.ops.gemmtune.sum_of_experts.default
"""Operator that sums [tokens, experts of a token, columns] to [tokens, columns]."""
LIBRARY.define("planned(Tensor[] tensors, str problem, *, bool dynamic=False, float alpha=1.0, float beta=1.0) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.planned.default
"""Operator of a planned product. ``tensors`` are ``Problem.operands``, then the epilogue's operands.

``problem`` is ``Problem.key``. With ``dynamic`` its sizes are an example, and each call looks up the plan for its own sizes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A bound kernel, and the remainder of each operand's address by 16 bytes for which it is bound."""

    run: Run
    remainders: tuple[int, ...]
    scaled: bool


_launches: dict[tuple[str, int, bool], Launch] = {}
"""Launches for the exact layouts of a problem, by its text, the device's index and the setting ``batch_invariant``."""
_by_layout = Bounded[Hashable, tuple[Run, bool]]()
"""Kernels for other layouts, by the problem's text and the layouts of the call."""


@functools.lru_cache(4096)
def problem_of_text(text: str) -> Problem:
    """Return the Problem whose ``key`` is ``text``."""
    return Problem.from_json(json.loads(text))


def ready_plan(problem: Problem, index: int) -> Plan:
    """Make the plan of a problem: load its kernels and bind its launch before the first call, and so before any capture."""
    return _ready(problem, index)[0]


def ready_launch(text: str, index: int) -> Launch:
    """Return the launch of the problem with this text. Make it if there is none: code from a cache comes without a plan."""
    found = _launches.get((text, index, given().batch_invariant))
    return found or _ready(problem_of_text(text), index)[1]


def _ready(problem: Problem, index: int) -> tuple[Plan, Launch]:
    plan = _plan(problem, index)
    if index >= 0 and not torch.cuda.is_current_stream_capturing():
        in_a_thread(functools.partial(_take_memory, plan, index, _graph_stream(index)))
    tensors = [layout for _, layout in problem.operands] + [*(problem.epilogue.operands if problem.epilogue else ()), problem.out]
    remainders = tuple(layout.offset * layout.dtype.itemsize % ALIGNED_BYTES for layout in tensors)
    launch = Launch(run=plan.kernel.run, remainders=remainders, scaled=bool(problem.operation.scalars))
    _launches[problem.key, index, given().batch_invariant] = launch
    return plan, launch


def _graph_stream(index: int) -> torch.cuda.Stream:
    """Return the stream on which Inductor will capture the graph, or the current stream if it makes no CUDA graphs."""
    inductor_config = sys.modules.get("torch._inductor.config")
    if inductor_config is None or not inductor_config.triton.cudagraphs:
        return torch.cuda.current_stream(index)
    from torch._inductor.cudagraph_trees import get_manager  # noqa: PLC0415 - only where there is CUDA

    manager = get_manager(index)
    assert manager is not None
    stream: torch.cuda.Stream = manager.stream
    return stream


def _take_memory(plan: Plan, index: int, stream: torch.cuda.Stream) -> None:
    """Run the plan once on a stream, so that it allocates the memory it keeps for that stream outside any graph's pool.

    The caller runs this in a new thread. While Inductor warms up a graph, its thread allocates from the graph's pool.
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
    """Write the problem's result into ``out``. Operands of another alignment than the compiler knew run the plan for theirs."""
    if not dynamic:
        index = out.get_device()
        launch = _launches.get((problem, index, given().batch_invariant)) or ready_launch(problem, index)
        for x, remainder in zip((*tensors, out), launch.remainders, strict=True):
            if x.data_ptr() % ALIGNED_BYTES != remainder:
                break
        else:
            launch.run(out, tensors, (alpha, beta) if launch.scaled else ())
            return
    run_as_laid_out(*tensors, out=out, problem=problem, alpha=alpha, beta=beta)


def run_as_laid_out(*tensors: Tensor, out: Tensor, problem: str, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Run the plan for the sizes, strides and addresses of these tensors."""
    if swaps.pending:
        swaps.apply()
    key = (
        problem,
        generation.number,
        given().batch_invariant,
        *((x.shape, x.stride(), x.data_ptr() % ALIGNED_BYTES) for x in (*tensors, out)),
    )
    found = _by_layout.get(key)
    if found is None:
        here = _as_laid_out(problem_of_text(problem), tensors, out)
        if here.empty:
            return
        plan = _plan(here, out.get_device())
        found = (plan.kernel.run, bool(here.operation.scalars))
        if plan.lasting:
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
    settings = in_models(settings_module.current().never_tuning, device)
    shared = range_plan_for(problem, device, settings) if settings.rows == "shared" else None
    beyond = shared is not None and shared.table is not None and not shared.serves(problem.m) and problem.m not in shared.tuned
    with settings_module.use(settings):  # beyond its table nobody compared a kernel with torch
        return fallback(problem, device, settings) if beyond or 0 in problem.summed else plan_for(problem, index)


def forget_launches() -> None:
    """Drop every launch, so that the next call reads the store again."""
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
    """Return the size of the result for tensors of these shapes, which may be symbols."""
    given = {role: shape for (role, _), shape in zip(problem.operands, shapes, strict=False)}
    return list(problem.operation.given(given, gated=problem.gated).out_size(given))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("planned", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::planned", _empty, lib=LIBRARY)
