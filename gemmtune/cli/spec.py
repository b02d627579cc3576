"""Conversion of options and file entries to a Problem."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import InvalidProblemError, raised_as
from ..operand_kinds import full_dtype_name
from ..problem import Layout, Precision, Problem
from ..problem.contiguous import BiasShape, inp_layout
from ..problem.dtypes import dtype_name, parse_dtype
from ..problem.fused import BROUGHT, NAMES, bias_epilogue, factor_dtype, factor_epilogue, factor_shapes
from ..problem.operation import Operation
from . import words
from .product import Product

TF32_ON_CPU = "tf32 is a precision of GPUs; use --device cuda, or float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Product):
    """Options of a product and the device, as a Problem for the sizes of a shape."""

    device_type: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("dtype", "dtype_b", "scale_dtype", "out_dtype"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, full_dtype_name(text))

    def problem(self, sizes: Sequence[int], where: str) -> Problem:
        """Return the problem of sizes (M, N, K) or (B, M, N, K). Raises InvalidProblemError that begins with ``where`` for none."""
        with raised_as(InvalidProblemError, InvalidProblemError, before=f"{where}: "):
            return self._problem(sizes)

    def _problem(self, sizes: Sequence[int]) -> Problem:
        batched = len(sizes) == 4
        added = self.bias is not None or self.alpha != 1 or self.beta is not None
        implied = ("baddbmm" if added else "bmm") if batched else ("addmm" if added else "mm")
        op = self.op or implied
        if op not in words.OPS:
            raise InvalidProblemError(f"op: got {op!r}, expected one of {', '.join(words.OPS)}")
        row = NAMES[op]
        if row.batched != batched:
            form = "BxMxNxK" if row.batched else "MxNxK"
            raise InvalidProblemError(f"got {len(sizes)} sizes for {op}, expected {form}")
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for field in dataclasses.fields(self):
            if given[field.name] != field.default and field.name not in _taken_by(op):
                takers = [name for name in NAMES if field.name in _taken_by(name)]
                raise InvalidProblemError(f"{field.name}: not for {op}, expected {_listed(takers)}")
        if self.encoding and self.dtype_b not in (None, "uint8"):
            raise InvalidProblemError(f"dtype_b: got {self.dtype_b!r} with encoding {self.encoding}, expected uint8 or nothing")
        given |= self._dtypes(op, row) | ({"block": _block(self.block)} if self.block is not None else {})
        constructor = getattr(Problem, row.name)
        known = _parameters(row.name)
        problem = constructor(*sizes, **{name: x for name, x in given.items() if name in known and x is not None})
        return self._with_brought(op, cast(Problem, problem))

    def _dtypes(self, op: str, row: Operation) -> dict[str, Any]:
        """Return the named dtypes and the precision, which the name tf32 selects."""
        legal = {dtype_name(dtype): dtype for dtype in row.operands[0].dtypes}
        weights = {dtype_name(dtype): dtype for dtype in row.dtypes_of_b}
        name = self.dtype or ("bfloat16" if "bfloat16" in legal else next(iter(legal)))
        dtypes: dict[str, Any] = {
            "dtype_b": weights[_one_of("dtype_b", self.dtype_b, weights)] if self.dtype_b else None,
            "scale_dtype": parse_dtype(self.scale_dtype) if self.scale_dtype else None,
            "out_dtype": parse_dtype(self.out_dtype) if self.out_dtype else None,
        }
        _one_of(f"dtype of {op}", name, legal | ({"tf32": None} if "float32" in legal else {}))
        if name != "tf32":
            return dtypes | {"dtype": legal[name]}
        if self.device_type != "cuda":
            raise InvalidProblemError(TF32_ON_CPU)
        return dtypes | {"dtype": torch.float32, "precision": Precision(input_mode="tf32")}

    def _with_brought(self, op: str, problem: Problem) -> Problem:
        """Return the problem with the factor or the bias that the operation adds."""
        m, n = problem.m, problem.n
        if op not in BROUGHT:
            return problem
        if not BROUGHT[op].required:
            if self.bias is None:
                return problem
            bias = inp_layout((), m, n, cast(BiasShape, self.bias), problem.out.dtype)
            return dataclasses.replace(problem, epilogue=bias_epilogue(bias.size, bias.dtype))
        shapes = factor_shapes(m, n)
        shape, scale = shapes[_one_of("scales", self.scales or "column", shapes)], parse_dtype(self.scale_dtype or "float32")
        out = parse_dtype(self.out_dtype) if self.out_dtype else factor_dtype(scale)
        return dataclasses.replace(problem, epilogue=factor_epilogue(shape, scale), out=Layout.contiguous((m, n), out))


@functools.cache
def _parameters(op: str) -> frozenset[str]:
    """Return the arguments of an operation's constructor."""
    return frozenset(inspect.signature(getattr(Problem, op)).parameters)


def _taken_by(name: str) -> set[str]:
    """Return the options of a public function: those of its operation's constructor and of its factor or bias."""
    brought = BROUGHT.get(name)
    more = () if brought is None else ("scales", "scale_dtype", "out_dtype") if brought.required else ("bias",)
    return {"op", "dtype", *_parameters(NAMES[name].name), *more}


def _block(text: str | int) -> tuple[int, int]:
    """Parse a block's side or ``ROWSxCOLUMNS`` as rows and columns."""
    sides = re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", str(text))
    if sides is None:
        raise InvalidProblemError(f"block: got {text!r}, expected a side such as 64, or rows and columns such as 64x32")
    return int(sides[1]), int(sides[2] or sides[1])


def _one_of(what: str, value: str, legal: dict[str, Any]) -> str:
    if value not in legal:
        raise InvalidProblemError(f"{what}: got {value!r}, expected {_listed(list(legal))}")
    return value


def _listed(names: Sequence[str]) -> str:
    return f"{'one of ' * (len(names) > 1)}{', '.join(names)}"
