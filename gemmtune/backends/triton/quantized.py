"""Specification of quantized kernels: the numbers they multiply, their scales, and the precision of their sums."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...problem import Layout, Problem
from ...problem.dtypes import FLOAT8
from ...problem.operation import Op
from ...problem.operations import OPERATIONS, QUANTIZED_OPS, Encoding
from .classes import IntClass

NATIVE_FLOAT8 = 89
"""Compute capability from which tensor cores multiply 8-bit floats and Triton converts both kinds of them."""
INTEGER_PRODUCTS = 80
"""Compute capability from which Triton multiplies int8."""
PROMOTING = 90
"""Compute capability whose multiply adds its narrow sum to a float32 one (Triton's max_num_imprecise_acc)."""
NARROW_SUM = 128
"""Most elements of K in one narrow sum of 8-bit floats; see ``numerics.bounds``."""

ScaleName = Literal["scale_a", "scale_b", "zero_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleClass:
    """Scale or zero point: one element per ``block`` (rows, columns) of an operand, with constant stride 0 along a single one."""

    name: ScaleName
    dtype: torch.dtype
    strides: tuple[IntClass, IntClass]
    block: tuple[int, int]
    of_group: bool = False
    """True if each group of a grouped product has its own scales, starting at ``base``."""

    @classmethod
    def of(cls, problem: Problem, name: ScaleName, layout: Layout) -> "ScaleClass":
        pairs = zip(layout.size[-2:], layout.stride[-2:], strict=True) if len(layout.size) >= 2 else ((1, 0), (1, 0))
        rows, cols = (IntClass.of(0 if n == 1 else s, constants=(0, 1), limit=0) for n, s in pairs)
        block = problem.scale_block(name)
        # If one block spans the dimension, its size does not matter and would only multiply kernels.
        return cls(
            name=name,
            dtype=layout.dtype,
            strides=(rows, cols),
            block=(1 if rows.constant == 0 else block[0], 1 if cols.constant == 0 else block[1]),
            of_group=len(layout.size) == 3,
        )

    @property
    def base(self) -> str:
        """Kernel name of the pointer to the first scale."""
        return f"{self.name}_of_group" if self.of_group else f"{self.name}_ptr"

    @property
    def k_dim(self) -> int:
        """Dimension of the sum."""
        return 1 if self.name == "scale_a" else 0

    @property
    def along_k(self) -> bool:
        return self.strides[self.k_dim].constant != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Part of a kernel's specification that only quantized operations have.

    ``a`` and ``b`` are the dtypes of the numbers, which are converted to ``product`` and multiplied. With ``by_bits`` the kernel
    receives 8-bit floats as bytes. ``imprecise`` is the most elements of K in a narrow sum, None for no limit. With ``fresh`` each
    loop step starts a new sum, which is then added to the total.
    """

    op: Op
    encoding: Encoding
    a: torch.dtype
    b: torch.dtype
    product: torch.dtype
    by_bits: bool
    scales: tuple[ScaleClass, ...]
    imprecise: int | None
    fresh: bool

    def scale(self, name: ScaleName) -> ScaleClass | None:
        return next((scale for scale in self.scales if scale.name == name), None)

    @property
    def on_weights(self) -> tuple[ScaleClass, ...]:
        """Scales applied to b before the multiplication: zero points and, for wider weights, scales that change along K."""
        if not OPERATIONS[self.op].widens_b:
            return ()
        return tuple(scale for scale in self.scales if scale.name == "zero_b" or scale.along_k)

    @property
    def on_sums(self) -> tuple[ScaleClass, ...]:
        """Scales that multiply the sum of each step."""
        return tuple(scale for scale in self.scales if scale.along_k) if OPERATIONS[self.op].float8 else ()

    @property
    def on_result(self) -> tuple[ScaleClass, ...]:
        """Scales that multiply the final sum: scale_b before scale_a, as cuBLAS does, whose kernels give the same bits on sm90."""
        return tuple(scale for scale in reversed(self.scales) if not scale.along_k and scale.name != "zero_b")


def per_byte(problem: Problem) -> int:
    """Return the numbers of b in one stored element."""
    return 2 if problem.encoding else 1


def product_dtype(problem: Problem, capability: int) -> torch.dtype:
    """Return the dtype in which a kernel multiplies: 8-bit floats themselves if a matrix instruction takes them, else float16.

    Block-sparse weights are limited by reads, so their 8-bit floats always become float16. Their sums then need no promotion. On
    sm75 int8 becomes float16 too, because Triton has FMAs for it. Sums of one loop step are exact in float32.
    """
    if problem.dtype in FLOAT8 and (capability < NATIVE_FLOAT8 or problem.sparsity is not None):
        return torch.float16
    if problem.integers and 0 < capability < INTEGER_PRODUCTS:
        return torch.float16
    return problem.dtype


def rounds_weights(problem: Problem) -> torch.dtype | None:
    """Return the dtype to which the mm template rounds weights before multiplying, or None if it does not round."""
    if not problem.widens_b:
        return None
    grouped = problem.scale_b is not None and ScaleClass.of(problem, "scale_b", problem.scale_b).along_k
    return problem.dtype if grouped or problem.zero_b is not None else None


def quantized_of(problem: Problem, block_k: int, *, capability: int) -> Quantized | None:
    """Return the quantized part of a kernel's spec; None for dense operations."""
    if problem.op not in QUANTIZED_OPS and not problem.float8 and problem.dtype not in FLOAT8:
        return None
    given: tuple[tuple[ScaleName, Layout | None], ...] = (
        ("scale_a", problem.scale_a),
        ("scale_b", problem.scale_b),
        ("zero_b", problem.zero_b),
    )
    scales = tuple(ScaleClass.of(problem, name, layout) for name, layout in given if layout is not None)
    product = product_dtype(problem, capability)
    along_k = any(scale.along_k for scale in scales)
    narrow = problem.float8 and not problem.fast_accum and capability >= NATIVE_FLOAT8
    promoting = narrow and not along_k and capability == PROMOTING
    return Quantized(
        op=problem.op,
        encoding=problem.encoding,
        a=problem.a.dtype,
        b=problem.b.dtype,
        product=product,
        by_bits=capability < NATIVE_FLOAT8 and any(x.dtype in FLOAT8 for x in (problem.a, problem.b)),
        scales=scales,
        imprecise=min(block_k, NARROW_SUM) if promoting else None,
        fresh=(problem.integers and product != torch.int8) or (problem.float8 and (along_k or (narrow and not promoting))),
    )
