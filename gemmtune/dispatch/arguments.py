"""The arguments of one call of an operation, and what a public function makes of its own."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..choice import Choice
from ..errors import InvalidProblemError
from ..numerics.block_sparse import parts
from ..problem.dtypes import dtype_name
from ..problem.fused import BROUGHT, NAMES, RESULT_DTYPES, Then, factor_dtype
from ..problem.operation import Operation
from .prepack import PackedOperand
from .scalars import number

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]
AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that torch casts under autocast."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that are cast. A quantized weight casts the other operand itself."""


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call of an operation, as the caller gave them.

    ``name`` is the public function's. ``operands`` are by role, in the row's order. ``scalars`` and ``options`` are those of the
    row. ``extra`` has the epilogue's operands, and ``extra_names`` their arguments. ``out_dtype`` is the dtype of the result unless
    the epilogue ends in a cast. None leaves it to the operation.
    """

    name: str
    operation: Operation
    operands: dict[str, Tensor]
    scalars: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    packed: PackedOperand | None = None
    out: Tensor | None = None
    epilogue: EpilogueFunction | None = None
    extra: tuple[Tensor, ...] = ()
    extra_names: tuple[str, ...] = ()
    out_dtype: torch.dtype | None = None

    @property
    def a(self) -> Tensor:
        return self.operands["a"]

    @property
    def b(self) -> Tensor:
        """The right operand, as it was before ``prepack``."""
        return self.operands["b"]

    @property
    def inputs(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is read, by the name of its argument. A block-sparse weight is read by its parts."""
        row = self.operation
        read = [
            (row.argument(role), part)
            for role, x in self.operands.items()
            for part in (parts(x) if row.sparse and role == "b" else (x,))
        ]
        return [*read, *zip(self.extra_names, self.extra, strict=True)]

    def tensors_for(self, choice: Choice) -> tuple[Tensor, ...]:
        """Return the tensors for a kernel of the choice: all operands, a prepacked b in the choice's own format."""
        b = self.packed.for_choice(choice) if self.packed is not None else self.b
        return (*(self.operands | {"b": b}).values(), *self.extra)

    @property
    def wants_grad(self) -> list[str]:
        """Names of the arguments that require a gradient. Empty if gradients are off."""
        if not torch.is_grad_enabled():
            return []
        return [name for name, x in self.inputs if isinstance(x, Tensor) and x.requires_grad]


