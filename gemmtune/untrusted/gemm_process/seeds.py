"""Seeds of the random numbers of Python and numpy: whether they were set, not how many numbers were drawn."""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable
from typing import Any

import numpy as np

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

WORDS, WORDS_COMPARED = 624, 8
"""Words of a state of the Mersenne Twister, which makes so many numbers of each, and those of them that are compared."""
BLOCKS, MOST_STEPS = 500, 60
"""States that are passed in one step, and most steps: about 20 million numbers may have been drawn."""


def readers() -> dict[str, Callable[[], object]]:
    """Return functions that are true once a seed was set. They take all that they use now."""
    of_python, of_numpy = random.getstate, np.random.get_state

    def words_of_python() -> list[int]:
        return list(of_python()[1][:WORDS])

    def words_of_numpy() -> list[int]:
        state: Any = of_numpy()
        return [int(x) for x in state[1]]

    return {
        "seed of Python's random numbers was set": _was_set(words_of_python),
        "seed of numpy's random numbers was set": _was_set(words_of_numpy),
    }


def _was_set(words: Callable[[], list[int]]) -> Callable[[], bool]:
    """Return a function that is true if the state is none to which drawing numbers leads."""
    reached, twister = words(), np.random.MT19937()
    array, word = np.array, np.uint32
    steps, length, compared, whole = range(MOST_STEPS), WORDS, WORDS_COMPARED, WORDS * BLOCKS

    def numbers(state: list[int], count: int) -> Any:
        twister.state = {"bit_generator": "MT19937", "state": {"key": array(state, dtype=word), "pos": 0}}
        return twister.random_raw(count)

    def was_set() -> bool:
        now = words()
        if now == reached:
            return False
        first, drawn = numbers(now, compared), numbers(reached, whole)
        for _ in steps:
            if (drawn.reshape(-1, length)[:, :compared] == first).all(1).any():
                reached[:] = now
                return False
            drawn = twister.random_raw(whole)
        return True

    return was_set
