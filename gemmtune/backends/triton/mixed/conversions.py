"""Conversion of words to numbers: source text of functions at the start of a kernel for words.

A 16-bit float with exponent 2^e whose last significand bit counts 1 represents the integer 2^e + n for small n. The functions put
the bits of n there and subtract 2^e, which is exact. float16 has room for 8 bits of n at 2^10. bfloat16 has room for 7 at 2^7, so
the highest bit of a byte becomes a separate number. Signed numbers are first shifted by half their range, which flips one bit.
"""

from dataclasses import dataclass

import torch

from ....toolchain.render import template
from ..printer import PACKAGE, TRITON_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class WordFormat:
    """Format of a word: 4 numbers of 8 ``bits`` or 8 of 4, ``signed`` or not, to convert to ``dtype``."""

    bits: int
    signed: bool
    dtype: torch.dtype

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def order(self) -> tuple[int, ...]:
        """Memory index of the number in each place of ``numbers``. With 4 bits, one half of the word holds every other number."""
        return (0, 1, 2, 3) if self.bits == 8 else (0, 4, 1, 5, 2, 6, 3, 7)


def conversions(form: WordFormat, *, interpret: bool) -> str:
    """Return ``word_values``, ``numbers``, ``dealt``, ``fragments``, ``threads`` and ``held`` for words of this format.

    ``numbers(x, R, C)`` converts [R, C / per word] words to [R, C] numbers. ``dealt`` puts other numbers into their order.
    ``threads`` reorders [R, C] numbers so that one thread of an mma.sync fragment has those of a word. ``fragments`` does the same
    for wgmma. ``held`` waits for a sum.
    """
    values = _portable(form) if interpret else _assembly(form)
    return f"{values}\n\n{template(PACKAGE, 'mixed/numbers.jinja').render(bits=form.bits, interpret=interpret)}"


def _portable(form: WordFormat) -> str:
    """Return the functions with shifts, in the type in which the interpreter multiplies."""
    shifts = [form.bits * i for i in form.order]
    if form.signed:
        values = [f"((x << {32 - form.bits - shift}) >> {32 - form.bits}).to(tl.float32)" for shift in shifts]
    else:
        values = [f"((x >> {shift}) & {2**form.bits - 1}).to(tl.float32)" for shift in shifts]
    listed = ",\n        ".join(values)
    return f"@triton.jit\ndef word_values(x):\n    return (\n        {listed},\n    )"


def _assembly(form: WordFormat) -> str:
    count = form.per_word
    of_bytes = _bytes_to_float16 if form.dtype == torch.float16 else _bytes_to_bfloat16
    made = (of_bytes if form.bits == 8 else _nibbles)(form)
    pairs = [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(count // 2)]
    registers = ".reg .b32 t, " + ", ".join(f"p{i}" for i in range(count // 2)) + ", q0, q1;"
    lines = "\n".join(f'        "{line} "' for line in ("{ " + registers, *made, *pairs, "}"))
    constraints = ",".join(["=h"] * count + ["r"])
    types = ", ".join([TRITON_DTYPES[form.dtype]] * count)
    call = f'tl.inline_asm_elementwise(\n{lines},\n        "{constraints}", [x], dtype=({types}), is_pure=True, pack=1)'
    return f"@triton.jit\ndef word_values(x):\n    return {call}"


def _bytes_to_float16(form: WordFormat) -> list[str]:
    flip = "0x80808080" if form.signed else "0"
    bias = "0x64806480" if form.signed else "0x64006400"
    return [
        f"xor.b32 t, $4, {flip};",
        "prmt.b32 p0, t, 0x64646464, 0x4140;",
        "prmt.b32 p1, t, 0x64646464, 0x4342;",
        f"mov.b32 q0, {bias};",
        "sub.f16x2 p0, p0, q0;",
        "sub.f16x2 p1, p1, q0;",
    ]


def _bytes_to_bfloat16(form: WordFormat) -> list[str]:
    """Return code that adds the highest bit, which becomes 128 or 256 and counts −128 or 128, to 128 + the low bits."""
    lines = ["prmt.b32 p0, $4, 0x43434343, 0x4140;", "prmt.b32 p1, $4, 0x43434343, 0x4342;"]
    for pair in ("p0", "p1"):
        lines += [f"and.b32 q0, {pair}, 0xff80ff80;", f"and.b32 {pair}, {pair}, 0xff7fff7f;", "mov.b32 t, 0x3f803f80;"]
        if form.signed:
            lines += ["mov.b32 q1, 0xbf80bf80;", f"fma.rn.bf16x2 {pair}, q0, q1, {pair};"]
        else:
            lines += ["mov.b32 q1, 0xc380c380;", "fma.rn.bf16x2 q0, q0, t, q1;", f"fma.rn.bf16x2 {pair}, q0, t, {pair};"]
    return lines


def _nibbles(form: WordFormat) -> list[str]:
    """Return code for the pairs (i, i + 4) of a word's numbers, which are the same four bits of its halves."""
    x = "$8"
    half = form.dtype == torch.float16
    exponent, middle = ("6400", "6408") if half else ("4300", "4308")
    pattern = middle if form.signed else exponent
    lines = [f"mov.b32 q0, 0x{pattern}{pattern};"]
    # (word & mask) ^ q0: the pattern of the exponent and, for signed numbers, the flipped highest bit.
    if half:
        upper = "0x64806480" if form.signed else "0x64006400"
        lines += [f"shr.b32 t, {x}, 8;", f"mov.b32 q1, {upper};"]
        for pair, word in (("p0", x), ("p2", "t")):
            lines += [f"lop3.b32 {pair}, {word}, 0x000f000f, q0, 0x6a;", f"sub.f16x2 {pair}, {pair}, q0;"]
        for pair, word in (("p1", x), ("p3", "t")):
            lines.append(f"lop3.b32 {pair}, {word}, 0x00f000f0, q1, 0x6a;")
        # (1024 + 16 n) / 16 - 64, or 72 if n was shifted by 8.
        sixteenth, offset = "0x2c002c00", "0xd480d480" if form.signed else "0xd400d400"
        lines += [f"mov.b32 t, {sixteenth};", f"mov.b32 q1, {offset};"]
        return [*lines, *(f"fma.rn.f16x2 {pair}, {pair}, t, q1;" for pair in ("p1", "p3"))]
    lines.append(f"lop3.b32 p0, {x}, 0x000f000f, q0, 0x6a;")
    for i in (1, 2, 3):
        lines += [f"shr.b32 t, {x}, {4 * i};", f"lop3.b32 p{i}, t, 0x000f000f, q0, 0x6a;"]
    lines += ["mov.b32 q1, 0x3f803f80;", f"mov.b32 q0, {'0xc308c308' if form.signed else '0xc300c300'};"]
    return [*lines, *(f"fma.rn.bf16x2 p{i}, p{i}, q1, q0;" for i in range(4))]
