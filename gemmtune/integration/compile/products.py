"""The GEMMs of a compiled graph as Problems, with and without the epilogue that follows them."""

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...dispatch.scalars import check_scalars
from ...errors import InvalidProblemError
from ...operators.library import by_operator  # noqa: F401 - defines the operators of torch
from ...operators.schema import OPERATORS
from ...operators.torch_products import TORCH_PRODUCTS, TorchProduct, with_dimensions
from ...problem import Epilogue, Layout, Problem, precision_of
from ...problem.dtypes import DTYPES
from ...problem.fields import scalar_class
from ...problem.gradients import grouped_op
from ...problem.layout import ALIGNED_BYTES
from ...problem.operations import DENSE_OPS, OPERATIONS
from .epilogues import CONVERT, VIEWS, EpilogueMatch, EpilogueOperand, match_epilogue
from .swiglu import gated_problem, match_swiglu

_REWRITTEN = (*DENSE_OPS, "grouped_mm", "scaled_grouped_mm")
TORCHS = {
    row.overload: row
    for row in TORCH_PRODUCTS
    if row.op in _REWRITTEN and not (row.in_place or row.composite) and row.overload is not None
}
"""torch's operators that the pass rewrites. In-place and composite ones are decomposed before."""
OURS = {operator.overload: operator for operator in OPERATORS.values()}
PRODUCTS = frozenset((*TORCHS, *OURS))
"""The targets of nodes that are GEMMs: torch's operators and gemmtune's."""
_REDUCTIONS = frozenset({
    "mean", "sum", "amax", "amin", "max", "min", "var_mean", "var", "prod", "_softmax", "native_layer_norm", "argmax", "logsumexp",
})  # fmt: skip
_STEPS = 32
"""Maximum pointwise nodes that the search for a reduction behind an epilogue visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A GEMM of the graph.

    ``alone`` is its Problem, and ``fused`` its Problem with the epilogue ``match``, or None without one. In a graph with dynamic
    sizes both have the sizes of the example, and ``dynamic`` is set. ``tensors`` are the nodes of ``alone.operands``.
    ``before_reduction`` means that a reduction follows the epilogue. Inductor would fuse the epilogue into it at no cost.
    """

    gemm: fx.Node
    alone: Problem
    fused: Problem | None
    match: EpilogueMatch | None
    tensors: tuple[fx.Node, ...]
    scalars: tuple[float, float]
    dynamic: bool
    before_reduction: bool
    masked: fx.Node | None = None
    """The mask between a product and its SwiGLU, which the rewritten graph applies behind it instead."""

    @property
    def torchs(self) -> bool:
        """True for one of torch's operators, False for one of gemmtune's."""
        return self.gemm.target in TORCHS

    @property
    def shape(self) -> str:
        """B×M×N×K as text, with dynamic sizes by their names."""
        value, a = self.gemm.meta["val"], self.tensors[0].meta["val"]
        return "x".join(str(size) for size in (*value.shape, a.shape[-1]))


def product_of(node: fx.Node, order: Mapping[fx.Node, int]) -> Product | str:
    """Return the GEMM of a node whose target is in PRODUCTS, or the reason why the node stays."""
    # Translate the node into an operation with operands by role.
    stated = _stated(node)
    if isinstance(stated, str):
        return stated
    op, nodes, numbers = stated
    try:
        # State the Problem, then the Problem with the epilogue or the SwiGLU behind it.
        alone = _problem(node, op, nodes, numbers)
        match = match_epilogue(node, order)
        fused = None if match is None else _with_epilogue(alone, match)
        swiglu = match_swiglu(node) if op == "grouped_mm" else None
        if swiglu is not None:
            match, fused = EpilogueMatch(last=swiglu.last, nodes=(), operands=(), sizes=None), gated_problem(alone)
    except InvalidProblemError as error:
        return str(error)
    return Product(
        gemm=node,
        alone=alone,
        fused=fused,
        match=match,
        tensors=tuple(nodes[role] for role, _ in alone.operands),
        scalars=(float(numbers.get("alpha", 1)), float(numbers.get("beta", 1))),
        dynamic=any(isinstance(size, torch.SymInt) for size in (*node.meta["val"].shape, *nodes["a"].meta["val"].shape)),
        before_reduction=match is not None and swiglu is None and _reduction_follows(match.last),
        masked=None if swiglu is None else swiglu.masked,
    )


