"""What a block-sparse product is multiplied with and added to: numbers, and factors of its rows and columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch

from ..dispatch.calls import number
from ..dispatch.checks import check_operands
from ..errors import InvalidProblemError

Tensor = torch.Tensor


def integer(name: str, label: str, value: object) -> int:
    """A factor as a number of 32 bits."""
    given = number(name, label, value)
    if not (math.isfinite(given) and given == int(given) and -(2**31) <= given < 2**31):
        raise InvalidProblemError(f"{name}: {label}: got {given}, expected an integer of 32 bits")
    return int(given)


def check_integers(name: str, label: str, x: Tensor) -> None:
    """Raises InvalidProblemError unless a tensor has integers of 32 bits at most."""
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype.itemsize > torch.int32.itemsize:
        raise InvalidProblemError(f"{name}: dtype of {label}: got {x.dtype}, expected torch.int32")


def check_factors(name: str, factors: Mapping[str, tuple[Tensor | None, int]], *, integers: bool = False) -> None:
    """Raises InvalidProblemError unless each factor has so many elements, or one for all, of such a dtype."""
    for label, (given, length) in factors.items():
        if given is None:
            continue
        check_operands(name, [(label, given)])
        if given.dim() > 1 or given.numel() not in (1, length):
            raise InvalidProblemError(f"{name}: {label}: got a tensor of shape {list(given.shape)}, expected [{length}]")
        if integers:
            check_integers(name, label, given)
        elif not given.dtype.is_floating_point:
            raise InvalidProblemError(f"{name}: dtype of {label}: got {given.dtype}, expected a float dtype; cast it first")


@functools.lru_cache(maxsize=256)
def scaling(both: bool, alpha: float, beta: float) -> Callable[..., Tensor]:
    """beta · inp + first · (alpha · acc) · second, as a function of acc, one factor or both, and inp unless beta is zero."""

    def scaled(acc: Tensor, *given: Tensor) -> Tensor:
        result = given[0] * (acc if alpha == 1 else acc * alpha)
        result = result * given[1] if both else result
        if beta == 0:
            return result
        return result + (given[-1] if beta == 1 else given[-1] * beta)

    return scaled
