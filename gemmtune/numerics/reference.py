"""Reference values R = alpha · a @ b + beta · inp and magnitudes S = |alpha|·|a| @ |b| + |beta|·|inp|, in float64 or better.

If there are two products, a means [a c] and b means [b; d], so that S = |a| @ |b| + |c| @ |d|. With scales and zero points, a
and b mean a · scale_a and (b − zero_b) · scale_b, and |b| means (|b| + |zero_b|) · |scale_b|. Products of int8 are exact,
because their sums stay far below 2^53. Large problems are sampled: a ``Region`` is the part of the output for which R and S
exist.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .operands import Operands
from .quantized import dequantized_a, dequantized_b

TEMPORARY_BYTES = 2**28
"""Budget of one float64 copy of a and b. There are two copies, and one more for scales and zero points."""
MOST_MACS = {"cpu": 2**31, "cuda": 2**41}
"""Multiplications for one reference: about 0.1 s on two CPU cores, below a second on a GPU."""
MOST_ELEMENTS = {"cpu": 2**26, "cuda": 2**27}
"""Output elements for which R and S are kept, 16 bytes each."""
LEAST_SAMPLED = 8
EXTENDED_MACS = 2**21
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Output elements in these rows and columns, of every batch. None means all of them."""

    rows: torch.Tensor | None = None
    cols: torch.Tensor | None = None

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the region's part of a [B, M, N] tensor."""
        if self.rows is not None:
            matrix = matrix.index_select(-2, self.rows)
        return matrix if self.cols is None else matrix.index_select(-1, self.cols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """R (``value``) and S of one region, float64 [B, rows, cols]. ``extended``: R is better than a float64 product."""

    region: Region
    value: torch.Tensor
    magnitude: torch.Tensor
    extended: bool = False

    def of_first_rows(self, m: int) -> "Reference":
        """Return the part in the first ``m`` rows of the result."""
        rows = self.region.rows
        if rows is None:
            return self
        count = int((rows < m).sum())
        region = replace(self.region, rows=rows[:count])
        return replace(self, region=region, value=self.value[:, :count], magnitude=self.magnitude[:, :count])


def regions(batch: int, m: int, n: int, k: int, device: torch.device) -> tuple[Region, ...]:
    """Return the whole output if affordable, else a sample of rows and one of columns, each with the first and last line."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    macs, elements = MOST_MACS[kind], MOST_ELEMENTS[kind]
    if batch * m * n * max(k, 1) <= 2 * macs and batch * m * n <= elements:
        return (Region(),)
    per_row, per_col = batch * n, batch * m
    rows = min(macs // 2 // (per_row * max(k, 1)), elements // 2 // per_row)
    cols = min(macs // 2 // (per_col * max(k, 1)), elements // 2 // per_col)
    return (Region(rows=_sample(m, rows, device)), Region(cols=_sample(n, cols, device)))


def _sample(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` different sorted indices below ``size`` (at least LEAST_SAMPLED), including the first and the last."""
    count = min(size, max(count, LEAST_SAMPLED))
    generator = torch.Generator().manual_seed(SEED)
    inner = torch.randperm(max(size - 2, 0), generator=generator)[: count - 2] + 1
    return torch.tensor(sorted({0, size - 1, *inner.tolist()}), device=device)


def as_batches(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as [B, rows, cols], adding a batch dimension if it has none."""
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def reference(operands: Operands, region: Region) -> Reference:
    """Return R and S of a region by a float64 product, whose error is at most K·2^-53·S."""
    a, b = _restricted(operands, region)
    value, magnitude = products(a, b, *_readers(operands, region))
    return _with_scalars(operands, region, value, magnitude, extended=False)


def extended_reference(operands: Operands, batch: int, m: int, n: int, k: int) -> Reference:
    """Return a reference for float64 results, sampled, whose R is off by about 2^-53 of R plus K·2^-104·S."""
    device = operands.a.device
    side = int((EXTENDED_MACS / (batch * max(k, 1))) ** 0.5)
    region = Region(rows=_sample(m, side, device), cols=_sample(n, side, device))
    everything = slice(None)
    (a, a_magnitude), (b, b_magnitude) = (
        read(stored, everything) for read, stored in zip(_readers(operands, region), _restricted(operands, region), strict=True)
    )
    value = torch.stack([_extended_product(x, y) for x, y in zip(a, b, strict=True)])
    return _with_scalars(operands, region, value, a_magnitude @ b_magnitude, extended=True)


def _restricted(operands: Operands, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
    return Region(rows=region.rows).of(as_batches(operands.left)), Region(cols=region.cols).of(as_batches(operands.right))


Reader = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""Function from stored rows of a or columns of b, and their slice of the region, to values and magnitudes in float64."""


def _readers(operands: Operands, region: Region) -> tuple[Reader, Reader]:
    def lines(given: torch.Tensor | None, count: int) -> torch.Tensor:
        return torch.arange(count, device=operands.a.device) if given is None else given

    rows, cols = lines(region.rows, operands.a.shape[-2]), lines(region.cols, operands.b.shape[-1])
    return (
        lambda stored, which: dequantized_a(operands, stored, rows[which]),
        lambda stored, which: dequantized_b(operands, stored, cols[which]),
    )


def _with_scalars(operands: Operands, region: Region, value: torch.Tensor, magnitude: torch.Tensor, *, extended: bool) -> Reference:
    value, magnitude = value.mul_(operands.alpha), magnitude.mul_(abs(operands.alpha))
    if operands.inp is not None and operands.beta != 0:
        size = (*operands.a.shape[:-1], operands.b.shape[-1])
        added = region.of(as_batches(operands.inp.expand(size))).double() * operands.beta
        value, magnitude = value.add_(added), magnitude.add_(added.abs_())
    return Reference(region=region, value=value, magnitude=magnitude, extended=extended)


def _as_stored(stored: torch.Tensor, _: slice) -> tuple[torch.Tensor, torch.Tensor]:
    value = stored.double()
    return value, value.abs()


def products(
    a: torch.Tensor, b: torch.Tensor, read_a: Reader = _as_stored, read_b: Reader = _as_stored
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a @ b, |a| @ |b|), float64, for a [B, M, K] and b [B, K, N], read by ``read_a`` and ``read_b`` tile by tile."""
    (batch, m, k), n = a.shape, b.shape[-1]
    value = torch.empty((batch, m, n), dtype=torch.float64, device=a.device)
    magnitude = torch.empty_like(value)
    for batches, rows, cols in _tiles(batch, m, n, k):
        (x, x_magnitude), (y, y_magnitude) = read_a(a[batches, rows], rows), read_b(b[batches, :, cols], cols)
        value[batches, rows, cols] = x @ y
        magnitude[batches, rows, cols] = x_magnitude @ y_magnitude
    return value, magnitude


def _tiles(batch: int, m: int, n: int, k: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield whole matrices if several fit the budget, else pieces of one matrix at a time."""
    words = TEMPORARY_BYTES // 8 // max(k, 1)
    if m + n <= words:
        step = max(1, words // max(m + n, 1))
        yield from ((slice(i, i + step), slice(None), slice(None)) for i in range(0, batch, step))
        return
    side = max(1, words // 2)
    for i in range(batch):
        for col in range(0, n, side):
            yield from ((slice(i, i + 1), slice(row, row + side), slice(col, col + side)) for row in range(0, m, side))


def _extended_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [M, K] @ b [K, N] in float64 with compensation: every product and sum carries its rounding error along.

    Error-free transformations: TwoProduct with Veltkamp's splitting and TwoSum (Ogita, Rump, Oishi, "Accurate sum and dot
    product", SIAM J. Sci. Comput. 26, 2005), summed pairwise.
    """
    x, y = a.unsqueeze(-1), b.unsqueeze(0)
    high = x * y
    (x1, x2), (y1, y2) = _split(x), _split(y)
    low = x2 * y2 - (((high - x1 * y1) - x2 * y1) - x1 * y2)
    while high.shape[1] > 1:
        half = high.shape[1] // 2
        rest_high, rest_low = high[:, 2 * half :], low[:, 2 * half :]
        p, q = high[:, :half], high[:, half : 2 * half]
        total = p + q
        back = total - p
        error = (p - (total - back)) + (q - back)
        high = torch.cat([total, rest_high], dim=1)
        low = torch.cat([low[:, :half] + low[:, half : 2 * half] + error, rest_low], dim=1)
    return (high + low).sum(dim=1)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x as a sum of two numbers of at most 26 bits each."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high
