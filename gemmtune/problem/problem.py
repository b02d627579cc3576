"""The Problem: the description of a GEMM as a frozen, hashable value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .constructors import Constructors
from .contiguous import BiasShape
from .fields import ProblemFields, ScalarClass, scalar_class
from .forms import describe, fields_of, plain
from .layout import COLUMN_ROLES
from .operations import OPTIONS, ROLES
from .rules import check
from .scales import Scales, WeightScales

__all__ = ["BiasShape", "Problem", "ScalarClass", "Scales", "WeightScales", "scalar_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(ProblemFields, Constructors):
    """The problem out = epilogue(alpha · a @ b + beta · inp).

    Scales, if given, turn a into (a · scale_a) and b into ((b − zero_b) · scale_b).

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N], ``out`` is [M, N] or [B, M, N]. All have one float dtype, except
    that a cast at the end of the epilogue sets the dtype of ``out``. ``inp`` is the added operand of addmm and baddbmm, in the
    caller's shape, and broadcasts to ``out``. Other operations have None. If ``beta`` is zero, ``inp`` is never read.

    mm_plus_mm is epilogue(a @ b + c @ d) with ``c`` [M, K2] and ``d`` [K2, N] of the dtype of a.

    int_mm has int8 a and b and int32 out. It is exact while sums fit int32, which holds for K below 2^17. An epilogue receives the
    sum as float32, and out is then float32, float16 or bfloat16.

    scaled_mm has a and b of float8_e4m3fn, float8_e5m2 or their fnuz forms; the two dtypes may differ. out is float32, float16 or
    bfloat16. ``scale_a`` and ``scale_b`` are float32, and their shapes determine the blocks that they cover (``problem.scales``).

    mixed_mm has a and out of float32, float16 or bfloat16 and b of int8, uint8 or an 8-bit float. With an ``encoding``, b is
    uint8 [K/2, N]. Each byte then holds rows 2i (low four bits) and 2i + 1 of a column as ``int4`` (two's complement) or ``uint4``.
    ``scale_b`` and ``zero_b`` are float32 or of a's dtype. They cover the whole of b, a column, or 32, 64 or 128 elements along K
    of a column. Both, or ``zero_b`` alone, may be missing. A kernel may round (b − zero_b) · scale_b to the dtype of a.

    These four take no alpha, beta or inp.

    bsr_mm and bsr_addmm are a @ b and alpha · a @ b + beta · inp for the transpose b of a block-sparse weight [N, K], whose class
    is ``sparsity``. bsr_mm also accepts int8 a and b; its out is then that of int_mm.

    The stride of a dimension of size 1 is arbitrary in torch. A Problem replaces it (``Layout.settled``), so that equal products
    are equal Problems.

    Raises:
        InvalidProblemError: the layouts do not fit together.
    """

    def __post_init__(self) -> None:
        for name, layout in (("out", self.out), *self.operands):
            object.__setattr__(self, name, layout.settled(columns=name in COLUMN_ROLES))
        if self.epilogue is not None and self.epilogue.operands:
            operands = tuple(layout.settled() for layout in self.epilogue.operands)
            object.__setattr__(self, "epilogue", replace(self.epilogue, operands=operands))
        check(self)
        self._derive()

    @property
    def key(self) -> str:
        """A canonical JSON text, equal exactly for equal problems: the problem's part of a store key."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON with every fact that a choice may depend on. M, N, K and batch are for human readers."""
        row = self.operation
        own = {operand.role for operand in row.operands} | set(row.options) | {"inp"}
        data = {name: value for name, value in plain(self).items() if name in own or name not in (*ROLES, *OPTIONS)}
        sizes = {"batch": self.batch, "m": self.m, "n": self.n, "k": self.k}
        return data | sizes | ({"k2": self.k2} if "c" in own else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Problem":
        """Return the Problem that ``to_json`` describes. Drop fields of another version if they are empty (None, False, "").

        Raises:
            InvalidProblemError: a field that is not empty is unknown to this version.
            KeyError, TypeError, ValueError: the data does not describe a problem.
        """
        return cls(**fields_of(data))

    def __str__(self) -> str:
        return describe(self)
