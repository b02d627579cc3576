"""Errors that rounded operands leave in a result, which show far below the error that a sum of their length may have.

A GEMM that rounds its operands first is off by (r(a) − a) @ b and a @ (r(b) − b), which are known. The errors of a GEMM that does
not have nothing in common with these: their regression on them is 0, give or take the noise of all elements.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

NARROWER: Mapping[torch.dtype, Mapping[str, int]] = MappingProxyType({
    torch.float32: {"tf32 or float16": 11, "bfloat16": 8},
    torch.float16: {"bfloat16": 8, "8-bit floats": 4},
    torch.bfloat16: {"8-bit floats": 4},
})  # fmt: skip
"""Narrower types by dtype, with the bits of their significands."""
TF32_BITS = 11
PART_BITS, THREE_PRODUCTS = 8, "two bfloat16 parts, multiplied in three products"
"""Bits of the parts of a number, and the name of a product without those of the small parts."""
COLUMNS = 32
"""Columns whose errors are compared together: a kernel may round for some of its tiles only."""
LEAST_ELEMENTS = 64
LEAST_SHARE, LEAST_SIGMAS = 0.25, 10.0
"""Least share of the errors of rounded operands that a result must have, and multiple of the noise of that share."""
LEAST_NORMALISED = 5.0
"""Least sum of the products of errors and pattern, as a multiple of the root of the sum of their squares.

Few elements with large errors do not reach it by luck.
"""
LEAST_DISTINCT, NEAR = 0.5, 0.05
"""Least share of different errors: those of equal rows or columns are equal, and count once only.

The second number is the share of the usual distance between neighbours, below which rows are so near that their errors are alike.
"""


def rounded_to(error: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, input_mode: str) -> str | None:
    """Return the narrower type to which a GEMM has rounded its operands, or None.

    Args:
        error: the result without a @ b, [B, rows, N], in float64.
        a: the rows of a that made it, [B, rows, K].
        b: all of b, [B, K, N].
        dtype: dtype of the operands. Only ``NARROWER`` are judged.
        input_mode: declared reading of float32 operands.
    """
    if torch.unique(error).numel() < LEAST_DISTINCT * error.numel():
        return None
    a, b = a.float(), b.float()
    if _is_crowded(a) or _is_crowded(b.mT):
        return None
    for name, bits in NARROWER.get(dtype, {}).items():
        if bits == TF32_BITS and input_mode == "tf32":
            continue
        if _has(error, (rounded(a, bits) - a) @ b) or _has(error, a @ (rounded(b, bits) - b)):
            return name
    if dtype == torch.float32 and _has(error, (a - rounded(a, PART_BITS)) @ (rounded(b, PART_BITS) - b)):
        return THREE_PRODUCTS
    return None


def _is_crowded(x: torch.Tensor) -> bool:
    """Return True if most rows of a matrix are near to another one, as seen along one direction."""
    rows, k = x.shape[-2:]
    if rows < 2:
        return False
    direction = torch.arange(k, dtype=torch.float64, device=x.device).square().sin()
    along = (x.double() @ direction / x.double().norm(dim=-1)).sort(-1).values
    return bool((along.diff(dim=-1).median(-1).values * rows < NEAR * direction.norm() / k**0.5).any())


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 numbers rounded to so many bits, by Veltkamp's splitting."""
    scaled = x * (2.0 ** (24 - bits) + 1)
    return scaled - (scaled - x)


def _has(error: torch.Tensor, pattern: torch.Tensor) -> bool:
    """Return True if errors, or those of some columns, have a share of the pattern that is no noise."""
    columns = error.shape[-1]
    part = torch.arange(columns, device=error.device) * max(columns // COLUMNS, 1) // max(columns, 1)
    error, pattern = _without_means(error, part), _without_means(pattern.double(), part)
    ones = torch.ones_like(error)
    product = error * pattern
    pairs = ((error, pattern), (pattern, pattern), (error, error), (ones, ones), (product, product))
    sums = torch.stack([(x * y).sum((0, 1)) for x, y in pairs])
    of_parts = _added_up(sums, part)
    both, squares, own, elements, fourth = torch.cat([of_parts, of_parts.sum(1, keepdim=True)], dim=1)
    share = both / squares  # NaN if nothing is rounded
    noise = ((own - share * both).clamp_min(0) / elements / squares).sqrt()
    sure = (share > LEAST_SIGMAS * noise) & (both > LEAST_NORMALISED * fourth.sqrt())
    return bool(((share > LEAST_SHARE) & sure & (elements >= LEAST_ELEMENTS)).any())


def _added_up(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns of each part."""
    return x.new_zeros(*x.shape[:-1], max(x.shape[-1] // COLUMNS, 1)).index_add_(-1, part, x)


def _without_means(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a matrix without the means of its rows and columns: a bias of all sums is no sign of rounded operands."""
    if x.shape[-1] > 1:
        x = x - (_added_up(x, part) / _added_up(torch.ones_like(x), part)).index_select(-1, part)
    return x - x.mean(-2, keepdim=True) if x.shape[-2] > 1 else x
