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

__all__ = ["KERNEL", "Source"]

KERNEL = "gemmtune_cluster"
PATIENCE = 40
FILES = (
    "cluster.cu.jinja", "device.cuh.jinja", "products.cuh.jinja", "exchange.cuh.jinja",
    "finish.cuh.jinja", "groups.cuh.jinja", "host.h.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that the text depends on. Sizes, strides, scalars and the division of K among clusters are arguments."""

    shape: Shape
    dtype: torch.dtype
    out_dtype: torch.dtype
    p_by_k: bool
    """K is the contiguous dimension of the operand that gives the tile its rows …"""
    q_by_k: bool
    """… and of the one that gives it its columns."""
    finish: Finish = field(default_factory=Finish)
    patience: int = PATIENCE
    """How often a warp looks for the sums of other clusters before it leaves its work to the last of them."""

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
    values: dict[str, object] = {
        "out_type": STORAGE_TYPES[source.out_dtype],
        "kernel": KERNEL,
        "operands": len(source.finish.operands),
        "most_operands": MOST_OPERANDS,
    }
    return _part("cluster.cu.jinja", values | _parts(source, values) | _constants(source))


def _parts(source: Source, values: dict[str, object]) -> dict[str, object]:
    """The text of each file that the kernel is put together of."""
    majors = {"p_transposed": int(not source.p_by_k), "q_transposed": int(not source.q_by_k)}
    return {
        **common_parts(fused=source.finish.fused),
        "launch": launch_text(Launch, len(source.finish.operands)),
        "device": _part("device.cuh.jinja", {"cols": source.shape.cols, "element": ELEMENTS[source.dtype], **majors}),
        "products": _part("products.cuh.jinja", {}),
        "exchange": _part("exchange.cuh.jinja", {}),
        "groups": _part("groups.cuh.jinja", {"patience": source.patience}),
        "finished": source.finish.text,
        "finish": _part("finish.cuh.jinja", values),
        "host": _part("host.h.jinja", values | {"map_type": MAP_TYPES[source.dtype]}),
    }


def _constants(source: Source) -> dict[str, object]:
    shape = source.shape
    return {
        "name": str(shape),
        "rows": shape.rows,
        "cols": shape.cols,
        "depth": shape.depth,
        "stages": shape.stages,
        "blocks": shape.blocks,
        "spread_rows": shape.spread_rows,
        "spread_cols": shape.spread_cols,
        "resident": shape.resident,
        "p_by_k": _flag(source.p_by_k),
        "q_by_k": _flag(source.q_by_k),
        "at_once": shape.at_once,
    }


def _part(name: str, values: dict[str, object]) -> str:
    return template(__package__, name).render(**values)


def _flag(value: bool) -> str:
    return "true" if value else "false"
