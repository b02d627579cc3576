"""Inductor's lowerings for planned products, as calls with ``out=`` whose memory Inductor plans, and for the sums behind them.

The generated code imports the functions that it calls (``extern``), so that it runs in every process that loads it from a cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

from . import experts, extern, planned, planned_attention, planned_horizontal


def register() -> None:
    """Register the lowerings with Inductor."""
    if planned.OPERATOR not in lowerings:
        register_lowering(planned.OPERATOR, type_promotion_kind=None)(_lowered)
        register_lowering(planned_horizontal.OPERATOR, type_promotion_kind=None)(_lowered_horizontal)
        register_lowering(planned_attention.OPERATOR, type_promotion_kind=None)(_lowered_attention)
        register_lowering(planned.SUM, type_promotion_kind=None)(_lowered_sum)


class PlannedCall(ir.ExternKernelOut):
    """A call of one of our functions. ``needs`` are statements that the generated module executes when it is loaded."""

    needs: tuple[str, ...] = ()

    def codegen(self, wrapper: Any) -> None:
        """Add the statements that the module needs, once, then the call."""
        root = wrapper
        while (parent := getattr(root, "parent_wrapper", None)) is not None:  # a branch, or a part between CUDA graphs
            root = parent
        for statement in self.needs:
            root.add_import_once(statement)
        super().codegen(wrapper)


def _lowered(tensors: Sequence[Any], problem: str, *, dynamic: bool = False, alpha: float = 1.0, beta: float = 1.0) -> Any:
    keywords = {"dynamic": dynamic, "alpha": alpha, "beta": beta}
    if _only_operators():
        return fallback_handler(planned.OPERATOR, add_to_fallback_set=False)(tensors, problem, **keywords)  # type: ignore[no-untyped-call]
    inputs = _inputs(tensors)
    size = planned.out_size(planned.problem_of_text(problem), [x.get_size() for x in inputs])
    ready = () if dynamic else (f"ready({problem!r}, {_index()})",)
    return _call("planned", planned.OPERATOR, inputs, size, {"problem": problem, **keywords}, ready)


def _lowered_horizontal(tensors: Sequence[Any], problem: str, widths: Sequence[int], *, dynamic: bool = False) -> Any:
    operator, keywords = planned_horizontal.OPERATOR, {"dynamic": dynamic}
    if _only_operators():
        return fallback_handler(operator, add_to_fallback_set=False)(tensors, problem, widths, **keywords)  # type: ignore[no-untyped-call]
    inputs = _inputs(tensors)
    size = [inputs[0].get_size()[0], sum(widths)]
    ready = () if dynamic else (f"ready_join({problem!r}, {list(widths)}, {_index()})",)
    return _call("planned_join", operator, inputs, size, {"problem": problem, "widths": list(widths), **keywords}, ready)


def _lowered_attention(tensors: Sequence[Any], **numbers: Any) -> Any:
    if _only_operators():
        return fallback_handler(planned_attention.OPERATOR, add_to_fallback_set=False)(tensors, **numbers)  # type: ignore[no-untyped-call]
    inputs = _inputs(tensors)
    return _call("attend", planned_attention.OPERATOR, inputs, list(inputs[0].get_size()), numbers, ())


def _lowered_sum(rows: Any) -> Any:
    """Lower to Inductor's own sum, unrolled."""
    with inductor_config.patch(unroll_reductions_threshold=experts.MOST_EXPERTS + 1):
        return lowerings[torch.ops.aten.sum.dim_IntList](rows, [1])


def _only_operators() -> bool:
    """Return True if the generated code can only call operators, through the dispatcher."""
    return bool(V.graph.cpp_wrapper or V.graph.aot_mode or V.graph.fx_wrapper)


def _index() -> int:
    """Return the device index of the node that is lowered, -1 for the CPU."""
    device: torch.device = V.graph.current_node.meta["val"].device
    return -1 if device.type == "cpu" else device.index


def _inputs(tensors: Sequence[Any]) -> list[Any]:
    nodes: Any = V.graph.current_node.args[0]
    return [_with_strides(x, node.meta["val"].stride()) for x, node in zip(tensors, nodes, strict=True)]


def _with_strides(x: Any, strides: Sequence[Any]) -> Any:
    """Return an operand in memory with the graph's strides, for which the plan is bound. Inductor might choose others."""
    # Realize the source first. Otherwise Inductor computes a view of it, such as the transpose of a gradient, once more.
    # Do not realize an expanded tensor, such as one weight for all matrices of a batch: its copies would be written to memory.
    if not any(isinstance(stride, int) and stride == 0 for stride in strides):
        x = ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, strides)) if strides else x


def _call(name: str, operator: Any, inputs: list[Any], size: list[Any], keywords: dict[str, Any], ready: tuple[str, ...]) -> Any:
    value = V.graph.current_node.meta["val"]
    called = f"{extern.NAME}_{name}"
    made = PlannedCall(
        layout=ir.FixedLayout(value.device, value.dtype, size),
        inputs=inputs,
        kwargs=keywords,
        python_kernel_name=called,
        op_overload=operator,
    )
    functions = (f"{called} = {extern.NAME}.{name}", *(f"{extern.NAME}.{statement}" for statement in ready))
    made.needs = (*extern.import_lines(), *functions)
    return ir.TensorBox.create(made)
