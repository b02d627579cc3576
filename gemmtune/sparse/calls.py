"""Calls of products with a block-sparse weight, stated as their transposes.

bsr [M, K] @ x [K, N] is stated as a @ b with a = xᵀ and b = bsrᵀ, as in ``nn.Linear``: the weight is the operand that ``prepack``
takes, and its blocks cover rows and columns of b. The weight is passed as it is, in place of b.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.arguments import Call, call_of, check_epilogue, transposed_operand
from ..dispatch.checks import check_extra, check_operands
from ..dispatch.keys import NOTHING
from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.dtypes import dtype_name
from ..problem.operations import OPERATIONS
from ..problem.sparsity import Sparsity
from .weights import sparsity_of

Tensor = torch.Tensor


def weight_of(name: str, bsr: object) -> Tensor:
    """Return the weight of a call, prepacked or not. Raises InvalidProblemError if ``bsr`` is no tensor."""
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    if not isinstance(weight, Tensor):
        sparsity_of(name, weight)  # which raises
    return weight  # type: ignore[return-value]


def operands_of(
    name: str, bsr: Any, x: Any, inp: Any, out: Any, epilogue: Callable[..., Tensor] | None, epilogue_args: Sequence[Any]
) -> tuple[tuple[Any, ...], Sparsity]:
    """Check a call's arguments under the caller's names. Return the operands of its transpose and the class of the weight.

    Raises InvalidProblemError if an argument is no tensor, or its dtype or shape does not fit the weight.
    """
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    sparsity = sparsity_of(name, weight)
    if epilogue_args is NOTHING and _fit(name, weight, x, inp, out):
        return (x.t(), bsr) if inp is None else (x.t(), bsr, transposed_operand(inp)), sparsity
    check_epilogue(name, epilogue, epilogue_args)
    extra = [(f"epilogue_args[{i}]", arg) for i, arg in enumerate(epilogue_args)]
    added = [] if inp is None else [("inp", inp)]
    check_operands(name, [("x", x), ("bsr", weight.values()), *added, *extra, *([] if out is None else [("out", out)])])
    known = OPERATIONS[name].operands[0].dtypes
    if weight.dtype not in known:
        expected = ", ".join(map(dtype_name, known))
        raise InvalidProblemError(f"{name}: dtype of bsr: got {weight.dtype}, expected one of {expected}")
    for label, other in (("x", x), *added):
        if other.dtype != weight.dtype:
            raise InvalidProblemError(
                f"{name}: bsr and {label} must have the same dtype, got {weight.dtype} and {other.dtype}; cast one of them"
            )
    if x.dim() != 2 or x.shape[0] != weight.shape[1]:
        raise InvalidProblemError(
            f"{name}: shapes do not fit, got bsr {list(weight.shape)} and x {list(x.shape)}; expected bsr [M, K] and x [K, N]"
        )
    size = (weight.shape[0], x.shape[1])
    check_extra(name, [*added, *extra], size)
    if out is not None and tuple(out.shape) != size:
        raise InvalidProblemError(f"{name}: out must have shape {list(size)}, got {list(out.shape)}")
    return (x.t(), bsr, *(transposed_operand(y) for _, y in added)), sparsity


def _fit(name: str, weight: Tensor, x: Any, inp: Any, out: Any) -> bool:
    """Return True if arguments certainly pass the checks on dtypes and shapes, at the price of a few comparisons."""
    if not isinstance(x, Tensor):
        return False
    (m, k), dtype, shape = weight.shape, weight.dtype, x.shape
    if len(shape) != 2 or shape[0] != k or x.dtype is not dtype or dtype not in OPERATIONS[name].operands[0].dtypes:
        return False
    if inp is not None:
        if not isinstance(inp, Tensor) or inp.dtype is not dtype or inp.dim() != 2:
            return False
        rows, columns = inp.shape
        if rows not in (1, m) or columns not in (1, shape[1]):
            return False
    return out is None or (isinstance(out, Tensor) and out.shape == (m, shape[1]))


def block_call(
    name: str,
    bsr: Any,
    x: Any,
    inp: Any = None,
    *,
    scalars: Sequence[float] = (),
    out: Any = None,
    epilogue: Callable[..., Tensor] | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Call:
    """Return the call of ``bsr_mm`` or ``bsr_addmm``, stated as its transpose. Raises InvalidProblemError for illegal arguments."""
    operands, sparsity = operands_of(name, bsr, x, inp, out, epilogue, epilogue_args)
    return call_of(
        name,
        dict(zip(("a", "b", "inp"), operands, strict=False)),
        scalars=scalars,
        options=(sparsity,),
        out=None if out is None else out.t(),
        epilogue=epilogue,
        epilogue_args=tuple(map(transposed_operand, epilogue_args)),
    )
