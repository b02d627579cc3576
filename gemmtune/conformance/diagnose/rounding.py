"""Bugs of precision: an accumulator, partial sums or an epilogue step in a narrower dtype than claimed."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from ...problem.dtypes import dtype_info, dtype_name
from .evidence import Seen, View
from .match import Suspect

BLOCKS = (16, 32, 64, 128, 8, 4, 1)
"""Elements of K that are summed before the accumulator is rounded."""
SMALL_BLOCKS = (16, 8, 4, 1)
"""Blocks no longer than a window of the width probe. With longer ones only a few rows overflow, which other causes do too."""
MOST_STEPS = 512
"""Maximum roundings of a simulated accumulator."""
SPLITS = (2, 3, 4, 5, 6, 8, 16)
SPLIT_UNITS = (1, 16, 32, 64, 128)
"""Units of K. A split of K is a multiple of one of them."""
SHARE = 0.9
"""Share of the wrong elements that a simulation must reproduce. Another order within a block sometimes rounds the other way."""
TYPICAL = 1.6
"""Maximum ratio of two root mean squares for round-off of the same size."""
LEAST_ELEMENTS = 64
LEAST_TOUCHED = 0.25
"""Minimum share of elements that round-off changes."""
MOST_SMALL = 2.0**-6
"""Maximum error, relative to the magnitude of an element's terms, that counts as small."""
MOST_RELATIVE, LEAST_RARE, MOST_ALIKE = 0.1, 0.2, 0.5
"""Marks of round-off: maximum size relative to the result, minimum share of the rarer sign, maximum correlation with the result."""


def _narrower(view: View) -> tuple[torch.dtype, ...]:
    """Return the dtypes that may hold a sum by mistake. No kernel sums float16 in bfloat16, or bfloat16 in float16."""
    problem = view.problem
    if dtype_info(problem.accumulator).is_integer:
        return (torch.float32,)
    dtypes = (problem.dtype,) if problem.dtype.itemsize == 2 else (torch.float32, torch.float16, torch.bfloat16)
    roundoff = dtype_info(problem.accumulator).unit_roundoff
    return tuple(dtype for dtype in dtypes if dtype_info(dtype).unit_roundoff > roundoff > 0)


def steps(view: View) -> Iterator[Suspect]:
    """Yield suspects that round the product or the result once more, or truncate a 16-bit result."""
    out = view.problem.out.dtype
    if out.is_floating_point and out.itemsize == 2:
        yield Suspect(f"result cut off to {dtype_name(out)}, not rounded", _cut_off(view.result(), out), share=SHARE)
    for dtype in _narrower(view):
        name = dtype_name(dtype)
        if dtype_info(dtype).unit_roundoff > dtype_info(out).unit_roundoff or (dtype != out and dtype.itemsize == out.itemsize):
            yield Suspect(f"result rounded to {name}", _through(view.result(), dtype))
        if view.inp is not None or view.alpha != 1:
            yield Suspect(f"product rounded to {name} before alpha and beta", view.result(_through(view.product, dtype)))


