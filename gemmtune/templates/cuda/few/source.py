"""The text of the kernel: one translation unit with a plain C entry point."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....problem import Epilogue
from ...cpp.printer import STORAGE_TYPES, print_epilogue
from ...launch import MOST_OPERANDS, launch_text
from ...render import template, template_digest
from ..parts import ELEMENTS, MAP_TYPES, common_parts
from .configs import Factor, Shape, Weights
from .launch import Launch

__all__ = ["KERNEL", "Source", "parts_of", "put_together"]

KERNEL = "gemmtune_few"
FILES = (
    "few.cu.jinja", "device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja",
    "finish.cuh.jinja", "host.h.jinja",
)  # fmt: skip
MOST_SHARED_BYTES = 227 * 1024
"""Of a block."""
PROMOTION = 256
"""Bytes that L2 asks of memory for a line that it misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that the text depends on. Sizes, strides and the division of K among blocks are arguments."""

    shape: Shape
    weights: Weights
    dtype: torch.dtype
    """Of a."""
    out_dtype: torch.dtype
    epilogue: Epilogue | None = None
    """The graph; of its operands only the dtypes matter."""
    operands: tuple[torch.dtype, ...] = ()
    """Of the epilogue's operands."""

    @property
    def factors(self) -> dict[str, Factor]:
        """Scale and zero point, as far as they are given, in the order in which a launch has them."""
        both = {"scale": self.weights.scale, "zero": self.weights.zero}
        return {name: factor for name, factor in both.items() if factor is not None}

    @property
    def text(self) -> str:
        """The CUDA C++ source."""
        return _render(self)

    @property
    def digest(self) -> str:
        """A hash over everything that makes the text: the templates and what they are given."""
        return _digest(self)


@functools.lru_cache(maxsize=4096)
def _digest(source: Source) -> str:
    made_of = [template_digest(__package__, file) for file in FILES]
    parts = f"{made_of} {source} {common_parts()} {_statements(source)} {launch_text(Launch, 0)} {PROMOTION} {MOST_SHARED_BYTES}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def _statements(source: Source) -> list[str]:
    if source.epilogue is None:
        return []
    return print_epilogue(source.epilogue, "acc", [f"x{i}" for i in range(len(source.operands))], "result")


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    return put_together(source, parts_of(source))


def put_together(source: Source, parts: Mapping[str, str]) -> str:
    """The source whose parts these are."""
    return _part("few.cu.jinja", {**_values(source), **parts})


def parts_of(source: Source) -> dict[str, str]:
    """The text of each file that the kernel is put together of."""
    values = _values(source)
    names = {"device": "cuh", "numbers": "cuh", "copies": "cuh", "sums": "cuh", "finish": "cuh", "host": "h"}
    parts = {name: _part(f"{name}.{suffix}.jinja", values) for name, suffix in names.items()}
    launch = launch_text(Launch, len(source.factors) + len(source.operands))
    return {**parts, **common_parts(fused=source.epilogue is not None), "launch": launch}


def _values(source: Source) -> dict[str, object]:
    shape, weights, factors = source.shape, source.weights, source.factors
    return {
        "name": f"i{weights.bits}_{shape.label(weights)}",
        "kernel": KERNEL,
        "most_operands": MOST_OPERANDS,
        "bits": weights.bits,
        "signed": weights.signed,
        "zero": weights.zero is not None,
        "element": ELEMENTS[source.dtype],
        "map_type": MAP_TYPES[source.dtype],
        "out_type": STORAGE_TYPES[source.out_dtype],
        "eights": shape.eights,
        "cols": shape.cols,
        "stages": shape.stages,
        "warps_n": shape.warps_n,
        "warps_k": shape.warps_k,
        "resident": shape.resident(weights),
        "promotion": PROMOTION,
        "most_shared": MOST_SHARED_BYTES,
        "along_k": [name for name, factor in factors.items() if factor.group],
        "groups": {name: factor.group for name, factor in factors.items()},
        "types": {name: STORAGE_TYPES[factor.dtype] for name, factor in factors.items()},
        "map_types": {name: MAP_TYPES[factor.dtype] for name, factor in factors.items()},
        "places": {name: place for place, name in enumerate(factors)},
        "first_operand": len(factors),
        "count": len(factors) + len(source.operands),
        "operands": [STORAGE_TYPES[dtype] for dtype in source.operands],
        "statements": _statements(source),
    }


def _part(name: str, values: Mapping[str, object]) -> str:
    return template(__package__, name).render(**values)
