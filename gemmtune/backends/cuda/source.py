"""The text of a kernel: device code alone, put together of parts that are templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...toolchain.cubin import FLAGS
from ...toolchain.launch import MOST_OPERANDS
from ...toolchain.render import template, template_digest
from .hopper import ARCH

__all__ = ["COMMON", "ELEMENTS", "PRODUCTS", "KernelSource", "flag"]

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtypes that are multiplied, as PTX writes them."""
COMMON = tuple((__package__, name) for name in ("barriers.cuh.jinja", "pointwise.cuh.jinja", "epilogue.cuh.jinja"))
"""The parts of every kernel: PTX of barriers, clusters and overlapping launches; elements in memory; from a sum to the result."""
PRODUCTS = (__package__, "products.cuh.jinja")
"""The part that says when products of warp groups begin and end."""


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """``files`` are templates by package and name: the translation unit, and then its parts, each with the text of those before it.

    All are given ``values``, which are plain data: what the text depends on, and nothing that a launch can be told.
    """

    kernel: str
    files: tuple[tuple[str, str], ...]
    values: Mapping[str, Any]

    @property
    def parts(self) -> dict[str, str]:
        """The text of each part by its name."""
        parts: dict[str, str] = {}
        for package, name in self.files[1:]:
            parts[name.split(".")[0]] = template(package, name).render(self._given | parts)
        return parts

    def put_together(self, parts: Mapping[str, str]) -> str:
        """The source whose parts these are."""
        return template(*self.files[0]).render({**self._given, **parts})

    @property
    def text(self) -> str:
        """The CUDA C++ source."""
        return self.put_together(self.parts)

    @cached_property
    def digest(self) -> str:
        """A hash over everything that makes the cubin: the templates and what they are given. Rendering takes longer."""
        made_of = [template_digest(*file) for file in self.files] + [json.dumps(self._given, sort_keys=True), ARCH, *FLAGS]
        return hashlib.blake2b("\n".join(made_of).encode(), digest_size=16).hexdigest()

    @property
    def _given(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "most_operands": MOST_OPERANDS, **self.values}


def flag(value: bool) -> str:
    """A bool in C++."""
    return "true" if value else "false"
