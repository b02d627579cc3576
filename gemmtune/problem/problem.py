"""The Problem: what is asked of a GEMM, as a frozen, hashable value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .constructors import Constructors
from .contiguous import BiasShape
from .fields import ProblemFields, ScalarClass, scalar_class
from .forms import describe, fields_of, plain
from .operations import OPTIONS, ROLES
from .rules import check
from .scales import Scales, WeightScales

__all__ = ["BiasShape", "Problem", "ScalarClass", "Scales", "WeightScales", "scalar_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(ProblemFields, Constructors):
    """out = epilogue(alpha · a @ b + beta · inp), a and b being (a · scale_a) and ((b − zero_b) · scale_b) where those are given

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N], ``out`` is [M, N] or [B, M, N]; all of one float dtype, except that
    ``out`` may differ where the epilogue ends in a cast. ``inp`` is the added operand with the shape that the caller gave it; it
    broadcasts to ``out`` and is None but for addmm and baddbmm. With ``beta`` zero, ``inp`` is never read.

    mm_plus_mm is epilogue(a @ b + c @ d) with ``c`` [M, K2] and ``d`` [K2, N] of the dtype of a.

    int_mm has a and b of int8 and out of int32, exact while sums fit that, as they do for K below 2^17; an epilogue gets the sum as
    float32, and out is then of float32, float16 or bfloat16.

    scaled_mm has a and b of float8_e4m3fn, float8_e5m2 or their fnuz forms, each its own, and out of float32, float16 or bfloat16.
    ``scale_a`` and ``scale_b`` are float32, each for the blocks that its shape tells (``problem.scales``).

    mixed_mm has a and out of float32, float16 or bfloat16 and b of int8, uint8 or an 8-bit float, or with an ``encoding`` of
    uint8 [K/2, N], each holding rows 2i (low four bits) and 2i + 1 of a column as ``int4`` (two's complement) or ``uint4``.
    ``scale_b`` and ``zero_b`` (or neither, or the first alone) are float32 or of a's dtype, for everything, a column, or 32, 64 or
    128 elements along K of a column. A kernel may round (b − zero_b) · scale_b to the dtype of a.

    These four take no alpha, beta or inp.

    bsr_mm and bsr_addmm are a @ b and alpha · a @ b + beta · inp for the transpose b of a block-sparse weight [N, K], whose class
    is ``sparsity``; of bsr_mm a and b may be int8, and out is then as for int_mm.

    Raises:
        InvalidProblemError: the layouts do not fit together.
    """

    def __post_init__(self) -> None:
        check(self)

    @property
    def key(self) -> str:
        """A canonical JSON text, equal exactly for equal problems: the problem's part of a store key."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, with nothing left out that the choice may depend on; M, N, K and batch stand in clear."""
        row = self.operation
        own = {operand.role for operand in row.operands} | set(row.options) | {"inp"}
        data = {name: value for name, value in plain(self).items() if name in own or name not in (*ROLES, *OPTIONS)}
        sizes = {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}
        return data | sizes | ({"k2": self.k2} if "c" in own else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The inverse of ``to_json``. A field of another version is left out where it says nothing (None, False, "").

        Raises:
            InvalidProblemError: a field that says something is unknown here.
            KeyError, TypeError, ValueError: the data is no problem's.
        """
        return cls(**fields_of(data))

    def __str__(self) -> str:
        return describe(self)
