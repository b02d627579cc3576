"""Bugs of the values that are read: inputs narrowed to a smaller dtype, subnormal ones read as 0, integers taken for unsigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...problem.dtypes import dtype_info
from .evidence import View
from .match import Suspect

__all__ = ["flushed", "narrowed", "unsigned"]


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype).double()


def _tf32(x: torch.Tensor, added: int) -> torch.Tensor:
    """11 significand bits, after adding ``added`` to the 13 that are cut off."""
    return ((x.float().view(torch.int32) + added) & -(2**13)).view(torch.float32).double()


_NARROWER: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("float32", _to(torch.float32)),
    ("tf32", lambda x: _tf32(x, 2**12)),
    ("tf32, cut off", lambda x: _tf32(x, 0)),
    ("bfloat16", _to(torch.bfloat16)),
    ("float16", _to(torch.float16)),
    ("float8_e4m3fn", _to(torch.float8_e4m3fn)),
    ("float8_e5m2", _to(torch.float8_e5m2)),
)


def narrowed(view: View) -> Iterator[Suspect]:
    """a, b or both rounded to a dtype with fewer bits."""
    if dtype_info(view.problem.dtype).is_integer:
        return
    for name, narrow in _NARROWER:
        a, b = narrow(view.a), narrow(view.b)
        yield Suspect(f"a read as {name}", view.of(a=a))
        yield Suspect(f"b read as {name}", view.of(b=b))
        yield Suspect(f"a and b read as {name}", view.of(a, b))
        if view.inp is not None:
            yield Suspect(f"added operand read as {name}", view.result(inp=narrow(view.inp)))


def flushed(view: View) -> Iterator[Suspect]:
    """Subnormal inputs read as 0."""
    least = max(dtype_info(layout.dtype).smallest_normal for layout in (view.problem.a, view.problem.b))
    if least:
        a, b = (torch.where(x.abs() < least, 0.0, x) for x in (view.a, view.b))
        yield Suspect("subnormal numbers read as 0", view.of(a, b))


def unsigned(view: View) -> Iterator[Suspect]:
    """int8 read as uint8 in a, b or both."""
    if view.problem.dtype != torch.int8:
        return
    a, b = (torch.where(x < 0, x + 256, x) for x in (view.a, view.b))
    yield Suspect("a read as unsigned integers", view.of(a=a))
    yield Suspect("b read as unsigned integers", view.of(b=b))
    yield Suspect("a and b read as unsigned integers", view.of(a, b))
