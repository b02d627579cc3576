"""alpha and beta of a call: which values a look-up may serve at once, and the checks that all others take."""

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import InvalidProblemError
from ..problem.dtypes import accumulator_dtype
from ..problem.fields import ScalarClass

Tensor = torch.Tensor
_NUMBERS = (int, float)
_LEAST, _MOST = -(2.0**62), 2.0**62
"""Limits of the scalars that every dtype takes, which a look-up serves. Those of the native look-up are the same."""


def usual_classes(alpha: Any, beta: Any) -> tuple[ScalarClass, ScalarClass] | None:
    """Return the classes of two numbers that every dtype takes, or None. Every call pays, so ``scalar_class`` is repeated."""
    if alpha.__class__ not in _NUMBERS or beta.__class__ not in _NUMBERS:
        return None
    first: ScalarClass | None = "zero" if alpha == 0 else "one" if alpha == 1 else "general" if _LEAST <= alpha <= _MOST else None
    second: ScalarClass | None = "zero" if beta == 0 else "one" if beta == 1 else "general" if _LEAST <= beta <= _MOST else None
    return None if first is None or second is None else (first, second)


def number(name: str, what: str, value: object, *, of_complex: bool = False) -> float:
    """Return a factor, a number or a tensor of one element, perhaps ``of_complex``. Raises InvalidProblemError for others."""
    given = value
    if isinstance(given, Tensor):
        given = given.item() if given.numel() == 1 and not given.requires_grad else None
    elif type(given).__module__ == "numpy" and getattr(given, "ndim", 1) == 0:
        given = given.item()  # type: ignore[attr-defined]
    if isinstance(given, complex) and (given.imag == 0 or of_complex):
        return given.real if given.imag == 0 else given  # type: ignore[return-value]
    if not isinstance(given, (int, float)):
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InvalidProblemError(f"{name}: {what}: got {got}, expected a number, or a real tensor of one element without gradient")
    if isinstance(given, int) and not -(2**63) <= given < 2**64:  # as torch, also where the result is empty
        raise InvalidProblemError(
            f"{name}: {what}: got an integer of {given.bit_length()} bits, expected one of at most 64; give a float"
        )
    return given


def check_scalars(name: str, scalars: Iterable[tuple[str, float]], dtype: torch.dtype) -> None:
    """Raise InvalidProblemError if a finite scalar overflows the dtype in which products of ``dtype`` operands are scaled."""
    for what, value in scalars:
        most = torch.finfo(accumulator_dtype(dtype)).max
        if most < abs(value) < float("inf"):
            raise InvalidProblemError(
                f"{name}: {what}: got {value}, expected at most {most:.8g}: products of {dtype} are scaled in "
                f"{accumulator_dtype(dtype)}; scale the operands instead"
            )
