"""Reduction classes: how the products of one element are summed. Kernels of one class give a row equal bits.

On one GPU, the tile, the instruction and the library do not show in the bits of a sum. The division of K does, and the order in
which partial sums are added. A kernel declares both as a function of its config and of K, and never of M.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidProblemError
from ..problem import Problem

ALONE = "alone"
"""Unit of a kernel that is batch-invariant and does not say how it sums."""
_TEXT = re.compile(r"(matrix|fma)(?:/(\d+))?(?:@(\d+))?")
_FORMS = "matrix or fma, then /1024 for parts of 1024 elements of K, then @128 for a float32 sum every 128 elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Order in which the products of one element of the result are summed.

    ``unit`` is ``matrix`` (an instruction), ``fma`` (multiply-adds in rising order of K), ``exact`` (integers) or ALONE. ``parts``
    are the lengths of consecutive parts of K with a partial sum each; empty for one run. ``order`` names the order in which partial
    sums are added, empty for rising order of K. After ``promoted_every`` elements of K the sum of the unit is added to a float32
    sum. ``own`` names what only some kernels share: how they order the elements of one instruction, apply scales, or compute an
    epilogue.
    """

    unit: str
    parts: tuple[int, ...] = ()
    order: str = ""
    promoted_every: int | None = None
    own: str = ""

    def __str__(self) -> str:
        if self.unit == ALONE:
            return f"sums of {self.own}"
        if self.unit == "exact":
            return "exact sums" + (f", {self.own}" if self.own else "")
        alike = self.parts[:1] * (len(self.parts) - 1) == self.parts[:-1]  # the last part may be shorter
        lengths = f"{len(self.parts)} parts of {self.parts[0] if alike else ' + '.join(map(str, self.parts))}" if self.parts else ""
        text = f"{self.unit}, K in {lengths or 'one run'}"
        text += f", {self.order}" if self.order else ""
        text += f", promoted every {self.promoted_every}" if self.promoted_every else ""
        return text + (f", {self.own}" if self.own else "")

    @classmethod
    def alone(cls, name: str) -> "Reduction":
        """Return the class of a single kernel that promises equal bits for every M."""
        return cls(unit=ALONE, own=name)

    @classmethod
    def declared(cls, text: str, problem: Problem, own: str) -> "Reduction":
        """Return the reduction that a user's text declares for a problem. Raises InvalidProblemError for another form."""
        check_text(text)
        unit, length, promoted = _TEXT.fullmatch(text).groups()  # type: ignore[union-attr]
        lengths = parts_of(problem.k, int(length)) if length else ()
        return reduction_of(problem, own, unit=unit, parts=lengths, promoted_every=int(promoted) if promoted else None)


def check_text(text: str) -> None:
    """Raise InvalidProblemError unless ``text`` is a reduction in the form that users declare."""
    found = _TEXT.fullmatch(text)
    if found is None or 0 in (int(x) for x in found.groups()[1:] if x):
        raise InvalidProblemError(f"reduction: got {text!r}, expected {_FORMS}")


def parts_of(k: int, length: int) -> tuple[int, ...]:
    """Return the lengths of consecutive parts of K, the last one shorter if need be; none for a single part."""
    lengths = tuple(min(length, k - begin) for begin in range(0, k, length))
    return lengths if len(lengths) > 1 else ()


def even_parts(k: int, step: int, count: int) -> tuple[int, ...]:
    """Return the lengths of ``count`` consecutive parts of K in whole steps, the first ones a step longer if need be."""
    each, more = divmod(-(-k // step), count)
    ends = [0]
    for part in range(count):
        ends.append(min(k, ends[-1] + (each + (part < more)) * step))
    lengths = tuple(end - begin for begin, end in itertools.pairwise(ends))
    return lengths if count > 1 else ()


def reduction_of(
    problem: Problem,
    family: str,
    *,
    unit: str = "",
    parts: Sequence[int] = (),
    order: str = "",
    promoted_every: int | None = None,
    own: str = "",
) -> Reduction:
    """Return the reduction of a kernel. ``family`` names the kernels that compute an epilogue alike.

    ``unit`` is by default a matrix instruction, or fused multiply-adds for float32 in full precision and for float64. Without an
    epilogue, and with alpha and beta 0 or 1, every kernel rounds the sum once. Sums of integers are exact in any order.
    """
    # The result is the sum, perhaps plus the added operand or times one scale, rounded once.
    scalars = problem.alpha == "one" and (problem.inp is None or problem.beta != "general")
    others = problem.epilogue is not None or problem.weights is not None or bool(problem.gated)
    after = "" if scalars and not others and len(problem.scales) <= 1 else family
    own = ", ".join(dict.fromkeys(x for x in (own, after) if x))
    if problem.integers:
        return Reduction(unit="exact", own=own)
    wide = problem.dtype.itemsize == 8 or (problem.dtype.itemsize == 4 and problem.precision.input_mode == "ieee")
    return Reduction(
        unit=unit or ("fma" if wide else "matrix"), parts=tuple(parts), order=order, promoted_every=promoted_every, own=own
    )


def numbers_of_weights(problem: Problem, family: str) -> str:
    """Return ``own`` of kernels that widen narrow weights to a's dtype before they multiply them in rising order of K.

    Without scales along K and zero points, they multiply the integers themselves. A scale along K of a's dtype times an integer is
    rounded once to that dtype, in any order of conversions. Other scales and zero points are rounded in an order that only
    ``family`` knows.
    """
    scale = problem.scale_b
    if problem.zero_b is not None:
        return family
    if scale is None or problem.scale_block("scale_b")[0] >= problem.k:
        return ""
    return "weights scaled and rounded" if scale.dtype == problem.dtype else family
