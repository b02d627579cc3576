"""What is said of a wrong result: a name for the bug, and the names that would fit as well."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DIFFERS", "FIRST_CALL", "WRONG_DTYPE", "Diagnosis", "kind_of"]

DIFFERS = "differs between equal calls"
FIRST_CALL = "wrong at the first call of a problem, right when called again"
WRONG_DTYPE = "a result of the wrong dtype"
_PLACE = re.compile(r" (?:in|confined to) (?=the (?:first|last) |rows? |columns? |batch |batches |every ).*")


class Diagnosis(NamedTuple):
    """``text`` names what the result looks like, empty if like nothing known; ``also`` the other bugs that would give it."""

    text: str = ""
    also: tuple[str, ...] = ()


def kind_of(text: str) -> str:
    """What two diagnoses of one bug have in common: without places, sizes and remarks in brackets."""
    plain = _PLACE.sub("", re.sub(r" \(.*?\)", "", text))
    return re.sub(r"\bK block of #", "K block", re.sub(r"(?<!\w)\d+", "#", plain))
