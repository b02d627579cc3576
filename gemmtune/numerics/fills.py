"""Random numbers of several kinds for the operands of a product, by name.

==============  ===============================================================================================================
``normal``      N(0, 1), away from subnormal numbers; integers of the whole range
``uniform``     U[0, 1), away from 0: one sign, so that rounding errors of one direction add up; integers of 0 or more
``integers``    −8 … 8
``wide``        magnitudes over many binades, small enough that no sum overflows the narrowest result; integers likewise
``ones``        1
``subnormal``   about as large as the smallest normal number: most are subnormal. Floats only
``cancelling``  K in two halves, of which the second is the first with another sign in a, and the first again in b, but for a unit
                in the last place here and there: sums over K of a and b, or of a and ones, nearly vanish
==============  ===============================================================================================================
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..errors import GemmtuneError
from ..problem import Layout
from ..problem.dtypes import dtype_info, dtype_name
from .buffers import held_size, overlapping

__all__ = ["FILLS", "Fill", "fill_named", "fills_of"]

LEAST_NORMAL = 2.0**-12
"""Random numbers keep this distance from 0, so that they and half of them are normal numbers even in float16."""
MOST_SMALL = 8
"""Exact in every dtype."""
_BINADES: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (-40, 20),
    torch.float32: (-20, 10),
    torch.bfloat16: (-20, 10),
    torch.float16: (-12, 0),
    torch.float8_e4m3fn: (-5, 3),
    torch.float8_e5m2: (-12, 3),
}
"""Exponents by which ``wide`` multiplies N(0, 1). With random signs, sums of 2^20 such products stay finite in a float16 result
of 16- or 8-bit inputs."""


class Fill(Protocol):
    """Makes as many numbers as ``held_size(layout)`` says, values of ``layout.dtype`` or close to such.

    ``k_dim`` is the dimension that is summed: -1 for a, -2 for b.
    """

    def __call__(self, layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor: ...


def fills_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The names of the fills that there are for a dtype."""
    return tuple(name for name in FILLS if name != "subnormal" or not dtype_info(dtype).is_integer)


def fill_named(name: str, dtype: torch.dtype) -> Fill:
    """The fill of that name. Raises GemmtuneError where ``dtype`` has no such numbers, or nothing has that name."""
    if name not in fills_of(dtype):
        raise GemmtuneError(f"fill: got {name!r}, expected for {dtype_name(dtype)} one of {', '.join(fills_of(dtype))}")
    return FILLS[name]


def _normal(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    if dtype_info(layout.dtype).is_integer:
        bounds = torch.iinfo(layout.dtype)
        return _drawn(layout, generator, device, bounds.min, bounds.max)
    return _away_from_0(_standard(layout, generator, device), layout.dtype)


def _uniform(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    if dtype_info(layout.dtype).is_integer:
        return _drawn(layout, generator, device, 0, torch.iinfo(layout.dtype).max)
    values = torch.empty(held_size(layout), dtype=_wide_enough(layout.dtype), device=device)
    return values.uniform_(generator=generator).clamp_(min=_least(layout.dtype))


def _integers(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    return _drawn(layout, generator, device, -MOST_SMALL, MOST_SMALL)


def _wide(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    if dtype_info(layout.dtype).is_integer:
        bits = torch.iinfo(layout.dtype).bits - 1
        exponents = torch.empty(held_size(layout), device=device).uniform_(0, bits, generator=generator)
        signs = _drawn(layout, generator, device, 0, 1) * 2 - 1
        return torch.exp2(exponents).to(layout.dtype) * signs
    low, high = _BINADES[layout.dtype]
    values = _standard(layout, generator, device)
    exponents = torch.randint(low, high + 1, values.shape, generator=generator, dtype=values.dtype, device=device)
    return _away_from_0(values * torch.exp2(exponents), layout.dtype)


def _ones(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    return torch.ones(held_size(layout), device=device)


def _subnormal(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:  # noqa: ARG001
    return _standard(layout, generator, device).double() * dtype_info(layout.dtype).smallest_normal


def _cancelling(layout: Layout, generator: torch.Generator, device: torch.device, k_dim: int) -> torch.Tensor:
    """The same as ``normal`` where the layout has not two elements along K to choose."""
    values = _normal(layout, generator, device, k_dim)
    if overlapping(layout) or values.shape[k_dim] < 2:
        return values
    info, half = dtype_info(layout.dtype), values.shape[k_dim] // 2
    values = values.to(layout.dtype).to(_wide_enough(layout.dtype))
    first, second = values.narrow(k_dim, 0, half), values.narrow(k_dim, half, half)
    moved = torch.randint(0, 2, first.shape, generator=generator, dtype=values.dtype, device=device)
    again = first - moved * first.sign() if info.is_integer else first * (1 + moved * 2 * info.unit_roundoff)
    second.copy_(-again if k_dim == -1 else again)
    if info.is_integer:
        second.clamp_(-info.largest, info.largest)
    values.narrow(k_dim, 2 * half, values.shape[k_dim] - 2 * half).zero_()
    return values


FILLS: dict[str, Fill] = {
    "normal": _normal, "uniform": _uniform, "integers": _integers, "wide": _wide, "ones": _ones, "subnormal": _subnormal,
    "cancelling": _cancelling,
}  # fmt: skip


def _wide_enough(dtype: torch.dtype) -> torch.dtype:
    """A dtype with all values of ``dtype`` in which torch draws and computes everywhere."""
    if dtype_info(dtype).is_integer:
        return torch.int32
    return torch.float64 if dtype == torch.float64 else torch.float32


def _standard(layout: Layout, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    values = torch.empty(held_size(layout), dtype=_wide_enough(layout.dtype), device=device)
    return values.normal_(generator=generator)


def _drawn(layout: Layout, generator: torch.Generator, device: torch.device, low: int, high: int) -> torch.Tensor:
    dtype = _wide_enough(layout.dtype)
    return torch.randint(low, high + 1, held_size(layout), generator=generator, dtype=dtype, device=device)


def _least(dtype: torch.dtype) -> float:
    return max(LEAST_NORMAL, dtype_info(dtype).smallest_normal)


def _away_from_0(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    least = _least(dtype)
    values += torch.copysign(torch.where(values.abs() < least, least, 0.0), values)
    return values
