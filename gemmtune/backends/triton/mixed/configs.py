"""Configs of the words template: which of its variants, and what legality and ranking need to know of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ....problem import Problem
from ....problem.dtypes import dtype_info
from ..configs import Config
from .conversions import WordFormat

__all__ = ["WordsConfig", "word_format"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsConfig(Config):
    """One instance of the words template.

    With ``swap`` weights are the rows of the product, which go through registers. With ``fragments`` a warp group multiplies, and a
    is given in the order of its registers, made by a kernel before; else single warps do. ``steps`` of the loop become one.
    """

    swap: bool = True
    fragments: bool = False
    steps: int = 1

    def __str__(self) -> str:
        # A dataclass with slots is another class than the one that super() without arguments would mean.
        text = Config.__str__(self)
        base, pdl = text.removesuffix("_pdl"), "_pdl" if self.pdl else ""
        variant = "_group" if self.fragments else "_swap" if self.swap else ""
        return base + variant + (f"_u{self.steps}" if self.steps > 1 else "") + pdl


def word_format(problem: Problem) -> WordFormat:
    """What the words of a problem's b hold."""
    bits = 4 if problem.encoding else 8
    signed = problem.encoding == "int4" if problem.encoding else dtype_info(problem.b.dtype).name == "int8"
    return WordFormat(bits=bits, signed=signed, dtype=problem.dtype)
