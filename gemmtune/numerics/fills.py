"""Random numbers of several kinds for the operands of a product, by name.

==============  ===============================================================================================================
``normal``      N(0, 1), away from subnormal numbers; integers of the whole range
``uniform``     U[0, 1), away from 0: one sign, so that rounding errors of one direction add up; integers of 0 or more
``integers``    −8 … 8
``wide``        magnitudes over many binades, small enough that no sum overflows the narrowest result; integers likewise
``ones``        1
``subnormal``   near the smallest normal number: most are subnormal. Floats only
``cancelling``  sums over K of a and b, or of a and ones, nearly vanish. The second half of K repeats the first, negated in a.
                Some repeated elements differ by a unit in the last place
==============  ===============================================================================================================
"""

from collections.abc import Callable

import torch

from ..errors import GemmtuneError
from ..problem import Layout
from ..problem.dtypes import dtype_info, dtype_name
from .buffers import held_size, overlapping

LEAST_NORMAL = 2.0**-12
"""Smallest magnitude of random numbers, so that they and half of them are normal numbers even in float16."""
MOST_SMALL = 8
"""Largest of the small integers, which are exact in every dtype."""
_BINADES: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (-40, 20), torch.float32: (-20, 10), torch.bfloat16: (-20, 10), torch.float16: (-12, 0),
    torch.float8_e4m3fn: (-5, 3), torch.float8_e5m2: (-12, 3), torch.float8_e4m3fnuz: (-6, 2), torch.float8_e5m2fnuz: (-13, 3),
}  # fmt: skip
"""Exponents by which ``wide`` multiplies N(0, 1), so that sums of 2^20 products stay finite in a float16 result."""


def fills_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the fills for a dtype."""
    return tuple(name for name in FILLS if name != "subnormal" or not dtype_info(dtype).is_integer)


def filled(name: str, layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:
    """Draw numbers of the named fill, as many as ``held_size(layout)`` says, of ``layout.dtype`` or close to it.

    ``k_dim`` is the summed dimension: -1 for a, -2 for b. Raises GemmtuneError for an unknown name, or one that the dtype lacks.
    """
    if name not in fills_of(layout.dtype):
        legal = ", ".join(fills_of(layout.dtype))
        raise GemmtuneError(f"fill: got {name!r}, expected for {dtype_name(layout.dtype)} one of {legal}")
    return FILLS[name](_Source(layout, generator, device, k_dim))


class _Source:
    """Source of the numbers of one operand. The public methods are fills."""

    def __init__(self, layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> None:
        self._layout = layout
        self._generator = generator
        self._device = device
        self._k_dim = k_dim
        self._info = dtype_info(layout.dtype)
        self._least = max(LEAST_NORMAL, self._info.smallest_normal)
        # This dtype holds all values of the layout's dtype, and torch can draw and compute it on every device.
        floats = torch.float64 if layout.dtype == torch.float64 else torch.float32
        self._wide = torch.int32 if self._info.is_integer else floats

    def normal(self) -> torch.Tensor:
        if self._info.is_integer:
            bounds = torch.iinfo(self._layout.dtype)
            return self.between(bounds.min, bounds.max)
        return self._away_from_0(self._standard())

    def uniform(self) -> torch.Tensor:
        if self._info.is_integer:
            return self.between(0, torch.iinfo(self._layout.dtype).max)
        return self._empty().uniform_(generator=self._generator).clamp_(min=self._least)

    def between(self, low: int, high: int) -> torch.Tensor:
        size = held_size(self._layout)
        return torch.randint(low, high + 1, size, generator=self._generator, dtype=self._wide, device=self._device)

    def wide(self) -> torch.Tensor:
        if self._info.is_integer:
            bits = torch.iinfo(self._layout.dtype).bits - 1
            exponents = torch.empty(held_size(self._layout), device=self._device).uniform_(0, bits, generator=self._generator)
            return torch.exp2(exponents).to(self._layout.dtype) * (self.between(0, 1) * 2 - 1)
        values, (low, high) = self._standard(), _BINADES[self._layout.dtype]
        exponents = torch.randint(low, high + 1, values.shape, generator=self._generator, dtype=values.dtype, device=self._device)
        return self._away_from_0(values * torch.exp2(exponents))

    def ones(self) -> torch.Tensor:
        return torch.ones(held_size(self._layout), device=self._device)

    def subnormal(self) -> torch.Tensor:
        return self._standard().double() * self._info.smallest_normal

    def cancelling(self) -> torch.Tensor:
        """Draw numbers whose sums nearly vanish, or draw ``normal`` if the layout has fewer than two free elements along K."""
        values, info, along = self.normal(), self._info, self._k_dim
        if overlapping(self._layout) or values.shape[along] < 2:
            return values
        half = values.shape[along] // 2
        values = values.to(self._layout.dtype).to(self._wide)
        first, second = values.narrow(along, 0, half), values.narrow(along, half, half)
        moved = torch.randint(0, 2, first.shape, generator=self._generator, dtype=values.dtype, device=self._device)
        again = first - moved * first.sign() if info.is_integer else first * (1 + moved * 2 * info.unit_roundoff)
        second.copy_(-again if along == -1 else again)
        if info.is_integer:
            second.clamp_(-info.largest, info.largest)
        values.narrow(along, 2 * half, values.shape[along] - 2 * half).zero_()
        return values

    def _empty(self) -> torch.Tensor:
        return torch.empty(held_size(self._layout), dtype=self._wide, device=self._device)

    def _standard(self) -> torch.Tensor:
        return self._empty().normal_(generator=self._generator)

    def _away_from_0(self, values: torch.Tensor) -> torch.Tensor:
        values += torch.copysign(torch.where(values.abs() < self._least, self._least, 0.0), values)
        return values


FILLS: dict[str, Callable[[_Source], torch.Tensor]] = {
    "normal": _Source.normal, "uniform": _Source.uniform, "integers": lambda source: source.between(-MOST_SMALL, MOST_SMALL),
    "wide": _Source.wide, "ones": _Source.ones, "subnormal": _Source.subnormal, "cancelling": _Source.cancelling,
}  # fmt: skip
