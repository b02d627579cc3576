"""Products of two dtypes: the matrix instruction, and the conversion of operands on the way to LDS."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...problem.dtypes import FLOAT8, dtype_name

Element = Literal["f16", "bf16", "f32", "f8", "bf8"]
"""Element type of an instruction, by its name in CK. The 8-bit floats are those of gfx942: e4m3fnuz and e5m2fnuz."""
Change = Literal["none", "halved", "shrunk", "widened"]
"""Conversion of an operand.

``halved`` reads e4m3fn as the e4m3fnuz with the same bits, which is half the number. ``shrunk`` turns e4m3fn into float16 with 2^-8
of the number. ``widened`` turns e5m2 into float16, whose upper half it is.
"""

MFMA_K: dict[str, dict[Element, tuple[int, int]]] = {
    "gfx90a": {"f16": (8, 16), "bf16": (8, 16), "f32": (2, 4)},
    "gfx942": {"f16": (8, 16), "bf16": (8, 16), "f32": (2, 4), "f8": (16, 32), "bf8": (16, 32)},
}
"""Elements along K that the matrix instructions of 32 and of 16 rows and columns multiply, by architecture and element.

Source: v_mfma in AMD's ISA documents of CDNA 2 and CDNA 3. CDNA 2 has no instruction for 8-bit floats.
"""
_MEMORY: dict[torch.dtype, Element] = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float8_e4m3fn: "f8", torch.float8_e5m2: "bf8",
    torch.float8_e4m3fnuz: "f8", torch.float8_e5m2fnuz: "bf8",
}  # fmt: skip
"""Element type of each dtype in memory."""
DTYPES = tuple(_MEMORY)
_BYTES: dict[Element, int] = {"f16": 2, "bf16": 2, "f32": 4, "f8": 1, "bf8": 1}
_FACTORS: dict[Change, float] = {"none": 1.0, "halved": 2.0, "shrunk": 256.0, "widened": 1.0}
"""Factor by which each conversion of an operand requires the sums to be multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Product of two operands: the multiplied ``element``, also in LDS, their types in ``memory``, and the ``changes`` of each."""

    element: Element
    memory: tuple[Element, Element]
    changes: tuple[Change, Change]

    @property
    def itemsize(self) -> int:
        return _BYTES[self.element]

    @property
    def changed(self) -> bool:
        """True if registers convert numbers on the way to LDS."""
        return self.changes != ("none", "none")

    @property
    def factor(self) -> float:
        """Power of two that multiplies the sums."""
        return _FACTORS[self.changes[0]] * _FACTORS[self.changes[1]]


def product_of(a: torch.dtype, b: torch.dtype, arch: str) -> Product | str:
    """Return the product of two dtypes, or why there is none. gfx942's floats lack infinities, so e5m2 becomes float16."""
    if a not in _MEMORY or b not in _MEMORY or (a != b and not (a in FLOAT8 and b in FLOAT8)):
        pair = f"{dtype_name(a)} and {dtype_name(b)}"
        return f"a and b are {pair}, expected two equal dtypes of {', '.join(map(dtype_name, DTYPES))}, or two OCP float8 dtypes"
    memory = _MEMORY[a], _MEMORY[b]
    if a == b == torch.float8_e4m3fn:
        made = Product(element="f8", memory=memory, changes=("halved", "halved"))
    elif a in FLOAT8:
        made = Product(element="f16", memory=memory, changes=(_as_float16(a), _as_float16(b)))
    else:
        made = Product(element=memory[0], memory=memory, changes=("none", "none"))
    if any(x not in MFMA_K[arch] for x in (made.element, *memory)):
        return f"{arch} has no matrix instruction for {dtype_name(a)}"
    return made


def _as_float16(dtype: torch.dtype) -> Change:
    return "widened" if dtype == torch.float8_e5m2 else "shrunk"
