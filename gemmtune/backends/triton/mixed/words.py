"""Choices of the words template, which reads weights as 32-bit words. A warp group reads a in the order of a first kernel."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction
from ....problem import Layout, Problem
from ....problem.dtypes import dtype_info
from ....toolchain.render import template
from ....toolchain.triton_kernels import Source
from ..arch import arch_of
from ..artifact import Expected, words_instruction
from ..build import KernelChoice
from ..classes import SIGNATURE_DTYPES
from ..configs import Config, Geometry, Resources
from ..legality import WARP_GROUP_ROWS
from ..printer import PACKAGE
from ..reductions import summed_by_steps
from ..spec import KernelSpec
from ..wrapped import Copying, WrappedChoice, copying_source
from .conversions import WordFormat, conversions

VECTOR_BYTES = 16
"""Bytes of one copy of words, or of a row of a, to shared memory."""
LEAST_ROWS = 16
BASE_REGISTERS = 40
BLOCK = 1024
"""Elements of a row that one program of the copying kernel copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsConfig(Config):
    """Config of one instance of the words template.

    With ``swap`` weights are the rows of the product, and go through registers. With ``fragments`` a warp group multiplies, and a
    previous kernel puts a into the order of the fragments. Otherwise single warps multiply. ``steps`` iterations of the loop are
    unrolled into one.
    """

    swap: bool = True
    fragments: bool = False
    steps: int = 1

    __str__ = Config.__str__

    @property
    def variant(self) -> str:
        return ("_group" if self.fragments else "_swap" if self.swap else "") + (f"_u{self.steps}" if self.steps > 1 else "")


def word_format(problem: Problem) -> WordFormat:
    bits = 4 if problem.encoding else 8
    signed = problem.encoding == "int4" if problem.encoding else dtype_info(problem.b.dtype).name == "int8"
    return WordFormat(bits=bits, signed=signed, dtype=problem.dtype)


def words_reduction(problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
    """Return sums of steps in the order in which words deal K to threads. Scales that change along K multiply each step's sum."""
    order = "fragments" if isinstance(config, WordsConfig) and config.fragments else "threads"
    block = problem.scale_block("scale_b")[0] if problem.scale_b is not None else problem.k
    every = config.block_k if block < problem.k else None
    return summed_by_steps(problem, where, config, device, promoted_every=every, own=f"triton words by {order}")


@dataclass(frozen=True, kw_only=True)
class WordsKernelChoice(KernelChoice):
    """Kernel that reads b as 32-bit words of several weights each."""

    @property
    def spec(self) -> KernelSpec:
        """Spec that the source depends on, in which b counts words."""
        spec = super().spec
        return dataclasses.replace(spec, b=dataclasses.replace(spec.b, dtype=torch.int32))

    @property
    def values(self) -> Mapping[str, Any]:
        return {"per_word": word_format(self.problem).per_word, "wide_b": self.spec.b.wide}

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        return words_reduction(problem, where, config, device)

    @property
    def preamble(self) -> str:
        return conversions(word_format(self.problem), interpret=self.target is None)


@dataclass(frozen=True, kw_only=True)
class WordsChoice(WordsKernelChoice):
    """Choice of the words template with one config."""

    family = "mixed_words"
    template = "mixed/words.py.jinja"
    config: WordsConfig = field(repr=False)

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        assert isinstance(config, WordsConfig)
        choice = super().of(problem, device, config)
        return dataclasses.replace(choice, info={**choice.info, "swap_ab": config.swap})

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, WordsConfig)
        return why_not_words(problem, device) or why_not_config(problem, device, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims: scales multiply sums, and subtracting a zero point rounds the weights."""
        weights = problem.dtype if problem.zero_b is not None else None
        return dataclasses.replace(super().claimed(problem, where), weights=weights)

    @property
    def values(self) -> Mapping[str, Any]:
        quantized = self.spec.quantized
        assert quantized is not None
        zero, scale = quantized.scale("zero_b"), quantized.scale("scale_b")
        zero_shape, sum_shape = "[:, None]", "[:, None]" if self.config.swap else "[None, :]"
        return {
            **super().values,
            "swap": self.config.swap,
            "order": "fragments" if self.config.fragments else "threads",
            "steps": self.config.steps,
            "ahead": tuple(x.name for x in quantized.scales if x.along_k),
            "fixed_zero": zero is not None and not zero.along_k,
            "zero": "" if zero is None else "zero_b_0" + (zero_shape if zero.strides[1].constant != 0 else ""),
            "scale": "" if scale is None else "scale_b_0" + (sum_shape if scale.strides[1].constant != 0 else ""),
        }

    def expected(self, device: DeviceInfo) -> Expected:
        need = words_resources(self.problem, device, self.config)
        how = words_instruction(self.problem, warp_group=self.config.fragments)
        return Expected(instruction=how, smem_bytes=need.smem_bytes)


@dataclass(frozen=True, kw_only=True)
class OrderedChoice(WrappedChoice):
    """WordsChoice on a reordered copy of a, which a first kernel makes."""

    suffix = ""

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: WordsConfig) -> Self:
        """Return the choice that runs ``problem`` with a ``config`` that has fragments and is legal for ``ordered_problem``."""
        return cls.around(problem, WordsChoice.of(ordered_problem(problem), device, config), {})

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        inner = self.inner.at(ordered_problem(problem), device)
        return inner if isinstance(inner, str) else self.around(problem, inner, {})

    @functools.cached_property
    def copying(self) -> Copying:
        a, bits = self.problem.a, word_format(self.problem).bits
        return Copying(
            source=order_source(a.dtype, bits, dependent=self.inner.spec.dependent),
            grid=(self.problem.m, -(-self.problem.k // BLOCK), 1),
            dtype=a.dtype,
            elements=((0, self.problem.m * self.problem.k),),
            constants=(self.problem.k, *a.stride),
        )


def ordered_problem(problem: Problem) -> Problem:
    """Return the problem with the copy of a."""
    return dataclasses.replace(problem, a=Layout.contiguous(problem.a.size, problem.a.dtype))


@functools.lru_cache(maxsize=64)
def order_source(dtype: torch.dtype, bits: int, *, dependent: bool) -> Source:
    """Return the copying kernel. Sizes and strides are arguments."""
    text = template(PACKAGE, "mixed/order.py.jinja").render(bits=bits, block=BLOCK, dependent=dependent)
    pointers = [(name, f"*{SIGNATURE_DTYPES[dtype]}", divisor) for name, divisor in (("a_from", 1), ("a_to", 16))]
    return copying_source(text, "gemmtune_order", [*pointers, ("K", "i32", 16), ("row_stride", "i64", 1), ("col_stride", "i64", 1)])


def why_not_words(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why the template does not serve the problem on this device, or None. ``check_problem`` must have found nothing."""
    if not problem.widens_b:
        return f"{problem.op} has no weights"
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not arch_of(device).async_copy):
        return f"{device.arch}: the kernel uses instructions of sm80"
    if problem.dtype not in (torch.float16, torch.bfloat16) or problem.b.dtype not in (torch.int8, torch.uint8):
        return f"a {problem.a.dtype}, b {problem.b.dtype}: expected 16-bit floats and int8 or uint8"
    *of_groups, along_k, along_n = problem.b.stride
    if along_k != 1 or problem.b.offset or any(x % VECTOR_BYTES for x in (*of_groups, along_n if problem.n > 1 else 0)):
        return f"b {problem.b}: columns must be contiguous, and begin at multiples of {VECTOR_BYTES} bytes"
    return None


