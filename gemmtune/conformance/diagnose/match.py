"""Matching: tests if a suspected bug gives the wrong result."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from ...problem.dtypes import dtype_info
from .evidence import Seen, View

LEAST_BITS = 20.0
"""Minimum evidence in bits beside log2 of the variants tried: a few hundred bugs give a wrong match with 1 in 10^4."""
CONFINED_BITS = 36.0
"""Minimum evidence in bits for a bug that is confined to some places."""
MOST_ELEMENT_BITS = 16.0
PATTERN_BITS = 20.0
"""Evidence of a matching pattern of NaN."""
MOST_LEFT = 0.5
"""Maximum share of the total error that an explanation may leave."""


class Suspect(NamedTuple):
    """Result that a bug would give: float64, of a view, not rounded to the output dtype.

    ``tried`` is the number of variants of the bug. ``share`` is the share of wrong elements that the bug has to explain.
    ``along_k`` marks a bug of K alone, which spoils rows and columns alike. ``error`` is the allowed error of the result.
    Without it, the tolerance of the expectation applies.
    """

    text: str
    result: torch.Tensor
    tried: int = 1
    share: float = 1.0
    along_k: bool = False
    error: torch.Tensor | None = None


S = TypeVar("S", bound=Seen)
Bug: TypeAlias = Callable[[View], Iterator[Suspect]]
"""Generator of the suspects of one kind of bug, the likeliest first. A suspect that changes nothing explains nothing."""


class Fit(NamedTuple):
    """A match. ``everywhere``: it also gives the right elements. ``certain``: it is no coincidence."""

    suspect: Suspect
    everywhere: bool
    certain: bool


def _fit(view: Seen, suspect: Suspect) -> Fit | None:
    """Match a suspect with the result. Return None if it does not explain it, or if it spoils other elements and may be chance."""
    result, info = suspect.result, dtype_info(view.problem.out.dtype)
    # Margin of a kernel with this bug: the tolerance, rounding to the output dtype, rounding on the way.
    tolerance = view.tolerance if suspect.error is None else suspect.error
    margin = tolerance.nan_to_num(0, 0) + 1.01 * info.unit_roundoff * result.abs() + info.smallest_subnormal + view.allowance
    same = ((view.got - result).abs() <= margin) | (view.got.isnan() & result.isnan()) | (view.got == _stored(view, result))
    # At wrong elements the suspect must be much closer to the result than the expectation is.
    before, after = ((view.got - x).abs()[view.bad] for x in (view.expected, result))
    counted = before.isfinite() & after.isfinite()
    nearer = bool(after[counted].sum() <= MOST_LEFT * before[counted].sum())
    if not nearer or float(same[view.bad].double().mean()) < suspect.share:
        return None
    bits = _evidence(view, result, margin, same) - math.log2(suspect.tried)
    if bool(same[~view.bad].all()):
        return Fit(suspect, everywhere=True, certain=bits >= LEAST_BITS)
    return Fit(suspect, everywhere=False, certain=True) if bits >= CONFINED_BITS else None


def fitting(view: S, bug: Callable[[S], Iterator[Suspect]]) -> Iterator[Fit]:
    """Yield the matches among the suspects of a bug."""
    return (found for suspect in bug(view) if (found := _fit(view, suspect)) is not None)


def _stored(view: Seen, result: torch.Tensor) -> torch.Tensor:
    """Return ``result`` rounded to the output dtype. Integers stay as they are."""
    dtype = view.problem.out.dtype
    return result if dtype_info(dtype).is_integer else result.to(dtype).double()


def _evidence(view: Seen, result: torch.Tensor, margin: torch.Tensor, same: torch.Tensor) -> float:
    """Return the evidence in bits: the size of the explained errors, measured in margins.

    If the suspect gives an element to the last bit, the margin is half a unit in the last place, or 0.5 for integers.
    Equal numbers count once, since one cause gives them all. NaN and infinities do not count, since many bugs cause them, but an
    equal pattern of NaN counts once.
    """
    bad = view.bad & view.expected.isfinite() & same
    got, expected = view.got[bad], view.expected[bad]
    to_the_bit = dtype_info(view.problem.out.dtype).unit_roundoff * got.abs()
    unit = torch.where(got == _stored(view, result)[bad], to_the_bit, margin[bad])
    unit = unit.clamp_min(0.5 if view.integral else 1e-300)
    bits = torch.log2(((got - expected).abs() / unit).clamp_min(1)).clamp_max(MOST_ELEMENT_BITS)
    different, which = torch.unique(torch.stack([got, expected]).abs().nan_to_num(0, 0, 0), dim=1, return_inverse=True)
    most = torch.zeros(different.shape[1], dtype=torch.float64).scatter_reduce(0, which, bits.nan_to_num(0, 0, 0), "amax")
    nan = view.got.isnan()
    pattern = bool(nan[view.bad].any()) and not bool(nan.all()) and bool((nan == result.isnan()).all())
    return float(most.sum()) + (PATTERN_BITS if pattern else 0.0)


DIFFERS = "differs between equal calls"
FIRST_CALL = "wrong at the first call of a problem, right when called again"
KEPT = "right with copies of the operands, as if something were kept by address"
ADDED_TO_OUT = "added to what out held before"
AT_ONCE = "wrong while other threads call, right alone"
INPUT_RETURNED = "an input is returned as the result"
WRONG_DTYPE = "a result of the wrong dtype"
_PLACE = re.compile(r" (?:in|confined to) (?=the (?:first|last) |rows? |columns? |batch |batches |every ).*")


class Diagnosis(NamedTuple):
    """Diagnosis of a result. ``text`` names the bug, or is empty. ``also`` has the other bugs that would give the result."""

    text: str = ""
    also: tuple[str, ...] = ()


def kind_of(text: str) -> str:
    """Return the common part of all diagnoses of one bug: the text without places, sizes and remarks in brackets."""
    plain = _PLACE.sub("", re.sub(r" \(.*?\)", "", text))
    return re.sub(r"\bK block of #", "K block", re.sub(r"(?<!\w)\d+", "#", plain))
