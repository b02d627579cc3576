"""The arguments of a kernel, and a kernel as source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SIGNATURE_DTYPES", "Argument", "Source"]

SIGNATURE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
"""torch dtype to its name in a kernel signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a kernel.

    ``source`` says where its value comes from at launch: ``("pointer", "a")``, ``("size", 1)``: M, ``("stride", "b", 2)``,
    ``("scalar", "alpha")``, ``("runtime", "group_m")``; ``("descriptor", "a")`` is a tensor descriptor, which is made of a pointer,
    sizes and strides at launch. ``divisor`` is what the value (of a pointer: the address) divides by.
    """

    name: str
    type: str
    source: tuple[Any, ...]
    divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rendered kernel: the text of its module, the name of the function in it, and its arguments in order."""

    text: str
    function: str
    arguments: tuple[Argument, ...]