def partials(view: View) -> Iterator[Suspect]:
    """Yield suspects that store the partial sums of K splits in a narrower dtype."""
    k = view.problem.k
    sizes = sorted({-(-k // splits // unit) * unit for splits in SPLITS for unit in SPLIT_UNITS} - {0}, reverse=True)
    sizes = [size for size in sizes if size < k]
    for dtype in _narrower(view):
        for size in sizes:
            parts = torch.stack([_through(x * view.scales, dtype) for x in _blocks(view, size)])
            text = f"{dtype_name(dtype)} partial sums of {len(parts)} K splits"
            yield Suspect(text, view.result(parts.sum(0)), len(sizes), SHARE)
            yield Suspect(text, view.result(_summed(parts, dtype)), len(sizes), SHARE)


def accumulators(view: View, blocks: tuple[int, ...] = BLOCKS) -> Iterator[Suspect]:
    """Yield suspects whose running sum is rounded to a narrower dtype after each block of K."""
    for dtype in _narrower(view):
        for block in blocks:
            if block <= view.problem.k <= block * MOST_STEPS:
                text = f"accumulation in {dtype_name(dtype)}"
                yield Suspect(text, view.result(_summed(_blocks(view, block), dtype) * view.scales), len(BLOCKS), SHARE)


def overflow(view: View) -> str:
    """Return the narrow sums whose overflow gives exactly these infinities and NaN, or an empty text.

    Infinities and NaN are too little evidence for an ordinary match. Here, the right elements must match as well.
    """
    special = ~view.got.isfinite() & view.expected.isfinite()
    if view.problem.dtype != torch.float16 or not bool(special.any()) or not bool((special == view.bad).all()):
        return ""
    for suspect in itertools.chain(accumulators(view, SMALL_BLOCKS), partials(view)):
        stored = _through(suspect.result, view.problem.out.dtype)
        if bool(((view.got == stored) | (view.got.isnan() & stored.isnan())).all()):
            return f"overflow, as of {suspect.text}"
    return ""


def round_off(view: View) -> str:
    """Return a diagnosis by the size of the errors, if no simulated order of summation gives exactly these errors.

    Round-off is everywhere, has both signs, is small and hardly correlates with the result. Its size must be that of a simulated
    accumulator.
    """
    error = view.got - view.expected
    if not _noisy(view, error):
        return ""
    best: tuple[float, str] = (math.log(TYPICAL), "")
    for dtype in _narrower(view):
        # Results of a narrow sum are themselves numbers of the narrow dtype.
        on_grid = view.inp is None and view.alpha == 1 and bool((_through(view.got, dtype) == view.got).all())
        if dtype != view.problem.out.dtype and not on_grid:
            continue
        for block in (1, 16, 64):
            if block <= view.problem.k <= block * MOST_STEPS:
                simulated = view.result(_summed(_blocks(view, block), dtype) * view.scales) - view.expected
                if not bool(simulated.isfinite().all()) or not bool(simulated.any()):
                    continue
                apart = abs(math.log(_rms(error) / _rms(simulated)))
                best = min(best, (apart, f"round-off as of accumulation in {dtype_name(dtype)}"))
    return best[1]


def few_bits(view: View) -> str:
    """Return the size of small errors in most elements, relative to the terms that are added, or an empty text."""
    added = 0.0 if view.inp is None else (view.beta * view.inp).abs()
    return small_errors(view, abs(view.alpha) * (view.a.abs() @ view.b.abs() * view.scales.abs()) + added)


def small_errors(view: Seen, magnitude: torch.Tensor) -> str:
    """Return the size of the errors relative to ``magnitude`` if most elements have one and all are small, or an empty text."""
    error = ((view.got - view.expected).abs() / magnitude)[magnitude > 0]
    most = float(error.max()) if error.numel() else math.nan
    if not 0 < most <= MOST_SMALL or float((error > 0).double().mean()) < LEAST_TOUCHED:
        return ""
    return f"small errors in most elements, up to 2^{round(math.log2(most))} of the magnitude of their terms"


def _noisy(view: View, error: torch.Tensor) -> bool:
    """Return True if the errors look like round-off of any size. Exact probes have too few different errors to tell."""
    if not bool((view.tolerance > 0).all()) or error.numel() < LEAST_ELEMENTS or not bool(error.isfinite().all()):
        return False
    touched = error[error != 0]
    if len(touched) < LEAST_TOUCHED * error.numel() or _rms(error) > MOST_RELATIVE * _rms(view.expected):
        return False
    positive = float((touched > 0).double().mean())
    alike = torch.corrcoef(torch.stack([error.flatten(), view.expected.flatten()]))[0, 1]
    return LEAST_RARE <= positive <= 1 - LEAST_RARE and not float(alike.abs()) > MOST_ALIKE


def _blocks(view: View, size: int) -> Iterator[torch.Tensor]:
    """Yield a @ b over consecutive parts of K."""
    for k in range(0, view.problem.k, size):
        yield view.a[..., k : k + size] @ view.b[:, k : k + size]


def _summed(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the running sum, rounded after each part."""
    return functools.reduce(lambda total, part: _through(total + part, dtype), parts, torch.zeros((), dtype=torch.float64))


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


def _cut_off(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a 16-bit dtype toward zero."""
    nearest = x.to(dtype)
    bits = nearest.view(torch.int16) - (nearest.double().abs() > x.abs()).to(torch.int16)
    return bits.view(dtype).double()


def _rms(x: torch.Tensor) -> float:
    """Return the root mean square of numbers that are not all 0."""
    largest = x.abs().max()
    return float(largest * (x / largest).square().mean().sqrt())


def _tf32(x: torch.Tensor, added: int) -> torch.Tensor:
    """Return float32 numbers with 11 significand bits. ``added`` is added to the 13 bits that are then dropped."""
    return ((x.float().view(torch.int32) + added) & -(2**13)).view(torch.float32).double()


_NARROWER: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("float32", functools.partial(_through, dtype=torch.float32)),
    ("tf32", lambda x: _tf32(x, 2**12)),
    ("tf32, cut off", lambda x: _tf32(x, 0)),
    ("bfloat16", functools.partial(_through, dtype=torch.bfloat16)),
    ("float16", functools.partial(_through, dtype=torch.float16)),
    ("float8_e4m3fn", functools.partial(_through, dtype=torch.float8_e4m3fn)),
    ("float8_e5m2", functools.partial(_through, dtype=torch.float8_e5m2)),
)


def narrowed(view: View) -> Iterator[Suspect]:
    """Yield suspects that round a, b or both to a dtype with fewer bits."""
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
    """Yield the suspect that reads subnormal inputs as 0."""
    least = max(dtype_info(layout.dtype).smallest_normal for layout in (view.problem.a, view.problem.b))
    if least:
        a, b = (torch.where(x.abs() < least, 0.0, x) for x in (view.a, view.b))
        yield Suspect("subnormal numbers read as 0", view.of(a, b))


def unsigned(view: View) -> Iterator[Suspect]:
    """Yield suspects that read int8 as uint8 in a, b or both."""
    if view.problem.dtype != torch.int8:
        return
    a, b = (torch.where(x < 0, x + 256, x) for x in (view.a, view.b))
    yield Suspect("a read as unsigned integers", view.of(a=a))
    yield Suspect("b read as unsigned integers", view.of(b=b))
    yield Suspect("a and b read as unsigned integers", view.of(a, b))
