"""Factors of block-sparse products: alpha and beta, and a factor for each row or column."""

import functools
import math
from collections.abc import Callable, Mapping

import torch

from ..dispatch.checks import check_operands
from ..dispatch.scalars import number
from ..errors import InvalidProblemError

Tensor = torch.Tensor


def integer(name: str, label: str, value: object) -> int:
    """Return a factor as an integer of 32 bits. Raise InvalidProblemError if it is none."""
    given = number(name, label, value)
    if not (math.isfinite(given) and given == int(given) and -(2**31) <= given < 2**31):
        raise InvalidProblemError(f"{name}: {label}: got {given}, expected an integer of 32 bits")
    return int(given)


def check_integers(name: str, label: str, x: Tensor) -> None:
    """Raise InvalidProblemError unless a tensor has integers of 32 bits or fewer."""
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype.itemsize > torch.int32.itemsize:
        raise InvalidProblemError(f"{name}: dtype of {label}: got {x.dtype}, expected torch.int32")


def check_factors(name: str, factors: Mapping[str, tuple[Tensor | None, int]], *, integers: bool = False) -> None:
    """Raise InvalidProblemError unless each factor is a tensor of its length, or of one element, with a legal dtype.

    ``factors`` has the tensor and its length by the name of the argument. The dtype is a float, or with ``integers`` an integer of
    32 bits or fewer.
    """
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
    """Return the epilogue beta · inp + first · (alpha · acc) · second.

    Its operands are the first factor, the second with ``both``, and ``inp`` unless beta is zero.
    """

    def scaled(acc: Tensor, *given: Tensor) -> Tensor:
        result = given[0] * (acc if alpha == 1 else acc * alpha)
        result = result * given[1] if both else result
        if beta == 0:
            return result
        return result + (given[-1] if beta == 1 else given[-1] * beta)

    return scaled
