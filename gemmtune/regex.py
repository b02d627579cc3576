"""Regular expressions that users give, which must not take forever on any name."""

import functools
import importlib
import importlib.util
import re
import string
import time
from collections.abc import Sequence
from typing import Any

MOST_CHARS = 10_000
MOST_REPEATS = 1000
"""Largest bound of a repeat such as ``x{1000}``."""
NAME_CHARS = 64
"""Length of a usual name, for the estimate."""
MOST_WAYS = 300_000
"""Most ways in which Python's engine may try to match a name from one place: those of three ``.*`` pass, those of four do not."""
MOST_S = 20.0
"""Most time for the names of all choices together."""
_ALPHABET = frozenset(string.printable)
_CATEGORIES = {name: frozenset(c for c in _ALPHABET if re.match(f"\\{letter}", c)) for name, letter in {
    "CATEGORY_DIGIT": "d", "CATEGORY_NOT_DIGIT": "D", "CATEGORY_SPACE": "s", "CATEGORY_NOT_SPACE": "S", "CATEGORY_WORD": "w",
    "CATEGORY_NOT_WORD": "W",
}.items()}  # fmt: skip

Nodes = Sequence[tuple[Any, Any]]
"""Parsed expression: pairs of an operation and its arguments, as ``re`` makes them."""


class Pattern:
    """Expression that ``re`` or google-re2 has compiled, and the time that it has taken so far."""

    def __init__(self, engine: re.Pattern[str]) -> None:
        self._engine = engine
        self._taken_s = 0.0

    def found(self, text: str) -> bool:
        """Return True if the expression matches somewhere in the text. Raises ValueError once it has taken MOST_S in total."""
        if self._taken_s > MOST_S:
            raise ValueError(f"it has taken {self._taken_s:.0f} s to match names, expected at most {MOST_S:g}; write a simpler one")
        begun = time.perf_counter()
        match = self._engine.search(text)
        self._taken_s += time.perf_counter() - begun
        return match is not None


@functools.lru_cache(maxsize=64)
def compiled(pattern: str) -> Pattern:
    """Return the expression, compiled by ``re``, or by google-re2 if ``re`` might take too long and google-re2 is installed.

    Raises ValueError if it may take too long; re.error, OverflowError or RecursionError if it is no regular expression.
    """
    if len(pattern) > MOST_CHARS:
        raise ValueError(f"it has {len(pattern)} characters, expected at most {MOST_CHARS}")
    made, parsed = re.compile(pattern), re._parser.parse(pattern)  # type: ignore[attr-defined]
    if _ways(list(parsed), bool(made.flags & re.IGNORECASE)) <= MOST_WAYS:
        return Pattern(made)
    if importlib.util.find_spec("re2") is not None:
        linear: Any = importlib.import_module("re2")
        try:
            return Pattern(linear.compile(pattern))
        except linear.error as error:
            raise ValueError(f"google-re2 refuses it: {error}") from error
    raise ValueError(
        f"its repeats may match a name in more than {MOST_WAYS} ways, which takes too long: put no * or + within another, use at "
        r"most three, or bound them, as in \d{1,4}; with google-re2 installed it is accepted"
    )


def _ways(nodes: Nodes, fold: bool) -> float:
    """Estimate in how many ways the nodes may match parts of a name, of which a failing search tries all."""
    total = 1.0
    for place, (op, argument) in enumerate(nodes):
        match str(op):
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                following = _first(nodes[place + 1 :], fold)
                total *= _ways_of_repeat(*argument, following=following, fold=fold)
            case "BRANCH":
                total *= _ways_of_branch(argument[1], fold)
            case "SUBPATTERN":
                total *= _ways(argument[3], fold or bool(argument[1] & re.IGNORECASE))
            case "ASSERT" | "ASSERT_NOT":
                total *= _ways(argument[1], fold)
            case "ATOMIC_GROUP":
                total *= _ways(argument, fold)
            case "GROUPREF_EXISTS":
                total *= sum(_ways(part, fold) for part in argument[1:] if part is not None)
        if total > MOST_WAYS:
            return total
    return total


def _ways_of_repeat(low: int, high: int, body: Nodes, *, following: frozenset[str] | None, fold: bool) -> float:
    if low > MOST_REPEATS or MOST_REPEATS < high < int(re._constants.MAXREPEAT):  # type: ignore[attr-defined]
        return float("inf")
    each, least, most = min(_ways(body, fold), 2.0 * MOST_WAYS), min(low, NAME_CHARS), min(high, NAME_CHARS)
    own = _first(body, fold) if len(body) == 1 else None
    if each == 1:
        ends = own is not None and following is not None and not own & following  # only one number of repeats can be right
        return 1.0 if ends else float(most - least + 1)
    total, one = 0.0, 1.0
    for count in range(most + 1):
        total += one if count >= least else 0
        one = min(one * each, 2.0 * MOST_WAYS)
    return total


def _ways_of_branch(parts: Sequence[Nodes], fold: bool) -> float:
    """Add the ways of the alternatives, or take the largest if the first character decides."""
    ways, firsts = [_ways(part, fold) for part in parts], [_first(part, fold) for part in parts]
    known = [first for first in firsts if first is not None]
    decided = len(known) == len(parts) and sum(map(len, known)) == len(frozenset().union(*known))
    return max(ways) if decided else sum(ways)


def _first(nodes: Nodes, fold: bool) -> frozenset[str] | None:
    """Return the printable characters with which the nodes may begin, or None if they may be empty or begin otherwise."""
    if not nodes:
        return None
    op, argument = nodes[0]
    match str(op):
        case "LITERAL":
            chars = frozenset(chr(argument))
        case "NOT_LITERAL":
            chars = _ALPHABET - {chr(argument)}
        case "ANY":
            chars = _ALPHABET
        case "IN":
            chars = _in_set(argument)
        case "SUBPATTERN":
            return _first(argument[3], fold or bool(argument[1] & re.IGNORECASE))
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT" if argument[0] > 0:
            return _first(argument[2], fold)
        case _:
            return None
    return chars | {c.swapcase() for c in chars} if fold else chars


def _in_set(items: Nodes) -> frozenset[str]:
    members: set[str] = set()
    for op, argument in items:
        match str(op):
            case "LITERAL":
                members.add(chr(argument))
            case "RANGE":
                members.update(c for c in _ALPHABET if argument[0] <= ord(c) <= argument[1])
            case "CATEGORY":
                members |= _CATEGORIES[str(argument)]
    return _ALPHABET - members if items and str(items[0][0]) == "NEGATE" else frozenset(members)
