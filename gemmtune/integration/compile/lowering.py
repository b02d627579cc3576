"""How Inductor generates code for planned products: a call with ``out=``, whose memory Inductor plans. And for sums behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V

from . import experts, planned, planned_join

NAME, NAME_OF_JOIN = "gemmtune_planned", "gemmtune_planned_join"


def register() -> None:
    """Teach Inductor the operators. Code out of its cache finds the functions under the same names."""
    if planned.OPERATOR not in lowerings:
        setattr(extern_kernels, NAME, planned.run_planned)
        setattr(extern_kernels, NAME_OF_JOIN, planned_join.run_join)
        register_lowering(planned.OPERATOR, type_promotion_kind=None)(_lowered)
        register_lowering(planned_join.OPERATOR, type_promotion_kind=None)(_lowered_join)
        register_lowering(experts.SUM, type_promotion_kind=None)(_lowered_sum)


def _lowered(tensors: Sequence[Any], problem: str, *, dynamic: bool = False, alpha: float = 1.0, beta: float = 1.0) -> Any:
    keywords = {"dynamic": dynamic, "alpha": alpha, "beta": beta}
    if _no_python():
        return fallback_handler(planned.OPERATOR, add_to_fallback_set=False)(tensors, problem, **keywords)  # type: ignore[no-untyped-call]
    inputs = _inputs(tensors)
    size = planned.out_size(planned.problem_of_text(problem), [x.get_size() for x in inputs])
    return _call(NAME, planned.OPERATOR, inputs, size, {"problem": problem, **keywords})


def _lowered_join(tensors: Sequence[Any], problem: str, widths: Sequence[int]) -> Any:
    if _no_python():
        return fallback_handler(planned_join.OPERATOR, add_to_fallback_set=False)(tensors, problem, widths)  # type: ignore[no-untyped-call]
    inputs = _inputs(tensors)
    size = [inputs[0].get_size()[0], sum(widths)]
    return _call(NAME_OF_JOIN, planned_join.OPERATOR, inputs, size, {"problem": problem, "widths": list(widths)})


def _lowered_sum(rows: Any) -> Any:
    """Inductor's own sum, whose terms it writes out."""
    with inductor_config.patch(unroll_reductions_threshold=experts.MOST_EXPERTS + 1):
        return lowerings[torch.ops.aten.sum.dim_IntList](rows, [1])


def _no_python() -> bool:
    """The generated code can only call operators, by the dispatcher."""
    return bool(V.graph.cpp_wrapper or V.graph.aot_mode)


def _inputs(tensors: Sequence[Any]) -> list[Any]:
    nodes: Any = V.graph.current_node.args[0]
    return [_as_told(x, node.meta["val"].stride()) for x, node in zip(tensors, nodes, strict=True)]


def _as_told(x: Any, strides: Sequence[Any]) -> Any:
    """An operand in memory with the strides that the graph told, to which a plan is bound, whatever Inductor would choose."""
    # In memory first: a view of what is to be computed, such as the transpose of a gradient, is otherwise computed once more.
    # What is repeated, as one weight for all matrices of a batch, would be written as often as that.
    if not any(isinstance(stride, int) and stride == 0 for stride in strides):
        x = ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, strides)) if strides else x


def _call(name: str, operator: Any, inputs: list[Any], size: list[Any], keywords: dict[str, Any]) -> Any:
    value = V.graph.current_node.meta["val"]
    made = ir.ExternKernelOut(
        layout=ir.FixedLayout(value.device, value.dtype, size),
        inputs=inputs,
        kwargs=keywords,
        python_kernel_name=f"extern_kernels.{name}",
        op_overload=operator,
    )
    return ir.TensorBox.create(made)
