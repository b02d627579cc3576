"""Classes of block-sparse weights as text for case ids and traits: ``32x16@0.5+skewed+int64``."""

from __future__ import annotations

import re

from ..errors import CaseError
from ..problem.sparsity import Sparsity

SIDES = ("16x16", "32x32", "8x24", "64x16", "48x4")
"""Rows x columns of the blocks that are tried if none are declared."""
KINDS = ("@0.5", "@0.2+skewed", "@0.3+int64", "@0")
"""Density of blocks, their distribution if not even, and the width of their indices if not 32 bits."""
PLAIN = SIDES[0] + KINDS[0]
_TEXT = re.compile(r"(\d{1,18})x(\d{1,18})@(\d{1,18}(?:\.\d{1,18})?)(\+skewed)?(\+int64)?")
_SIDES = re.compile(r"[1-9]\d{0,17}x[1-9]\d{0,17}")


def is_sides(text: str) -> bool:
    """Return True if a text has the form rows x columns."""
    return bool(_SIDES.fullmatch(text))


def sparsity_of_text(text: str) -> Sparsity:
    """Return the class of a text. Raises CaseError for a malformed text, InvalidProblemError for an illegal class."""
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
