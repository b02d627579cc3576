"""FlagGems: Triton kernels that take the place of ATen's.

Its tuner times up to two hundred configs for each size. ``untuned`` runs one of them instead, another one for other sizes: each is
what the tuner may find to be the fastest somewhere, and it is what there is time for:

    cd examples; gemmtune conformance adapters.flag_gems_ops:untuned --max-cases 200 --max-seconds 120 -- -n 8
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import flag_gems
import torch
from flag_gems.utils.libentry import LibTuner

from gemmtune.declaration.labels import BIASES
from gemmtune.declaration.traits import Traits

__all__ = ["dense", "untuned", "with_out"]

_DTYPES = ("float32", "float16", "bfloat16")


def _baddbmm(inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    result: torch.Tensor = flag_gems.baddbmm(inp, a, b, beta=beta, alpha=alpha)
    return result


def _mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = flag_gems.mm(a, b) if out is None else flag_gems.mm_out(a, b, out=out)
    return result


def _addmm(
    inp: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    scalars = {"beta": beta, "alpha": alpha}
    result: torch.Tensor = (
        flag_gems.addmm(inp, a, b, **scalars) if out is None else flag_gems.addmm_out(inp, a, b, **scalars, out=out)
    )
    return result


def _bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = flag_gems.bmm(a, b) if out is None else flag_gems.bmm_out(a, b, out)
    return result


def _one_config(
    _: object, bench: Callable[[Any], list[float]], configs: Iterable[Any], args: tuple[Any, ...], __: object
) -> tuple[Any, dict[Any, list[float]]]:
    """A policy of FlagGems' tuner: of the configs that compile, one that the sizes and strides among ``args`` say."""
    listed = list(configs)
    start = zlib.crc32(repr([arg for arg in args if isinstance(arg, int)]).encode()) % len(listed)
    for config in listed[start:] + listed[:start]:
        times = bench(config)
        if math.isfinite(times[0]):
            return config, {config: times}
    raise RuntimeError(f"none of the {len(listed)} configs can be compiled")


@contextlib.contextmanager
def _untuned() -> Iterator[None]:
    tuner = LibTuner.get("default")
    before, tuner.policy = tuner.policy, _one_config
    try:
        yield
    finally:
        tuner.policy = before


def _without_tuning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> torch.Tensor:
        with _untuned():
            return function(*args, **keywords)

    return call


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}
_DENSE = Traits(ops=tuple(_FUNCTIONS), dtypes=_DTYPES, alpha=True, beta=True, bias=BIASES, streams=True, devices=("cuda",))
dense = SimpleNamespace(**_FUNCTIONS, gemm_traits=_DENSE)
untuned = SimpleNamespace(**{name: _without_tuning(function) for name, function in _FUNCTIONS.items()}, gemm_traits=_DENSE)
with_out = SimpleNamespace(
    mm=_mm, addmm=_addmm, bmm=_bmm,
    gemm_traits=Traits(
        ops=("mm", "addmm", "bmm"), dtypes=_DTYPES, alpha=True, beta=True, bias=BIASES, streams=True, devices=("cuda",), out=True
    ),
)  # fmt: skip
