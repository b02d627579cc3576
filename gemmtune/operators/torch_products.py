"""The table of torch's products: functions of torch that compute one of our operations.

A row translates the arguments of a call into a ``Statement``, or says why only torch has such a call.
Each reader decides what follows: ``record()`` counts the Problem, the compile pass rewrites the node, ``use()`` runs a pick.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from ..problem.operations import OPERATIONS, ROLES

Tensor = torch.Tensor
ROW_WISE = 1
"""``torch.nn.functional.ScalingType.RowWise``: one scale for each row of a and each column of b."""
RECIPE = "recipe"
"""Meaning of an argument that must be ``ROW_WISE``."""
TORCH_ONLY = "torch only"
"""Meaning of an argument that our operation lacks."""
SCALARS = ("beta", "alpha")
_OTHER_NAMES = {"input": "self", "mat_a": "self", "mat_b": "mat2"}
"""Keywords of torch's Python functions, with the operators' names of the same arguments."""
_SCALE_VECTORS = {"scaled_grouped_mm": {"scale_a": 1, "scale_b": 2}}
"""Dimensions of torch's scales for operations whose scales have one more, of size 1: torch's [M] is our [M, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A call of torch's function in the terms of our operation. ``operands`` are tensors or nodes of a graph, by role."""

    op: str
    operands: dict[str, Any]
    bias: Any
    out_dtype: torch.dtype | None
    numbers: dict[str, Any]
    """Scalars and options that the call passes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchProduct:
    """One operator of torch that computes ``op``.

    ``arguments`` has the operator's arguments in its order, each with its meaning: an operand's role, a scalar or option of ours,
    ``bias``, ``out_dtype``, ``RECIPE`` or ``TORCH_ONLY``. ``functions`` are the Python functions with these arguments.
    """

    name: str
    op: str
    arguments: Mapping[str, str]
    functions: tuple[Callable[..., Tensor], ...] = ()
    composite: bool = False
    """True if torch decomposes the operator into other rows. Its a may have any leading dimensions, and inp is optional."""
    transposed: bool = False
    """True if torch's argument for b is bᵀ."""
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Dimensions of operands, where torch has further forms that our operation lacks."""

    @property
    def in_place(self) -> bool:
        """True if the operator writes the result into its first argument."""
        return self.name.endswith("_")

    @property
    def overload(self) -> Any:
        """The operator that returns a new tensor. None if this version of torch lacks it."""
        namespace, _, name = self.name.partition("::")
        return getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)

    def stated(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], value_of: Callable[[Any], Tensor] = lambda x: x
    ) -> Statement | str:
        """Return a call in the terms of our operation, or why only torch has it. ``value_of`` returns the tensor of an operand."""
        found: dict[str, Any] = {}
        for (name, meaning), value in zip(_bound(self.name, len(args), tuple(kwargs)), (*args, *kwargs.values()), strict=True):
            several = isinstance(value, (list, tuple))
            if value is None or value is False or (several and not value):
                continue
            if meaning == TORCH_ONLY or (several and len(value) > 1) or (meaning == RECIPE and list(value) != [ROW_WISE]):
                return f"torch alone has {self.name} with {name}"
            found[meaning] = value[0] if several else value
        found.pop(RECIPE, None)
        operands = {role: found.pop(role) for role in _roles(self.name) if role in found}
        if "a" not in operands or "b" not in operands:
            return f"torch alone has {self.name} without one of its operands"
        for role, count in self.dims.items():
            if role not in operands or value_of(operands[role]).dim() != count:
                return f"torch alone has the other forms of {self.name}"
        return Statement(
            op="addmm" if self.composite and "inp" in operands else self.op,
            operands=operands,
            bias=found.pop("bias", None),
            out_dtype=found.pop("out_dtype", None),
            numbers=found,
        )


@functools.cache
def _bound(name: str, positional: int, keywords: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the name and the meaning of each argument of a call: positional ones, then keywords."""
    arguments = BY_NAME[name].arguments
    names = [argument for argument in arguments if argument not in SCALARS][:positional]
    names += [f"argument {place + 1}" for place in range(len(names), positional)]
    names += [keyword if keyword in arguments else _OTHER_NAMES.get(keyword, keyword) for keyword in keywords]
    return tuple((argument, arguments.get(argument, TORCH_ONLY)) for argument in names)


@functools.cache
def positional_order(row: TorchProduct, count: int) -> tuple[int, ...] | None:
    """Return the places of our operands among ``count`` positional arguments, or None if some are no operands or one is missing."""
    meanings = [meaning for _, meaning in _bound(row.name, count, ())]
    order = tuple(meanings.index(role) for role in _roles(row.name) if role in meanings)
    required = {x.role for x in OPERATIONS[row.op].operands if x.required}
    return order if len(order) == count and required <= {*meanings} else None


@functools.cache
def _roles(name: str) -> tuple[str, ...]:
    """Return the roles of a row's operands, in the order of our operation."""
    return tuple(role for role in ROLES if role in BY_NAME[name].arguments.values())


def with_dimensions(op: str, role: str, x: Tensor) -> Tensor:
    """Return torch's operand with the dimensions that our operation gives it: scales of a grouped product are vectors in torch."""
    return x.unsqueeze(1) if x.dim() == _SCALE_VECTORS.get(op, {}).get(role) else x


_GROUPED = {"self": "a", "mat2": "b", "offs": "offs", "bias": TORCH_ONLY, "out_dtype": "out_dtype"}
_SUM, _BATCHED_SUM = ({"self": "inp", f"{b}1": "a", f"{b}2": "b", "beta": "beta", "alpha": "alpha"} for b in ("mat", "batch"))
_PLAIN = {"self": "a", "mat2": "b"}

TORCH_PRODUCTS: tuple[TorchProduct, ...] = (
    TorchProduct(name="aten::mm", op="mm", arguments=_PLAIN, functions=(torch.mm, Tensor.mm)),
    TorchProduct(name="aten::bmm", op="bmm", arguments=_PLAIN, functions=(torch.bmm, Tensor.bmm)),
    TorchProduct(name="aten::addmm", op="addmm", arguments=_SUM, functions=(torch.addmm, Tensor.addmm)),
    TorchProduct(name="aten::baddbmm", op="baddbmm", arguments=_BATCHED_SUM, functions=(torch.baddbmm, Tensor.baddbmm)),
    TorchProduct(name="aten::addmm_", op="addmm", arguments=_SUM),
    TorchProduct(name="aten::baddbmm_", op="baddbmm", arguments=_BATCHED_SUM),
    TorchProduct(
        name="aten::linear", op="mm", arguments={"input": "a", "weight": "b", "bias": "inp"}, functions=(functional.linear,),
        composite=True, transposed=True,
    ),
    TorchProduct(
        name="aten::matmul", op="mm", arguments={"self": "a", "other": "b"},
        functions=(torch.matmul, Tensor.matmul, Tensor.__matmul__), composite=True,
    ),
    TorchProduct(name="aten::_int_mm", op="int_mm", arguments=_PLAIN),
    TorchProduct(
        name="aten::_scaled_mm", op="scaled_mm",
        arguments={
            "self": "a", "mat2": "b", "scale_a": "scale_a", "scale_b": "scale_b", "bias": "bias", "scale_result": TORCH_ONLY,
            "out_dtype": "out_dtype", "use_fast_accum": "fast_accum",
        },
    ),
    TorchProduct(
        name="aten::_grouped_mm", op="grouped_mm", arguments=_GROUPED,
        functions=(torch._grouped_mm, getattr(functional, "grouped_mm", torch._grouped_mm)),
    ),
    TorchProduct(
        name="aten::_scaled_grouped_mm", op="scaled_grouped_mm", dims={"a": 2, "b": 3, "offs": 1},
        arguments={
            "self": "a", "mat2": "b", "scale_a": "scale_a", "scale_b": "scale_b", "offs": "offs", "bias": TORCH_ONLY,
            "scale_result": TORCH_ONLY, "out_dtype": "out_dtype", "use_fast_accum": "fast_accum",
        },
    ),
    TorchProduct(
        name="aten::_scaled_grouped_mm_v2", op="scaled_grouped_mm", dims={"a": 2, "b": 3, "offs": 1},
        arguments={
            "self": "a", "mat2": "b", "scale_a": "scale_a", "recipe_a": RECIPE, "swizzle_a": TORCH_ONLY, "scale_b": "scale_b",
            "recipe_b": RECIPE, "swizzle_b": TORCH_ONLY, "offs": "offs", "bias": TORCH_ONLY, "out_dtype": "out_dtype",
            "contraction_dim": TORCH_ONLY, "use_fast_accum": "fast_accum",
        },
    ),
)  # fmt: skip
"""``grouped_mm`` stands for ``grouped_k_mm`` too, which is the product of a 2-D b."""
BY_NAME = {row.name: row for row in TORCH_PRODUCTS}
BY_FUNCTION = {function: row for row in TORCH_PRODUCTS for function in row.functions}


def torch_product(target: Any) -> TorchProduct | None:
    """Return the row of an operator, of any of its overloads; None for anything else."""
    return BY_NAME.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None
