"""What is known of alpha and beta before a call."""

from __future__ import annotations

from typing import Literal

__all__ = ["ScalarClass", "scalar_class"]

ScalarClass = Literal["zero", "one", "general"]
"""The value itself is an argument of the launch."""


def scalar_class(value: float) -> ScalarClass:
    """The class of a value of alpha or beta."""
    return "zero" if value == 0 else "one" if value == 1 else "general"
