"""The text of the kernel: one translation unit with a plain C entry point."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field

import torch

from ...cpp.printer import STORAGE_TYPES
from ...launch import MOST_OPERANDS, launch_text
from ...render import template, template_digest
from ..finish import Finish
from ..parts import ELEMENTS, MAP_TYPES, common_parts
from .configs import Shape
from .launch import Launch

__all__ = ["KERNEL", "PAD", "Source"]

KERNEL = "gemmtune_unaligned"
PAD = "gemmtune_unaligned_pad"
FILES = (
    "unaligned.cu.jinja", "device.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja", "store.cuh.jinja", "pad.cuh.jinja",
    "host.h.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that the text depends on. Sizes, strides, scalars, and how far lines are from aligned addresses, are arguments."""

    shape: Shape
    dtype: torch.dtype
    out_dtype: torch.dtype
    p_by_k: bool
    """K is the contiguous dimension of the operand that gives the tile its rows, and is shifted …"""
    q_by_k: bool
    """… and of the one that gives it its columns."""
    turned: bool
    """Columns of the result, as the kernel sees it, are contiguous."""
    finish: Finish = field(default_factory=Finish)

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
    # Of what is fused, its text: the sizes of an epilogue's operands are in its graph, and change nothing.
    bare = dataclasses.replace(source, finish=Finish())
    parts = f"{made_of} {bare} {common_parts()} {source.finish.text} {launch_text(Launch, 0)}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    return _part("unaligned.cu.jinja", _constants(source) | _parts(source))


def _parts(source: Source) -> dict[str, object]:
    """The text of each file that the kernel is put together of."""
    values: dict[str, object] = {"kernel": KERNEL, "pad_kernel": PAD, "out_type": STORAGE_TYPES[source.out_dtype]}
    device = {"cols": source.shape.cols, "element": ELEMENTS[source.dtype], "q_transposed": int(not source.q_by_k)}
    host = values | {"operands": len(source.finish.operands), "map_type": MAP_TYPES[source.dtype]}
    return {
        **values,
        **common_parts(fused=source.finish.fused),
        "launch": launch_text(Launch, len(source.finish.operands)),
        "finished": source.finish.text,
        "device": _part("device.cuh.jinja", device),
        "copies": _part("copies.cuh.jinja", {}),
        "sums": _part("sums.cuh.jinja", {}),
        "store": _part("store.cuh.jinja", values | {"fused": source.finish.fused}),
        "pad": _part("pad.cuh.jinja", values),
        "host": _part("host.h.jinja", host),
    }


def _constants(source: Source) -> dict[str, object]:
    shape = source.shape
    return {
        "name": str(shape),
        "rows": shape.rows,
        "cols": shape.cols,
        "stages": shape.stages(p_by_k=source.p_by_k),
        "threads": shape.threads,
        "cluster": shape.cluster,
        "shifts_registers": _flag(shape.shifts_registers),
        "p_by_k": _flag(source.p_by_k),
        "q_by_k": _flag(source.q_by_k),
        "turned": _flag(source.turned),
        "fused": _flag(source.finish.fused),
        "most_operands": MOST_OPERANDS,
    }


def _part(name: str, values: dict[str, object]) -> str:
    return template(__package__, name).render(**values)


def _flag(value: bool) -> str:
    return "true" if value else "false"
