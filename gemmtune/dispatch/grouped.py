"""The four forms of torch's grouped product, and the operation for each."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidProblemError
from ..problem.gradients import grouped_op

Tensor = torch.Tensor
FORMS = (
    "a [M, K] with b [G, K, N] (groups of rows), a [G, M, K] with b [K, N] (groups of columns), a [M, K] with b [K, N] (groups of "
    "terms), or a [G, M, K] with b [G, K, N], which takes no offs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A grouped product as ``op`` on ``operands``. With ``transposed``, the caller's result is the transpose of its result."""

    op: str
    operands: tuple[Any, ...]
    transposed: bool = False
    options: tuple[str, ...] = ()


def form_of(name: str, a: Any, b: Any, offs: Any, *, rows: Any = None, gated: str = "", scatter: Any = None) -> Form:
    """Return the operation for a grouped product. Groups of columns become groups of rows of the transposes.

    Raises InvalidProblemError for dimensions, offsets, rows, gated or scatter that no form has together.
    """
    for role, x in (("a", a), ("b", b), *((("offs", offs),) if offs is not None else ())):
        _check_tensor(name, role, x)
    dims = (a.dim(), b.dim())
    if not set(dims) <= {2, 3} or (offs is None) != (dims == (3, 3)):
        ends = "no offs" if offs is None else f"offs {list(offs.shape)}"
        raise InvalidProblemError(f"{name}: got a {list(a.shape)}, b {list(b.shape)} and {ends}; expected {FORMS}")
    if offs is not None and offs.dim() == 1 and offs.stride(0) != 1:
        offs = offs.contiguous()
    if rows is not None or gated or scatter is not None:
        return _routed(name, (a, b, offs), rows, gated, scatter)
    if offs is None:
        return Form(op="bmm", operands=(a, b))
    if dims == (3, 2):
        return Form(op="grouped_mm", operands=(b.mT, a.mT, offs), transposed=True)
    return Form(op=grouped_op(b), operands=(a, b, offs))


def _routed(name: str, operands: tuple[Tensor, ...], rows: Any, gated: str, scatter: Any) -> Form:
    """Return the form of a product with rows that an index picks, with gated columns, or with weighted sums of rows."""
    a, b, _ = operands
    if (a.dim(), b.dim()) != (2, 3):
        raise InvalidProblemError(
            f"{name}: got a {list(a.shape)} and b {list(b.shape)}; rows, gated and scatter are for groups of rows, a [M, K] with b "
            "[G, K, N]"
        )
    if scatter is None:
        picked = [] if rows is None else [_dense(name, "rows", rows)]
        return Form(op="routed_grouped_mm", operands=(*operands, *picked), options=(gated,))
    if rows is not None or gated:
        raise InvalidProblemError(f"{name}: got scatter with rows or gated, expected a product for each of them")
    if not isinstance(scatter, (tuple, list)) or len(scatter) != 2:
        raise InvalidProblemError(f"{name}: got scatter {type(scatter).__name__}, expected a pair of tensors (slots, weights)")
    index = tuple(_dense(name, role, x) for role, x in zip(("slots", "weights"), scatter, strict=True))
    return Form(op="combined_grouped_mm", operands=(*operands, *index))


def _dense(name: str, role: str, x: Any) -> Tensor:
    _check_tensor(name, role, x)
    return x.contiguous()  # type: ignore[no-any-return]


def _check_tensor(name: str, role: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise InvalidProblemError(f"{name}: {role} must be a torch.Tensor, got {type(x).__name__}")
