"""For operands whose lines are not aligned to 16 bytes: copied as they lie, and shifted on their way to the tensor cores."""

from .offers import offers

__all__ = ["offers"]
