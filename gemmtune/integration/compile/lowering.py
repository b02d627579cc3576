"""How Inductor generates code for a planned product: a call with ``out=``, whose memory Inductor plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V

from .planned import OPERATOR, run_planned

NAME = "gemmtune_planned"


def register() -> None:
    """Teach Inductor the operator. Code out of its cache finds the function under the same name."""
    if OPERATOR not in lowerings:
        setattr(extern_kernels, NAME, run_planned)
        register_lowering(OPERATOR, type_promotion_kind=None)(_lowered)


def _lowered(tensors: Sequence[Any], problem: str, *, dynamic: bool = False, alpha: float = 1.0, beta: float = 1.0) -> Any:
    keywords = {"dynamic": dynamic, "alpha": alpha, "beta": beta}
    if V.graph.cpp_wrapper or V.graph.aot_mode:  # no Python there: the operator, by the dispatcher
        return fallback_handler(OPERATOR, add_to_fallback_set=False)(tensors, problem, **keywords)  # type: ignore[no-untyped-call]
    node = V.graph.current_node
    nodes: Any = node.args[0]
    wanted = [x.meta["val"] for x in nodes]
    # What a plan is bound to are the strides that the graph told; where Inductor chose others it has to keep to them.
    inputs = [
        ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, value.stride()) if value.dim() else x)
        for x, value in zip(tensors, wanted, strict=True)
    ]
    value = node.meta["val"]
    layout = ir.FixedLayout(value.device, value.dtype, [*inputs[0].get_size()[:-1], inputs[1].get_size()[-1]])
    made = ir.ExternKernelOut(
        layout=layout,
        inputs=inputs,
        kwargs={"problem": problem, **keywords},
        python_kernel_name=f"extern_kernels.{NAME}",
        op_overload=OPERATOR,
    )
    return ir.TensorBox.create(made)
