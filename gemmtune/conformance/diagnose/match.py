"""Whether a bug that somebody suspects gives the wrong result that was got."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch

from ...problem.dtypes import dtype_info
from .evidence import View

LEAST_BITS = 20.0
"""The least evidence, more than the logarithm of how many variants of a bug were tried: over a few hundred bugs, a chance of 1 in
10^4."""
CONFINED_BITS = 36.0
"""The same for a bug that is in some places only."""
MOST_ELEMENT_BITS = 16.0
PATTERN_BITS = 20.0
"""What NaN in just the right places tell."""
MOST_LEFT = 0.5
"""The part of the errors that an explanation may leave."""


class Suspect(NamedTuple):
    """The result (float64, of a view, not rounded to the output dtype) that a bug would give.

    ``tried``: of how many variants this is one. ``share``: how many of the wrong elements it has to explain. ``along_k``: it is a
    bug of K alone, which spoils rows and columns alike.
    """

    text: str
    result: torch.Tensor
    tried: int = 1
    share: float = 1.0
    along_k: bool = False


Bug: TypeAlias = Callable[[View], Iterator[Suspect]]
"""The suspects of one kind of bug, the likeliest first. Those that would change nothing are harmless: they explain nothing."""


class Fit(NamedTuple):
    """A suspect explains every wrong element; ``everywhere``: and the right ones too; ``certain``: which is no coincidence."""

    suspect: Suspect
    everywhere: bool
    certain: bool


def _fit(view: View, suspect: Suspect) -> Fit | None:
    """None if the suspect does not explain what was got, or would spoil other elements and may explain these by coincidence."""
    result, info = suspect.result, dtype_info(view.problem.out.dtype)
    # How far from it a kernel with the bug may be: the tolerance, rounding to the output dtype, rounding on the way.
    margin = view.tolerance.nan_to_num(0, 0) + 1.01 * info.unit_roundoff * result.abs() + info.smallest_subnormal + view.allowance
    same = ((view.got - result).abs() <= margin) | (view.got.isnan() & result.isnan()) | (view.got == _stored(view, result))
    # It has to be much nearer to what was got than the expectation is, where that is wrong.
    before, after = ((view.got - x).abs()[view.bad] for x in (view.expected, result))
    counted = before.isfinite() & after.isfinite()
    nearer = bool(after[counted].sum() <= MOST_LEFT * before[counted].sum())
    if not nearer or float(same[view.bad].double().mean()) < suspect.share:
        return None
    bits = _evidence(view, result, margin, same) - math.log2(suspect.tried)
    if bool(same[~view.bad].all()):
        return Fit(suspect, everywhere=True, certain=bits >= LEAST_BITS)
    return Fit(suspect, everywhere=False, certain=True) if bits >= CONFINED_BITS else None


def fitting(view: View, bug: Bug) -> Iterator[Fit]:
    """The suspects of a bug that explain what was got."""
    return (found for suspect in bug(view) if (found := _fit(view, suspect)) is not None)


def _stored(view: View, result: torch.Tensor) -> torch.Tensor:
    """``result`` rounded to the output dtype; integers as they are."""
    dtype = view.problem.out.dtype
    return result if dtype_info(dtype).is_integer else result.to(dtype).double()


def _evidence(view: View, result: torch.Tensor, margin: torch.Tensor, same: torch.Tensor) -> float:
    """Bits by which the wrong elements that are explained tell this explanation from another: by how many margins they are off.

    Where the explanation is right to the last bit, the margin is half a unit in the last place, of integers half of 1. Equal
    numbers count once, since one cause gives them all. NaN and infinities do not count, since many things make them, but the same
    pattern of NaN and other numbers does, once.
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