def transposed_operand(x: Any) -> Any:
    """Return x, which broadcasts to a matrix, such that it broadcasts to the transposed matrix; anything else unchanged."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.dim() > 2:
        return x
    if x.dim() == 1:
        return x.unsqueeze(-1)
    return x.squeeze(-1) if x.shape[1] == 1 and x.shape[0] != 1 else x.t()


def call_of(
    name: str,
    operands: Mapping[str, Any],
    *,
    scalars: Sequence[object] = (),
    options: Sequence[Hashable] = (),
    brought: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """Return the call of the public function ``name``; ``brought`` becomes an epilogue operand. Raises InvalidProblemError."""
    row, own = NAMES[name], BROUGHT.get(name)
    check_epilogue(name, epilogue, epilogue_args)
    given: dict[str, Any] = {x.role: operands.get(x.role) for x in row.operands if x.required or operands.get(x.role) is not None}
    packed = given["b"] if isinstance(given["b"], PackedOperand) else None
    if packed is not None:
        _check_packs(name, row)
        given["b"] = packed.tensor
    _check_result(name, out_dtype)
    of_complex = isinstance(given["a"], Tensor) and given["a"].is_complex()
    names: tuple[str, ...] = ()
    if own is not None and (own.required or brought is not None):
        names = (own.argument,)
        if isinstance(brought, Tensor):
            own.check(name, brought.dtype)
            out_dtype = out_dtype or (factor_dtype(brought.dtype) if own.follows else None)
        epilogue = own.combine if epilogue is None else Then(own.combine, epilogue)
    return Call(
        name=name,
        operation=row,
        operands=given,
        scalars=tuple(number(name, what, x, of_complex=of_complex) for what, x in zip(row.scalars, scalars, strict=True)),
        options=dict(zip(row.options, options, strict=True)),
        packed=packed,
        out=out,
        epilogue=epilogue,
        extra=(*((brought,) if names else ()), *epilogue_args),
        extra_names=(*names, *(f"epilogue_args[{i}]" for i in range(len(epilogue_args)))),
        out_dtype=out_dtype,
    )


def check_epilogue(name: str, epilogue: EpilogueFunction | None, epilogue_args: Sequence[Tensor]) -> None:
    """Raise InvalidProblemError if the operands of an epilogue are no tuple or list, or have no function."""
    if not isinstance(epilogue_args, (tuple, list)):
        got = type(epilogue_args).__name__
        raise InvalidProblemError(f"{name}: epilogue_args: got {got}, expected a tuple or list of tensors, such as (bias,)")
    if epilogue_args and epilogue is None:
        raise InvalidProblemError(f"{name}: got {len(epilogue_args)} epilogue_args without an epilogue, expected both or neither")


def _check_packs(name: str, row: Operation) -> None:
    if not row.prepacks:
        takers = ", ".join(other for other, x in NAMES.items() if x.prepacks and not x.sparse)
        raise InvalidProblemError(f"{name}: b must be a torch.Tensor, got a prepacked operand, which these take: {takers}")


def _check_result(name: str, dtype: object) -> None:
    if dtype is not None and dtype not in RESULT_DTYPES:
        expected = ", ".join(map(dtype_name, RESULT_DTYPES))
        raise InvalidProblemError(f"{name}: out_dtype: got {dtype!r}, expected one of {expected}")


def is_autocast_on(kind: str) -> bool:
    """Return True if autocast is on for a device type. Only meta has none, which torch 2.11 cannot be asked in a graph."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


@contextmanager
def autocast_done(call: Call) -> Iterator[bool]:
    """Cast the operands of a call where autocast is on, and turn it off for a ``with`` block. Yield True if it was on.

    torch casts nothing where out= is given. Without turning it off, a product of float32 within a kernel would be cast once more.
    """
    kind = call.a.device.type
    if not is_autocast_on(kind):
        yield False
        return
    if call.out is None:
        cast_for_autocast(call)
    with torch.autocast(kind, enabled=False):
        yield True


def cast_for_autocast(call: Call) -> None:
    """Cast the operands to the autocast dtype, as torch does. Block-sparse products keep theirs: torch casts no sparse tensor."""
    if call.operation.sparse:
        return
    dtype = torch.get_autocast_dtype(call.a.device.type)
    for operand in call.operation.operands:
        x = call.operands.get(operand.role)
        if x is None or x.dtype not in AUTOCAST_FROM or x.dtype == dtype:
            continue
        if not operand.scales:
            call.operands[operand.role] = x.to(dtype)
            call.packed = None if operand.role == "b" else call.packed
        elif operand.like_a:
            call.operands[operand.role] = x.float()


def product_under_autocast(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product of tensors that casts them where autocast is on, as torch does, and runs without it.

    An operator that torch does not know to be a product would have float32 operands in a graph, and its gradients other dtypes.
    """

    @functools.wraps(product)
    def cast(*given: Any, **words: Any) -> Tensor:
        kind = next(x for x in (*given, *words.values()) if isinstance(x, Tensor)).device.type
        if not is_autocast_on(kind):
            return product(*given, **words)
        dtype = torch.get_autocast_dtype(kind)

        def one(value: Any) -> Any:
            return value.to(dtype) if type(value) in PLAIN and value.dtype in AUTOCAST_FROM else value

        with torch.autocast(kind, enabled=False):
            return product(*map(one, given), **{name: one(value) for name, value in words.items()})

    return cast
