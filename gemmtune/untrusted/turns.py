"""Draws in turn, so that few calls have each kind."""

import random


class Turns:
    """Draws among kinds. Each of them comes, in an order that is drawn, before one comes again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: dict[tuple[str, ...], list[str]] = {}

    def next(self, kinds: tuple[str, ...]) -> str:
        """Return the next one of these kinds. Some may stand there more than once."""
        left = self._left.setdefault(kinds, [])
        left[:] = left or self._rng.sample(kinds, len(kinds))
        return left.pop()
