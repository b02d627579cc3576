"""Classes of block-sparse weights as case ids and traits have them: ``32x16@0.5+skewed+int64``."""

from __future__ import annotations

import re

from ..errors import CaseError
from ..problem.sparsity import Sparsity

SIDES = ("16x16", "32x32", "8x24", "64x16", "48x4")
"""Rows x columns of a block that are tried where none are declared."""
KINDS = ("@0.5", "@0.2+skewed", "@0.3+int64", "@0")
"""How many blocks there are, how they are spread, and their indices, which are 32 bits wide unless that is said."""
PLAIN = SIDES[0] + KINDS[0]
_TEXT = re.compile(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)(\+skewed)?(\+int64)?")
_SIDES = re.compile(r"[1-9]\d*x[1-9]\d*")


def is_sides(text: str) -> bool:
    """Whether a text is rows x columns of a block."""
    return bool(_SIDES.fullmatch(text))


def sparsity_of_text(text: str) -> Sparsity:
    """The class that a text says. Raises CaseError for another text, InvalidProblemError for a class that there is not."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise CaseError(f"blocks: got {text!r}, expected rows x columns @ density, then +skewed or +int64, such as {PLAIN}")
    rows, columns, density, skewed, wide = found.groups()
    return Sparsity(
        block_n=int(rows),
        block_k=int(columns),
        density=float(density),
        imbalance="skewed" if skewed else "even",
        wide_index=bool(wide),
    )
