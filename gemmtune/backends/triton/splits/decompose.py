"""Decompose-K: a batch of products over slices of K, kept in the accumulator's type, and a second kernel that adds them up.

Two launches, but the slices are as many independent products as it takes to give every multiprocessor work, and those are what
libraries are good at: the batch is torch's own, or one of the mm template.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ....choice import Claims, Kernel, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not
from ....toolchain.compiled import Artifact, CompiledChoice
from ..arch import can_overlap
from ..build import KernelChoice, TritonChoice, capability_of, target_of
from ..classes import INT32_LIMIT, OperandClass
from ..configs import Config
from ..geometry import Geometry
from ..kernels import Target
from ..launch import bind
from ..source import render_source
from ..spec import specialise
from ..wrapped import Helper

__all__ = ["DecomposedChoice", "decomposed_choice", "sliced_problem", "why_not_decomposed"]

TEMPLATE = "splits/add_up.py.jinja"
LEAST_RATIO = 32
"""K is that many times the larger of M and N at least (PyTorch, torch/_inductor/utils.py, use_decompose_k_choice)."""
SUM_WARPS = 4
SUM_ELEMENTS, SUM_WIDTH, SUM_CHUNK = 128, 64, 16
"""Elements of the result that a program of the second kernel has, the most of a row, and slices that it reads at a time."""
MOST_PARTIALS_BYTES = 256 * 2**20
MOST_SPLITS_OF_TORCH, LEAST_K_OF_TORCH = 16, 64


@dataclass(frozen=True, kw_only=True)
class DecomposedChoice(CompiledChoice):
    """A batch of ``slices`` products, by ``inner`` or, where that is None, by torch.bmm; and the kernel that adds them up."""

    slices: int = field(repr=False)
    inner: KernelChoice | None = field(repr=False)
    target: Target | None = field(repr=False)
    pdl: bool = field(repr=False)
    from_ptx: bool = field(default=False, repr=False)

    @functools.cached_property
    def config(self) -> Config:
        """The config of the kernel that adds up."""
        width = min(SUM_WIDTH, 1 << (self.problem.n - 1).bit_length())
        return Config(block_m=SUM_ELEMENTS // width, block_n=width, block_k=16, stages=1, warps=SUM_WARPS, pdl=self.pdl)

    @functools.cached_property
    def helper(self) -> Helper:
        """The kernel that adds up."""
        capability = capability_of(self.target)
        spec = specialise(
            self.problem,
            self.config,
            interpret=self.target is None,
            dependent=can_overlap(capability),
            capability=capability,
        )
        partials = Layout.contiguous((1, 1, 1), self.problem.accumulator)
        spec = dataclasses.replace(spec, a=OperandClass.of(partials, (1, 1, 1), static=False))
        source = render_source(spec, TEMPLATE, values=(("chunk", min(SUM_CHUNK, 1 << (self.slices - 1).bit_length())),))
        return Helper(name=self.name, source=source, warps=SUM_WARPS, target=self.target)

    @functools.cached_property
    def content_hash(self) -> str:
        """Over the product, the number of slices and the kernel that adds up."""
        product = self.inner.content_hash if self.inner is not None else "torch.bmm"
        return hashlib.sha256(f"{product} in {self.slices} slices, {self.helper.key} {self.config}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """Equal for shapes of one alignment class."""
        if self.target is None:
            return None
        own = f"triton-{self.helper.key}-{self.target.backend}{self.target.arch}"
        return own if self.inner is None else f"{self.inner.compile_key}-then-{own}"

    @property
    def compiled(self) -> bool:
        """Was what has to be compiled compiled here before?"""
        return self.helper.compiled and (self.inner is None or self.inner.compiled)

    @property
    def arch(self) -> str:
        """That of its kernels. Raises UnavailableError for the interpreter."""
        assert self.target is not None
        return self.target.name

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The product where it is ours, then the kernel that adds up."""
        inner = self.inner.artifacts(device) if self.inner is not None else ()
        return (*inner, self.helper.artifact())

    def launch_variants(self) -> Sequence[Self]:
        """The same choice with the other answer to whether launches may overlap the kernel before."""
        if self.target is None or self.target.backend != "cuda" or not can_overlap(int(self.target.arch)):
            return ()
        inner = next(iter(self.inner.launch_variants())) if self.inner is not None else None
        name = self.name.removesuffix("_pdl") if self.pdl else f"{self.name}_pdl"
        info = {**self.info, "pdl": not self.pdl}
        return (dataclasses.replace(self, name=name, info=info, inner=inner, pdl=not self.pdl),)

    def forward(self) -> Self:
        """The same choice, loaded from its PTX."""
        inner = self.inner.forward() if self.inner is not None else None
        return dataclasses.replace(self, inner=inner, from_ptx=True)

    def compile(self) -> None:
        """Compile what has to be. Raises CompileError."""
        if self.inner is not None:
            self.inner.compile()
        if self.target is not None:
            self.helper.compile()

    def load(self) -> tuple[Any, Any]:
        """The kernel that multiplies (None: torch's), and the one that adds up. Raises as ``KernelChoice.load``."""
        return None if self.inner is None else self.inner.load(), self.helper.load(from_ptx=self.from_ptx)

    def bind(self, loaded: tuple[Any, Any]) -> Kernel:
        """Bind both to the current device. The partial sums live in memory that each call takes from torch's allocator."""
        multiplying, adding = loaded
        sliced = sliced_problem(self.problem, self.slices)
        product = torch_product(sliced) if self.inner is None else inner_product(sliced, self.inner.bind(multiplying).run)
        block_m, block_n = self.config.tile
        tiles = -(-self.problem.m // block_m) * -(-self.problem.n // block_n)
        where = Geometry(tiles=tiles, splits=self.slices, k_per_split=0, splits_per_group=self.slices, group_m=1, programs=tiles)
        run = bind(adding, self.helper.source.arguments, self.problem, where, interpret=self.target is None, pdl=self.pdl)
        return Kernel(run=both(product, run))


def torch_product(sliced: Problem) -> Any:
    """(a, b) to the slices' products, by torch."""
    (a_size, a_stride), (b_size, b_stride) = ((x.size, x.stride) for x in (sliced.a, sliced.b))
    size, dtype = sliced.out.size, sliced.out.dtype
    named = {} if sliced.a.dtype == dtype else {"out_dtype": dtype}

    def product(a: Tensor, b: Tensor) -> Tensor:
        partials = torch.empty(size, dtype=dtype, device=a.device)
        return torch.bmm(a.as_strided(a_size, a_stride), b.as_strided(b_size, b_stride), **named, out=partials)

    return product


def inner_product(sliced: Problem, run: Run) -> Any:
    """(a, b) to the slices' products, by a kernel of ours. To cut an operand changes no address."""
    size, dtype = sliced.out.size, sliced.out.dtype

    def product(a: Tensor, b: Tensor) -> Tensor:
        partials = torch.empty(size, dtype=dtype, device=a.device)
        if a.device.type == "cpu":
            a, b = a.as_strided(sliced.a.size, sliced.a.stride), b.as_strided(sliced.b.size, sliced.b.stride)
        run(partials, (a, b), ())
        return partials

    return product


def both(product: Any, add_up: Run) -> Run:
    """The products, then their sum."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        a, b, *rest = tensors
        add_up(out, (product(a, b), b, *rest), scalars)

    return run


def sliced_problem(problem: Problem, slices: int) -> Problem:
    """The batch of products: [slices, M, K/slices] times [slices, K/slices, N], on the same memory."""
    k = problem.k // slices
    a, b = problem.a, problem.b
    return Problem(
        op="bmm",
        a=dataclasses.replace(a, size=(slices, problem.m, k), stride=(k * a.stride[-1], *a.stride)),
        b=dataclasses.replace(b, size=(slices, k, problem.n), stride=(k * b.stride[-2], *b.stride)),
        out=Layout.contiguous((slices, problem.m, problem.n), problem.accumulator),
        device_type=problem.device_type,
        precision=problem.precision,
    )


def why_not_decomposed(problem: Problem, device: DeviceInfo) -> str | None:
    """Why K is not cut into a batch for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not(problem, ("mm", "addmm"))
    if reason is not None:
        return reason
    if device.type == "cuda" and device.capability < 80:
        return f"{device.arch}: no tensor cores for Triton"
    if problem.alpha == "zero" or problem.k < LEAST_RATIO * max(problem.m, problem.n):
        return f"k = {problem.k}: less than {LEAST_RATIO} times m = {problem.m} or n = {problem.n}"
    return None


def why_not_slices(problem: Problem, slices: int) -> str | None:
    """Why K may not be cut into ``slices``, or None."""
    if problem.k % slices:
        return f"{slices} slices: k = {problem.k} is no multiple"
    if slices * problem.m * problem.n * problem.accumulator.itemsize > MOST_PARTIALS_BYTES:
        return f"{slices} slices: more than {MOST_PARTIALS_BYTES} bytes of partial sums"
    if problem.m * problem.n >= INT32_LIMIT:
        return "the places in a partial sum do not fit 32 bits"
    return None


def decomposed_choice(problem: Problem, device: DeviceInfo, slices: int, config: Config | None, *, pdl: bool) -> DecomposedChoice:
    """The choice that cuts K into ``slices``, multiplied by the mm template with ``config`` or, for None, by torch."""
    inner = (
        TritonChoice.of(sliced_problem(problem, slices), device, dataclasses.replace(config, pdl=pdl))
        if config is not None
        else None
    )
    name = f"triton:decompose_{slices}_{inner.config if inner is not None else 'bmm' + '_pdl' * pdl}"
    return DecomposedChoice(
        name=name,
        backend="triton",
        problem=problem,
        claims=_claims(problem, inner, slices),
        info={
            "template": "decompose",
            "tile": [config.block_m, config.block_n, config.block_k] if config is not None else None,
            "splits": slices,
            "pdl": pdl,
        },
        slices=slices,
        inner=inner,
        target=target_of(device),
        pdl=pdl,
    )


def _claims(problem: Problem, inner: KernelChoice | None, slices: int) -> Claims:
    """Those of the product, whose results are never rounded to a narrower type, and of the sum."""
    tf32 = problem.precision.input_mode == "tf32"
    # cuBLAS may split each slice in its turn, which it does not tell.
    parts = inner.claims.splits if inner is not None else max(1, min(MOST_SPLITS_OF_TORCH, problem.k // slices // LEAST_K_OF_TORCH))
    return Claims(
        accumulate=problem.accumulator,
        partials=problem.accumulator,
        epilogue_input=problem.accumulator,
        splits=slices * parts,
        input_mode=problem.precision.input_mode,
        flush_subnormals=inner is None and tf32,
    )
