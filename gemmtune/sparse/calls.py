"""Calls of products with a block-sparse weight, stated as their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.arguments import Call, transposed_operand
from ..dispatch.checks import check_extra, check_operands
from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..numerics.block_sparse import parts
from ..problem import Epilogue, Layout, Problem, precision_of
from ..problem.dtypes import dtype_name
from ..problem.fields import scalar_class
from ..problem.operations import OPERATIONS
from .weights import sparsity_of

Tensor = torch.Tensor


def bound_block_call(
    name: str,
    bsr: Any,
    x: Any,
    inp: Any = None,
    *,
    scalars: Sequence[float] = (),
    out: Any = None,
    epilogue: Callable[..., Tensor] | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """The call with these arguments, its operands transposed; ``b`` of it is the weight [N, K] itself.

    Raises:
        InvalidProblemError: something is no tensor, on another device, or of a shape that does not fit.
    """
    if epilogue is None and len(epilogue_args):
        raise InvalidProblemError(f"{name}: got epilogue_args without an epilogue; give the function that takes them")
    packed = bsr if isinstance(bsr, PackedOperand) else None
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    row = OPERATIONS[name]
    added = {"inp": inp} if row.operand("inp") is not None else {}
    given = {"x": x, "bsr": weight} | added
    names = tuple(f"epilogue_args[{i}]" for i in range(len(epilogue_args)))
    outs = [("out", out)] if out is not None else []
    check_operands(name, [*given.items(), *zip(names, epilogue_args, strict=True), *outs])
    sparsity = sparsity_of(name, weight)
    _check_dtypes(name, weight, x, inp, row.operands[0].dtypes)
    _check_sizes(name, weight, x, [*added.items(), *zip(names, epilogue_args, strict=True)], out)
    return Call(
        name=name,
        operation=row,
        operands={"a": x.t(), "b": weight} | {role: transposed_operand(x) for role, x in added.items()},
        scalars=tuple(scalars),
        options={"sparsity": sparsity},
        packed=packed,
        out=None if out is None else out.t(),
        epilogue=epilogue,
        extra=tuple(map(transposed_operand, epilogue_args)),
        extra_names=names,
    )


def _check_dtypes(name: str, weight: Tensor, x: Tensor, inp: Tensor | None, known: Sequence[torch.dtype]) -> None:
    """Under the caller's names: in a Problem bsr is b, and x is a."""
    values = weight.values()
    if values.dtype != weight.dtype:
        raise InvalidProblemError(
            f"{name}: got bsr of {weight.dtype} with values of {values.dtype}, which torch makes of sparse_bsr weights of a module "
            "by half() or to(dtype); convert the dense module, and make its weights sparse then"
        )
    if weight.dtype not in known:
        expected = ", ".join(map(dtype_name, known))
        raise InvalidProblemError(f"{name}: dtype of bsr: got {weight.dtype}, expected one of {expected}")
    for label, other in (("x", x), ("inp", inp)):
        if other is not None and other.dtype != weight.dtype:
            raise InvalidProblemError(
                f"{name}: bsr and {label} must have the same dtype, got {weight.dtype} and {other.dtype}; cast one of them"
            )


def _check_sizes(name: str, weight: Tensor, x: Tensor, extra: list[tuple[str, Tensor]], out: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[0] != weight.shape[1]:
        raise InvalidProblemError(
            f"{name}: shapes do not fit, got bsr {list(weight.shape)} and x {list(x.shape)}; expected bsr [M, K] and x [K, N]"
        )
    size = (weight.shape[0], x.shape[1])
    check_extra(name, extra, size)
    if out is not None and tuple(out.shape) != size:
        raise InvalidProblemError(f"{name}: out must have shape {list(size)}, got {list(out.shape)}")


def problem_of_blocks(call: Call, epilogue: Epilogue | None) -> Problem:
    """The Problem that a call states. A result of our own is row-major as the caller sees it."""
    a, weight, row = call.a, call.b, call.operation
    size = (a.shape[0], weight.shape[0])
    dtype = (epilogue.result_dtype if epilogue else None) or row.result_dtype(a.dtype, epilogue=epilogue is not None)
    fits = call.out is not None and (tuple(call.out.shape), call.out.dtype, call.out.layout) == (size, dtype, torch.strided)
    out = Layout.of(call.out) if call.out is not None and fits else Layout.contiguous(size[::-1], dtype).transposed
    inp = call.operands.get("inp")
    classes: dict[str, Any] = {name: scalar_class(value) for name, value in zip(row.scalars, call.scalars, strict=True)}
    return Problem(
        op=row.name,
        a=Layout.of(a),
        b=Layout.contiguous(tuple(weight.shape), weight.dtype).transposed,
        out=out,
        inp=None if inp is None else Layout.of(inp),
        epilogue=epilogue,
        device_type=a.device.type,
        precision=precision_of(a.dtype, a.device.type),
        prepacked=call.packed is not None,
        sparsity=call.options["sparsity"],
        **classes,
    )


def read_beside_inp(call: Call) -> list[tuple[str, Tensor]]:
    """What is read by the caller's names, but for what is added."""
    return [("x", call.a), *(("bsr", part) for part in parts(call.b)), *zip(call.extra_names, call.extra, strict=True)]
