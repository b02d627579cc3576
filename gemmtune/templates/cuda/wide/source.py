"""The text of the kernel: one translation unit with a plain C entry point."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...render import template, template_digest
from ..mixed import source as mixed
from .configs import Shape

__all__ = ["KERNEL", "Source", "parts_of", "put_together"]

KERNEL = "gemmtune_wide"
FILES = (
    "wide.cu.jinja", "device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja",
    "finish.cuh.jinja", "host.h.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(mixed.Source):
    """Everything that the text depends on."""

    shape: Shape

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
    return hashlib.blake2b(f"{made_of} {source.made_of}".encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    return put_together(source, parts_of(source))


def put_together(source: Source, parts: Mapping[str, str]) -> str:
    """The source whose parts these are."""
    return _part("wide.cu.jinja", {**_values(source), **parts})


def parts_of(source: Source) -> dict[str, str]:
    """The text of each file that the kernel is put together of."""
    values = _values(source)
    names = {"device": "cuh", "numbers": "cuh", "copies": "cuh", "sums": "cuh", "finish": "cuh", "host": "h"}
    parts = {name: _part(f"{name}.{suffix}.jinja", values) for name, suffix in names.items()}
    return {**parts, **mixed.parts_of(source)}


def _values(source: Source) -> dict[str, object]:
    shape, weights = source.shape, source.weights
    values = source.values
    return {
        **values,
        "name": f"i{weights.bits}_{shape.label(weights)}",
        "kernel": KERNEL,
        "rows": shape.rows,
        "groups_n": shape.groups,
        "tiles": shape.tiles,
        "line": shape.line,
        "stages": shape.stages,
        "batch": shape.batch_of(weights),
        "resident": shape.resident,
        "room": shape.room_bytes,
        "scaled": weights.scale is not None and not weights.scale.group,
        "direct": source.epilogue is None and source.out_dtype != torch.float32,
    }


def _part(name: str, values: Mapping[str, object]) -> str:
    return template(__package__, name).render(**values)
