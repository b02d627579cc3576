"""What is compiled: the text of a kernel and the compiler's flags."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import jinja2
import torch

from ...problem import Epilogue
from ...problem.dtypes import accumulator_dtype, dtype_name
from .configs import DOT_TILES, VECTOR_BYTES
from .printer import COMPUTE_TYPES, STORAGE_TYPES, print_epilogue

__all__ = ["Source", "flags"]

_COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_ARCH_FLAGS = {
    "avx512": (
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}  # fmt: skip
"""The instruction sets by name, not ``-march=native``: an artifact then means the same on every machine that shares the cache."""

_UNROLL = {"avx512": 4, "avx2": 4, "portable": 2}
_AHEAD = 48
_AHEAD_BYTES = 1024
"""How far ahead of its use b is asked for where it is read in place: in steps of K, and along the columns of dot products."""


def flags(arch: str) -> tuple[str, ...]:
    """The compiler's flags for an instruction set. No fast-math: NaN, infinities and rounding follow IEEE 754."""
    return (*_COMMON_FLAGS, *_ARCH_FLAGS[arch])


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that decides the text of a kernel. Sizes, strides and blocking are arguments of the compiled function."""

    arch: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    mr: int
    nv: int
    epilogue: Epilogue | None = None

    @property
    def text(self) -> str:
        """The C++ source."""
        return _render(self)

    @property
    def digest(self) -> str:
        """A hash over the source and the flags: equal for equal kernels."""
        return _digest(self)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""), undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True
    )


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    accumulator = accumulator_dtype(source.dtype)
    epilogue = source.epilogue
    operands = epilogue.operands if epilogue else ()
    statements = print_epilogue(epilogue, "acc[j]", [f"e{i}[j]" for i in range(len(operands))], "result[j]") if epilogue else []
    result = COMPUTE_TYPES[epilogue.nodes[-1].dtype] if epilogue else ""
    return (
        _environment()
        .get_template("gemm.cpp.jinja")
        .render(
            arch=source.arch,
            dtype=dtype_name(source.dtype),
            c_type=COMPUTE_TYPES[accumulator],
            suffix="pd" if accumulator == torch.float64 else "ps",
            register=f"__m{VECTOR_BYTES.get(source.arch, 16) * 8}{'d' if accumulator == torch.float64 else ''}",
            vector_bytes=VECTOR_BYTES[source.arch],
            mr=source.mr,
            nv=source.nv,
            unroll=_UNROLL[source.arch],
            ahead=_AHEAD,
            ahead_bytes=_AHEAD_BYTES,
            dot_rows=DOT_TILES[source.arch][0],
            dot_columns=DOT_TILES[source.arch][1],
            fused=source.arch != "portable",
            t_in=STORAGE_TYPES[source.dtype],
            t_out=STORAGE_TYPES[source.out_dtype],
            extras=[{"c_type": STORAGE_TYPES[x.dtype], "compute": COMPUTE_TYPES[x.dtype]} for x in operands],
            statements=statements,
            result_type="float" if result == "bool" else result,
        )
    )


@functools.lru_cache(maxsize=1024)
def _digest(source: Source) -> str:
    text = "\n".join((*flags(source.arch), source.text))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
