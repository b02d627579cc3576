"""Source of a CPU kernel: the rendered text and the compiler flags."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
import torch

from ...problem import Epilogue
from ...problem.dtypes import dtype_name
from .compiler import Compilable
from .configs import DOT_TILES
from .operands import VECTOR_BYTES, Groups, Side, numbers_per_step
from .printer import COMPUTE_TYPES, STORAGE_TYPES, print_epilogue

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
_VNNI_FLAGS = {
    torch.int32: {"avx512": "-mavx512vnni", "avx2": "-mavxvnni"}, torch.float32: {"avx512": "-mavx512bf16"},
}  # fmt: skip
"""Compiler flags of each instruction set. Unlike ``-march=native`` they mean the same on all machines that share a cache."""

_C_TYPES = {torch.float64: "double", torch.float32: "float", torch.int32: "uint32_t"}
_NARROW_TYPES = {
    torch.int8: "i8", torch.uint8: "u8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", "int4": "i4", "uint4": "u4",
}  # fmt: skip
"""C++ types of sums, and of numbers of eight bits or fewer."""

_UNROLL = {"avx512": 4, "avx2": 4, "portable": 2}
_AHEAD = 48
_AHEAD_BYTES = 1024
"""Prefetch distances for b read in place: in steps of K, and in bytes along the columns of dot products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSource(Compilable):
    """Values that determine the text of every kernel, with ``nv`` vectors in a row of its micro-tile."""

    arch: str
    vnni: bool = False
    out_dtype: torch.dtype
    nv: int
    epilogue: Epilogue | None = None

    @property
    @abstractmethod
    def accumulator(self) -> torch.dtype:
        """Dtype of sums."""

    @property
    def numbers(self) -> int:
        """Numbers along K that are multiplied at once and are contiguous in a panel."""
        return numbers_per_step(self.accumulator, self.arch, vnni=self.vnni)

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags for the instruction set. No fast-math: NaN, infinities and rounding follow IEEE 754."""
        return (*_COMMON_FLAGS, *_ARCH_FLAGS[self.arch], *((_VNNI_FLAGS[self.accumulator][self.arch],) if self.vnni else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(VectorSource):
    """Everything that determines the text of a kernel. Sizes, strides and blocking are arguments of the compiled function.

    ``a`` and ``b`` are the left and right operands, ``scales`` the dtypes of ``Problem.scales``.
    """

    a: Side
    b: Side
    mr: int
    scales: tuple[torch.dtype, ...] = ()
    groups: Groups = ""

    @property
    def accumulator(self) -> torch.dtype:
        dtypes = (self.a.dtype, self.b.dtype)
        if dtypes == (torch.int8, torch.int8):
            return torch.int32
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @property
    def text(self) -> str:
        return _render(self)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""), undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True
    )


def rendered(template: str, source: VectorSource, *sides: Side, scales: tuple[torch.dtype, ...] = (), **values: object) -> str:
    """Return the rendered template with the values of the source's operands, epilogue and vectors, and further values."""
    vector_bytes, accumulator = VECTOR_BYTES[source.arch], source.accumulator
    kind, suffix = {torch.float64: ("d", "pd"), torch.float32: ("", "ps"), torch.int32: ("i", "epi32")}[accumulator]
    return _environment().get_template(template).render(
        **_operand_values(sides, scales, source),
        **_epilogue_values(source.epilogue),
        c_type=_C_TYPES[accumulator],
        suffix=suffix,
        register=f"__m{vector_bytes * 8}{kind}",
        vector_bytes=vector_bytes,
        integers=accumulator == torch.int32,
        numbers=source.numbers,
        arch=source.arch,
        nv=source.nv,
        fused=source.arch != "portable",
        **values,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _render(source: Source) -> str:
    return rendered(
        "gemm.cpp.jinja",
        source,
        source.a,
        source.b,
        scales=source.scales,
        groups=source.groups,
        mr=source.mr,
        unroll=_UNROLL[source.arch],
        ahead=_AHEAD,
        ahead_bytes=_AHEAD_BYTES,
        dot_rows=DOT_TILES[source.arch][0],
        dot_columns=DOT_TILES[source.arch][1],
    )  # fmt: skip


def _operand_values(sides: Sequence[Side], scales: Sequence[torch.dtype], source: VectorSource) -> dict[str, object]:
    """Return the template values for a, b, their scales, and the result."""
    found = [
        {
            "name": name,
            "dtype": side.encoding or dtype_name(side.dtype),
            "c_type": _NARROW_TYPES.get(side.encoding or side.dtype) or STORAGE_TYPES[side.dtype],
            "scale": side.scale,
            "zero": side.zero,
        }
        for name, side in zip("ab", sides, strict=True)
    ]
    types = [str(side["c_type"]) for side in found]
    narrow = any(name in _NARROW_TYPES.values() for name in types)
    pairs = source.vnni and source.accumulator == torch.float32
    if pairs:
        for side in found:
            side["c_type"] = "p16" if side["c_type"] == "bf16" else side["c_type"]
    elif source.vnni:
        found[1]["c_type"] = "o8"
    return {
        "a": found[0],
        "b": found[1],
        "sides": found,
        "narrow": narrow,
        "widened_pairs": pairs and narrow,
        "halves": [name for name in ("i4", "u4") if name in types],
        "scales": [STORAGE_TYPES[dtype] for dtype in scales],
        "t_inp": types[0],
        "t_out": "int32_t" if source.out_dtype == torch.int32 else STORAGE_TYPES[source.out_dtype],
    }


def _epilogue_values(epilogue: Epilogue | None) -> dict[str, object]:
    """Return the statements of the epilogue, and the operands that they read."""
    if epilogue is None:
        return {"extras": [], "statements": [], "result_type": ""}
    names = [f"e{i}[j]" for i in range(len(epilogue.operands))]
    result = COMPUTE_TYPES[epilogue.nodes[-1].dtype]
    return {
        "extras": [{"c_type": STORAGE_TYPES[x.dtype], "compute": COMPUTE_TYPES[x.dtype]} for x in epilogue.operands],
        "statements": print_epilogue(epilogue, "acc[j]", names, "result[j]"),
        "result_type": "float" if result == "bool" else result,
    }
