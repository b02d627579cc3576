"""Options that describe a product: the source for the command line, files of shapes and ``Spec``. Help needs no torch."""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ..operand_kinds import full_dtype_name
from . import words
from .sections import GEMM, SharedOption


class FiniteRange(click.FloatRange):
    """Range of numbers, in which neither NaN nor infinity lies."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail as click does."""
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of value: its type on the command line, and the check of a value in a file of shapes."""

    expected: str
    check: Callable[[Any], bool]
    type: click.ParamType[Any] | type | None = None
    """None for a flag."""


class _Dtype(click.Choice[str]):
    """Name of a dtype, such as bfloat16 or bf16. Four-bit numbers are an encoding instead."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in words.ENCODINGS:
            self.fail(f"got {value!r}, which is a way to pack b and not a dtype; give --encoding {value}", param, ctx)
        return super().convert(full_dtype_name(value), param, ctx)


def _one_of(*legal: str) -> Kind:
    return Kind(type=click.Choice(legal), check=legal.__contains__, expected=f"one of {', '.join(legal)}")


def _dtype_of(*legal: str, hint: str = "") -> Kind:
    def check(value: Any) -> bool:
        return isinstance(value, str) and full_dtype_name(value) in legal

    return Kind(type=_Dtype(legal), check=check, expected=f"one of {', '.join(legal)}{hint}")


_TEXT = 'a side such as 64, or rows and columns such as "64x32"'
_FLAG = Kind(expected="true or false", check=lambda x: isinstance(x, bool))
_NUMBER = Kind(expected="a number", check=lambda x: type(x) in (int, float), type=float)
_SHARE = Kind(expected="a number from 0 to 1", check=lambda x: _NUMBER.check(x) and 0 <= x <= 1, type=FiniteRange(0, 1))
WHOLE = Kind(expected="a whole number", check=lambda x: type(x) is int and x >= 0, type=click.IntRange(min=0))
_COUNT = Kind(expected="a whole number from 1 on", check=lambda x: type(x) is int and x >= 1, type=click.IntRange(1))
_BLOCK = Kind(expected=_TEXT, check=lambda x: re.fullmatch(r"\d{1,18}(x\d{1,18})?", str(x)) is not None, type=str)
_HINT = "; four bits are an encoding, int4 or uint4"
_DTYPE_OF_B = _dtype_of(*words.B_DTYPES, hint=_HINT)
_RESULT = _dtype_of(*words.RESULT_DTYPES)


def _option(kind: Kind, text: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that carries its option."""
    default = False if kind is _FLAG else default
    return dataclasses.field(default=default, metadata={"kind": kind, "click": {"help": text, "default": default} | more})


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Options that apply to every shape, which adds its sizes. None selects the default of the shape or the operation."""

    op: str | None = _option(_one_of(*words.OPS), "Operation; by default mm, or bmm for BxMxNxK.")
    dtype: str | None = _option(
        _dtype_of(*words.DTYPES),
        "Dtype of a, and of a dense b; by default bfloat16, int8 for int_mm and float8_e4m3fn for scaled_mm.",
    )
    layout: str = _option(
        _one_of(*words.LAYOUTS), default="nt", show_default=True,
        text="BLAS letters of a and b: n is row-major, t column-major, so nt stores b like an nn.Linear weight.",
    )  # fmt: skip
    bias: str | None = _option(
        _one_of(*words.BIASES), "Shape of the added operand; makes the operation addmm or baddbmm, except for scaled_mm."
    )
    alpha: float = _option(_NUMBER, "Factor of the product (addmm, baddbmm).", default=1.0)
    beta: float | None = _option(_NUMBER, "Factor of the added operand (addmm, baddbmm).")
    k2: int | None = _option(WHOLE, "Columns of c; by default K (mm_plus_mm).")
    prepacked: bool = _option(_FLAG, "b is packed by gemmtune.prepack (not for batches).")
    dtype_b: str | None = _option(
        _DTYPE_OF_B, "Dtype of b; by default int8 (mixed_mm; uint8 with --encoding), or that of a (scaled_mm)."
    )
    encoding: str | None = _option(_one_of(*words.ENCODINGS), "b has two 4-bit numbers in each byte (mixed_mm).")
    scales: str | None = _option(
        _one_of(*words.SCALES), metavar="KIND",
        text=f"Part of an operand that shares a scale. scaled_mm:  {', '.join(words.SCALES_OF_SCALED_MM)}; mixed_mm: "
        f"{', '.join(words.SCALES_OF_WEIGHTS)}; int_mm_mul: {', '.join(words.FACTORS)}.",
    )  # fmt: skip
    zeros: bool = _option(_FLAG, "b has zero points in the shape of its scales (mixed_mm).")
    scale_dtype: str | None = _option(_RESULT, "Dtype of the scales (int_mm_mul, mixed_mm).")
    out_dtype: str | None = _option(_RESULT, "Dtype of the result (int_mm_mul, scaled_mm).")
    block: str | int | None = _option(_BLOCK, "Side of the blocks of bsr, or ROWSxCOLUMNS; by default 64 (bsr_mm).", metavar="SIDE")
    density: float | None = _option(_SHARE, "Share of the blocks that exist; by default 0.5 (bsr_mm).")
    imbalance: str | None = _option(_one_of(*words.IMBALANCES), "Spread of the blocks over rows of bsr (bsr_mm).")
    groups: int | None = _option(_COUNT, "Groups of rows, or along K; by default 8 (grouped_mm).")
    gated: str | None = _option(_one_of(*words.GATES), "Half of b's columns are gates (routed_grouped_mm).")
    tokens: int | None = _option(
        _COUNT, "Rows of a, from which an index picks M (routed_grouped_mm); rows of the sum of M rows (combined_grouped_mm)."
    )
    fast_accum: bool = _option(_FLAG, "8-bit tensor cores may keep their narrow sum (scaled_mm).")


KINDS: dict[str, Kind] = {field.name: field.metadata["kind"] for field in dataclasses.fields(Product)}
"""Options to their kinds."""


def click_options() -> list[Callable[..., Any]]:
    """Return the decorators that add the options to a command."""
    fields = [(f"--{field.name.replace('_', '-')}", field.metadata) for field in dataclasses.fields(Product)]
    shared: dict[str, Any] = {"cls": SharedOption, "section": GEMM}
    return [
        click.option(name, type=found["kind"].type, is_flag=found["kind"] is _FLAG, **shared, **found["click"])
        for name, found in fields
    ]
