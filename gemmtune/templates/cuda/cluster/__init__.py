"""For small results of long sums: clusters of blocks divide K, and add up within themselves and then through memory."""

from .offers import offers

__all__ = ["offers"]