def _problem(node: fx.Node, op: str, nodes: Mapping[str, fx.Node], numbers: Mapping[str, Any]) -> Problem:
    """Return the Problem of a node without its epilogue. Raises InvalidProblemError with the reason if none could run."""
    a, row = nodes["a"].meta["val"], OPERATIONS[op]
    if (kind := a.device.type) not in ("cpu", "cuda"):
        raise InvalidProblemError("its operands are on another device")
    if not all(isinstance(numbers.get(name, 1), (int, float)) for name in ("alpha", "beta")):
        raise InvalidProblemError("alpha or beta is only known when it runs")
    fields: dict[str, Any] = {role: _layout(with_dimensions(op, role, x.meta["val"])) for role, x in nodes.items()}
    out = _layout(node.meta["val"])
    if out is None or None in fields.values():
        raise InvalidProblemError("its sizes are only known when it runs")
    if 0 in (*out.size, a.shape[-1]):
        raise InvalidProblemError("nothing to multiply")
    if a.shape[-1] == 1:
        raise InvalidProblemError("K is 1: there is nothing to add up")
    check_scalars(op, [(name, numbers.get(name, 1)) for name in row.scalars], a.dtype)
    fields |= {name: scalar_class(numbers.get(name, 1)) for name in row.scalars}
    fields |= {name: numbers[name] for name in row.options if name in numbers}
    plain = Layout.contiguous(out.size, out.dtype)
    return Problem(op=op, out=plain, device_type=kind, precision=precision_of(a.dtype, kind), **fields)


def _stated(node: fx.Node) -> tuple[str, dict[str, fx.Node], dict[str, Any]] | str:
    """Return a node's operation, its operands by role, and its scalars and options, or the reason why the node stays."""
    if (row := TORCHS.get(node.target)) is not None:
        return _stated_by_torch(row, node)
    words = dict(node.kwargs)
    operator = OURS[node.target]  # type: ignore[index]
    given = dict(zip(operator.tensors, node.args, strict=False)) | words
    nodes = {name: x for name in operator.tensors if isinstance(x := given.get(name), fx.Node)}
    if operator.brought is not None and operator.brought.argument in nodes:
        return f"the {operator.brought.argument} is part of the operator, which runs its own plan"
    return operator.row.name, nodes, operator.numbers({name: x for name, x in words.items() if name not in nodes})


def _stated_by_torch(row: TorchProduct, node: fx.Node) -> tuple[str, dict[str, fx.Node], dict[str, Any]] | str:
    """Return ``_stated`` for a node of torch. Grouped products need groups of rows or terms, and a result without padding."""
    found = row.stated(node.args, node.kwargs, lambda x: x.meta["val"])
    if isinstance(found, str):
        return found
    a, b = (found.operands[role].meta["val"] for role in ("a", "b"))
    operation = OPERATIONS[found.op]
    if not operation.quantized and a.dtype not in DTYPES:
        return f"torch alone has products of {a.dtype}"
    if operation.grouped and (a.dim() != 2 or "offs" not in found.operands):
        return "torch alone has its other forms"
    if operation.grouped and not node.meta["val"].is_contiguous():
        return "torch pads the rows of its result"
    if not operation.names_result and found.out_dtype not in (None, a.dtype):
        return f"torch alone has results of {found.out_dtype}"
    return grouped_op(b) if found.op == "grouped_mm" else found.op, found.operands, found.numbers


def _with_epilogue(alone: Problem, match: EpilogueMatch) -> Problem:
    layouts = [_operand_layout(x, alone) for x in match.operands]
    epilogue = Epilogue(nodes=match.nodes, operands=tuple(layouts))
    out = Layout.contiguous(alone.out.size, epilogue.result_dtype or alone.out.dtype)
    return dataclasses.replace(alone, out=out, epilogue=epilogue)


def _operand_layout(operand: EpilogueOperand, problem: Problem) -> Layout:
    """Return the layout in which the rewritten graph passes an operand of the epilogue."""
    layout = _layout(operand.node.meta["val"])
    if layout is None:
        raise InvalidProblemError("the sizes of an operand of its epilogue are only known when it runs")
    if operand.sizes is None:
        return layout
    size = problem.out.size if operand.rank > 1 else (problem.n,)
    return dataclasses.replace(Layout.contiguous(size, layout.dtype), offset=layout.offset)


def _layout(value: torch.Tensor) -> Layout | None:
    """Return the layout at compile time, with the example size of each symbol, or None if a size has no example."""
    numbers = [*map(_number, value.shape), *map(_number, value.stride()), _number(value.storage_offset())]
    if None in numbers:
        return None
    rank = value.dim()
    return Layout(
        size=tuple(numbers[:rank]),  # type: ignore[arg-type]
        stride=tuple(numbers[rank:-1]),  # type: ignore[arg-type]
        dtype=value.dtype,
        offset=numbers[-1] % max(1, ALIGNED_BYTES // value.element_size()),  # type: ignore[operator]
    )


def _number(size: int | torch.SymInt) -> int | None:
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def _reduction_follows(node: fx.Node) -> bool:
    """Return True if a reduction reads the node's value, directly or through pointwise nodes that Inductor fuses into it."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _STEPS:  # nearest nodes first: a residual continues through all further layers
        for user in waiting.popleft().users:
            name = user.target._schema.name.rpartition("::")[2] if isinstance(user.target, torch._ops.OpOverload) else ""
            if name in _REDUCTIONS:
                return True
            passes = user.target in (*VIEWS, CONVERT) or torch.Tag.pointwise in getattr(user.target, "tags", ())
            if passes and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
