"""The text of a kernel: one translation unit with a plain C entry point, put together of parts that are templates."""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...toolchain.launch import MOST_OPERANDS, Launch, launch_text
from ...toolchain.render import template, template_digest
from .parts import common_parts

__all__ = ["KernelSource", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Everything that the text depends on. Sizes, strides and scalars are arguments of the kernel."""

    PACKAGE: ClassVar[str]
    """Where its templates are."""
    FILES: ClassVar[tuple[str, ...]]
    """The translation unit, and then its parts, ``name.*.jinja`` each."""
    LAUNCH: ClassVar[type[Launch]]

    @property
    @abstractmethod
    def values(self) -> dict[str, object]:
        """What the templates are given."""

    @property
    @abstractmethod
    def passed(self) -> int:
        """Operands of a call beside a and b."""

    @property
    @abstractmethod
    def fused(self) -> bool:
        """More than the bare product is stored."""

    @property
    @abstractmethod
    def made_of(self) -> str:
        """Of what the digest is taken, beside the templates: equal where the text is."""

    @property
    def shared(self) -> dict[str, str]:
        """Parts that it has in common with some other kernels."""
        return {}

    @property
    def parts(self) -> dict[str, str]:
        """The text of each part: those of every kernel, those of some, and its own."""
        common = {**common_parts(fused=self.fused), "launch": launch_text(self.LAUNCH, self.passed)}
        return common | self.shared | {name.split(".")[0]: self.part(self.PACKAGE, name) for name in self.FILES[1:]}

    def part(self, package: str, name: str) -> str:
        """The text of a template."""
        return template(package, name).render(most_operands=MOST_OPERANDS, **self.values)

    def put_together(self, parts: Mapping[str, str]) -> str:
        """The source whose parts these are."""
        return template(self.PACKAGE, self.FILES[0]).render(most_operands=MOST_OPERANDS, **{**self.values, **parts})

    @property
    def text(self) -> str:
        """The CUDA C++ source."""
        return _text(self)

    @property
    def digest(self) -> str:
        """A hash over everything that makes the text: the templates and what they are given. Rendering takes longer."""
        return _digest(self)


@functools.lru_cache(maxsize=1024)
def _text(source: KernelSource) -> str:
    return source.put_together(source.parts)


@functools.lru_cache(maxsize=4096)
def _digest(source: KernelSource) -> str:
    templates = [template_digest(source.PACKAGE, file) for file in source.FILES]
    made_of = f"{templates} {common_parts()} {launch_text(source.LAUNCH, 0)} {source.made_of}"
    return hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()


def flag(value: bool) -> str:
    """In C++."""
    return "true" if value else "false"
