"""What options and entries of files say of a problem: names into a Problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch

from ..dispatch.fused import BROUGHT, NAMES, bias_epilogue, factor_dtype, factor_epilogue
from ..errors import InvalidProblemError
from ..problem import Layout, Precision, Problem, precision_of
from ..problem.dtypes import FLOAT8, dtype_name, parse_dtype
from ..problem.operations import FLOAT_OPS, Operation
from ..problem.problem import Scales, WeightScales
from .words import ENCODINGS, OPS, RESULT_DTYPES

__all__ = ["TF32_ON_CPU", "Spec"]

TF32_ON_CPU = "tf32 is a precision of CUDA devices; use --device cuda, or float32"
_NARROW = (torch.int8, torch.uint8, *FLOAT8)
_DEFAULT_DTYPES = {name: dtype_name(row.operands[0].dtypes[0]) for name, row in NAMES.items() if row.integers or row.float8}


def _is_factor(name: str) -> bool:
    """The operation takes a factor, whose kind the option for scales says."""
    return name in BROUGHT and BROUGHT[name].required


def _names(has: Callable[[str, Operation], object]) -> tuple[str, ...]:
    return tuple(name for name, row in NAMES.items() if has(name, row))


_TAKERS: dict[str, tuple[str, ...]] = {
    "bias": _names(lambda name, row: row.operand("inp") or (name in BROUGHT and not _is_factor(name))),
    "alpha": _names(lambda _, row: "alpha" in row.scalars),
    "beta": _names(lambda _, row: "beta" in row.scalars),
    "k2": _names(lambda _, row: row.second == "K2"),
    "prepacked": _names(lambda _, row: row.prepacks),
    "dtype_b": _names(lambda _, row: row.widens_b or row.float8),
    "encoding": _names(lambda _, row: "encoding" in row.options),
    "scales": _names(lambda name, row: row.operand("scale_b") or _is_factor(name)),
    "zeros": _names(lambda _, row: row.operand("zero_b")),
    "scale_dtype": _names(lambda name, row: row.widens_b or _is_factor(name)),
    "out_dtype": _names(lambda name, _: name in BROUGHT),
    "fast_accum": _names(lambda _, row: "fast_accum" in row.options),
}
"""Options that only some operations take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the options say of every shape; a shape adds its sizes. None means: as the shape or the operation suggests."""

    op: str | None = None
    dtype: str | None = None
    layout: str = "nt"
    bias: str | None = None
    alpha: float = 1.0
    beta: float | None = None
    prepacked: bool = False
    dtype_b: str | None = None
    encoding: str | None = None
    scales: str | None = None
    zeros: bool = False
    scale_dtype: str | None = None
    out_dtype: str | None = None
    fast_accum: bool = False
    k2: int | None = None
    device_type: str = "cpu"

    def problem(self, sizes: Sequence[int], where: str) -> Problem:
        """The problem of sizes (M, N, K) or (B, M, N, K); ``where`` begins the message of an error.

        Raises:
            InvalidProblemError: the sizes and the options do not make one problem.
        """
        try:
            return self._problem(sizes)
        except InvalidProblemError as error:
            raise InvalidProblemError(f"{where}: {error}") from error

    def _problem(self, sizes: Sequence[int]) -> Problem:
        batched = len(sizes) == 4
        op = self.op or self._implied_op(batched)
        if op not in OPS:
            raise InvalidProblemError(f"op: got {op!r}, expected one of {', '.join(OPS)}")
        row = NAMES[op]
        if row.batched != batched:
            form = "BxMxNxK" if row.batched else "MxNxK"
            raise InvalidProblemError(f"got {len(sizes)} sizes for {op}, expected {form}")
        self._refuse_what_is_not_for(op)
        common = {"layout": self.layout, "device_type": self.device_type}
        if row.integers:
            return self._int_mm(op, sizes, common)
        if row.widens_b:
            return self._mixed_mm(sizes, common)
        if row.float8:
            return self._scaled_mm(sizes, common)
        return self._dense(op, sizes, common | self._dense_dtype(op))

    def _implied_op(self, batched: bool) -> str:
        added = self.bias is not None or self.alpha != 1 or self.beta is not None
        return {(False, False): "mm", (False, True): "addmm", (True, False): "bmm", (True, True): "baddbmm"}[batched, added]

    def _refuse_what_is_not_for(self, op: str) -> None:
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name, takers in _TAKERS.items():
            if op not in takers and getattr(self, name) != usual[name]:
                raise InvalidProblemError(f"{name}: not for {op}, expected {_listed(takers)}")

    def _dense_dtype(self, op: str) -> dict[str, Any]:
        """The dtype of a and its precision, which tf32 is a name for."""
        name = self.dtype or "bfloat16"
        if name == "tf32":
            if self.device_type != "cuda":
                raise InvalidProblemError(TF32_ON_CPU)
            return {"dtype": torch.float32, "precision": Precision(input_mode="tf32")}
        if op not in FLOAT_OPS and name not in RESULT_DTYPES:
            raise InvalidProblemError(f"dtype: got {name!r} for {op}, expected one of float32, tf32, float16, bfloat16")
        dtype = parse_dtype(name)
        return {"dtype": dtype, "precision": precision_of(dtype, self.device_type)}

    def _dense(self, op: str, sizes: Sequence[int], options: dict[str, Any]) -> Problem:
        row = NAMES[op]
        if row.scalars:
            options |= {"alpha": self.alpha, "beta": 1.0 if self.beta is None else self.beta}
            options |= {"bias": self.bias} if self.bias is not None else {}
        if row.second == "K2":
            options["k2"] = self.k2
        if row.prepacks:
            options["prepacked"] = self.prepacked
        return cast(Problem, getattr(Problem, op)(*sizes, **options))

    def _int_mm(self, op: str, sizes: Sequence[int], common: dict[str, Any]) -> Problem:
        self._narrow_dtype(op, (torch.int8,))
        m, n, _ = sizes
        problem = dataclasses.replace(Problem.int_mm(*sizes, **common), prepacked=self.prepacked)
        if not _is_factor(op):
            return problem
        shapes: dict[str, tuple[int, ...]] = {"tensor": (), "row": (m, 1), "column": (n,)}
        shape = shapes[_one_of("scales", self.scales or "column", shapes)]
        scale = parse_dtype(self.scale_dtype or "float32")
        promoted = factor_dtype(scale)
        out = parse_dtype(self.out_dtype) if self.out_dtype else promoted
        return dataclasses.replace(problem, epilogue=factor_epilogue(shape, scale), out=Layout.contiguous((m, n), out))

    def _mixed_mm(self, sizes: Sequence[int], common: dict[str, Any]) -> Problem:
        weights = _narrow(self.dtype_b or ("uint8" if self.encoding else "int8"), _NARROW, "dtype_b")
        if self.encoding and weights != torch.uint8:
            raise InvalidProblemError(f"dtype_b: got {self.dtype_b!r} with encoding {self.encoding}, expected uint8 or nothing")
        problem = Problem.mixed_mm(
            *sizes,
            dtype_b=weights,
            encoding=_one_of("encoding", self.encoding or "", ("", *ENCODINGS)),  # type: ignore[arg-type]
            scales=_one_of("scales", self.scales or "none", get_args(WeightScales)),  # type: ignore[arg-type]
            zeros=self.zeros,
            scale_dtype=parse_dtype(self.scale_dtype) if self.scale_dtype else None,
            **(common | self._dense_dtype("mixed_mm")),
        )
        return dataclasses.replace(problem, prepacked=self.prepacked)

    def _scaled_mm(self, sizes: Sequence[int], common: dict[str, Any]) -> Problem:
        m, n, _ = sizes
        dtype = self._narrow_dtype("scaled_mm", FLOAT8)
        out = parse_dtype(self.out_dtype or "bfloat16")
        problem = Problem.scaled_mm(
            *sizes,
            dtype=dtype,
            dtype_b=_narrow(self.dtype_b, FLOAT8, "dtype_b") if self.dtype_b else None,
            out_dtype=out,
            scales=_one_of("scales", self.scales or "tensor", get_args(Scales)),  # type: ignore[arg-type]
            fast_accum=self.fast_accum,
            **common,
        )
        epilogue = None
        if self.bias is not None:
            shapes: dict[str, tuple[int, ...]] = {"n": (n,), "mn": (m, n), "m1": (m, 1), "1n": (1, n), "scalar": ()}
            epilogue = bias_epilogue(shapes[_one_of("bias", self.bias, shapes)], out)
        return dataclasses.replace(problem, epilogue=epilogue, prepacked=self.prepacked)

    def _narrow_dtype(self, op: str, legal: Sequence[torch.dtype]) -> torch.dtype:
        return _narrow(self.dtype or _DEFAULT_DTYPES[op], legal, f"dtype of {op}")


def _narrow(name: str, legal: Sequence[torch.dtype], what: str) -> torch.dtype:
    names = {dtype_name(dtype): dtype for dtype in legal}
    return names[_one_of(what, name, names)]


def _one_of(what: str, value: str, legal: Sequence[str] | dict[str, Any]) -> str:
    if value not in legal:
        raise InvalidProblemError(f"{what}: got {value!r}, expected {_listed([name for name in legal if name])}")
    return value


def _listed(names: Sequence[str]) -> str:
    return f"{'one of ' * (len(names) > 1)}{', '.join(names)}"
