"""Epilogue operands with an argument of their own: the factor of int_mm_mul and the bias of scaled_mm."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import InvalidProblemError
from . import Epilogue
from .dtypes import dtype_name
from .operation import Operation
from .operations import OPERATIONS
from .trace import trace

RESULT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Result dtypes that a caller of a quantized product may name; also the dtypes of factors."""


def multiply(acc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return acc · scale, the epilogue of int_mm_mul."""
    return acc * scale


def add_bias(acc: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return acc + bias, the epilogue of scaled_mm with a bias."""
    return acc + bias


class Then:
    """The built-in epilogue of an operation with ``count`` operands, followed by the caller's function."""

    def __init__(self, first: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor], *, count: int = 1) -> None:
        self.first = first
        self.function = function
        self.count = count

    def __call__(self, acc: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(acc, *args[: self.count]), *args[self.count :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Argument of a public function that becomes the first epilogue operand, and sets the result dtype if it ``follows``."""

    op: str
    argument: str
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dtypes: tuple[torch.dtype, ...]
    required: bool = False
    follows: bool = False

    def check(self, name: str, dtype: torch.dtype) -> None:
        """Raise InvalidProblemError if the operand's dtype is not supported."""
        if dtype not in self.dtypes:
            expected = ", ".join(map(dtype_name, self.dtypes))
            raise InvalidProblemError(f"{name}: dtype of {self.argument}: got {dtype}, expected one of {expected}; cast it first")


BROUGHT = {
    "int_mm_mul": Brought(op="int_mm", argument="scale", combine=multiply, dtypes=RESULT_DTYPES, required=True, follows=True),
    "scaled_mm": Brought(op="scaled_mm", argument="bias", combine=add_bias, dtypes=(torch.float64, *RESULT_DTYPES)),
}
"""The built-in epilogue operands, by the name of the public function."""
NAMES: dict[str, Operation] = {
    name: row for op, row in OPERATIONS.items() for name in (op, *(other for other, x in BROUGHT.items() if x.op == op != other))
}
"""Every public function of a product, with its operation."""


def factor_shapes(m: int, n: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the factor of int_mm_mul may have, by the unit that one factor covers."""
    return {"tensor": (), "row": (m, 1), "column": (n,)}


def factor_dtype(scale: torch.dtype) -> torch.dtype:
    """Return int_mm_mul's result dtype, promoted from int32 and the factor. Raises InvalidProblemError for other factors."""
    BROUGHT["int_mm_mul"].check("int_mm_mul", scale)
    return torch.promote_types(scale, torch.int32)


def factor_epilogue(shape: tuple[int, ...], dtype: torch.dtype) -> Epilogue:
    """Return the epilogue of int_mm_mul for a contiguous factor."""
    return trace(multiply, torch.float32, [torch.empty(shape, dtype=dtype, device="meta")])


def bias_epilogue(shape: tuple[int, ...], dtype: torch.dtype) -> Epilogue:
    """Return the epilogue of scaled_mm for a contiguous bias."""
    return trace(add_bias, torch.float32, [torch.empty(shape, dtype=dtype, device="meta")])