def why_not_config(problem: Problem, device: DeviceInfo, config: WordsConfig) -> str | None:
    per_word = word_format(problem).per_word
    if problem.k % config.block_k or config.block_k < 8 * per_word:
        return f"block_k {config.block_k}: must divide k = {problem.k} and be at least {8 * per_word}"
    for name in ("scale_b", "zero_b"):
        rows = problem.scale_block(name)[0] if getattr(problem, name) is not None else problem.k
        if rows != problem.k and rows % config.block_k:
            return f"block_k {config.block_k}: does not divide the {rows} elements that share one {name}"
    blocks = problem.k // config.block_k
    if -(-blocks // -(-blocks // config.split_k)) != config.split_k:
        return f"split_k {config.split_k}: {blocks} blocks of {config.block_k} leave a split without work"
    if min(config.block_m, config.block_n) < LEAST_ROWS:
        return f"tile {config.block_m}x{config.block_n}: each side must be at least {LEAST_ROWS}"
    product_rows = config.block_n if config.swap else config.block_m
    by_group = arch_of(device).warp_group and product_rows >= WARP_GROUP_ROWS and config.warps % 4 == 0
    if device.type != "cpu" and by_group != config.fragments:
        how = "a warp group" if by_group else "single warps"
        return f"{product_rows} rows of the product, {config.warps} warps: {how} would multiply"
    if config.fragments and not config.swap:
        return "warp-group fragments are of the first operand, so they need swap"
    return None if device.type == "cpu" else words_resources(problem, device, config).why_not_on(device)


def words_resources(problem: Problem, device: DeviceInfo, config: WordsConfig) -> Resources:
    threads = config.warps * max(device.warp_size, 1)
    a_bytes = config.block_m * config.block_k * problem.dtype.itemsize
    b_bytes = config.block_n * config.block_k // word_format(problem).per_word * 4
    tile = config.block_m * config.block_n
    grouped = problem.scale_b is not None and problem.scale_block("scale_b")[0] != problem.k
    stages = max(config.stages - 1, 1) * config.steps
    columns = len(problem.scales) * config.block_n * 4 * 2
    smem_bytes = stages * (a_bytes + b_bytes) + columns
    if config.fragments:
        # One more stage of a. Weights with a zero point go through shared memory to the multiplication.
        smem_bytes += a_bytes + (config.block_n * config.block_k * problem.dtype.itemsize if problem.zero_b is not None else 0)
    weights = config.block_n * config.block_k * problem.dtype.itemsize // 4 // threads
    rows = a_bytes // 4 // (1 if config.swap else config.warps) // max(device.warp_size, 1)
    return Resources(
        smem_bytes=max(smem_bytes, tile * 4 * 9 // 8) + columns,
        registers=BASE_REGISTERS + tile // threads * (2 if grouped else 1) + (weights + (0 if config.fragments else rows)) // 4,
    )
