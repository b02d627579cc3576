"""Decompose-K: a batch of products over slices of K in the accumulator's type, and a second kernel that adds them up.

This takes two launches. But the slices are independent products, enough to occupy every multiprocessor, and libraries are good at
those. The batch runs in torch or in the mm template. Candidates are only for problems where measurements gave it a chance.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ....choice import Claims, Kernel, Scalars, Tensors
from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not
from ....toolchain.compiled import Artifact
from ....toolchain.triton_kernels import Compilation
from ..arch import can_overlap
from ..artifact import Expected
from ..build import KernelChoice, KernelsChoice, TritonChoice
from ..classes import INT32_LIMIT, OperandClass
from ..configs import Config, Geometry, tiles_of
from ..legality import check_problem
from ..spec import KernelSpec

LEAST_RATIO = 32
"""Minimum ratio of K to the larger of M and N (PyTorch, torch/_inductor/utils.py, use_decompose_k_choice)."""
SUM_WARPS = 4
SUM_ELEMENTS, SUM_WIDTH, SUM_CHUNK = 128, 64, 16
"""Limits of a program of the second kernel: elements of the result, elements of one row, and slices read at a time."""
MOST_PARTIALS_BYTES = 256 * 2**20
MOST_SPLITS_OF_TORCH, LEAST_K_OF_TORCH = 16, 64


@dataclass(frozen=True, kw_only=True)
class AddingChoice(KernelChoice):
    """Kernel that adds up the slices, with one program per output tile. The partial sums take the place of operand a."""

    family = "add_up"
    template = "splits/add_up.py.jinja"

    @classmethod
    def after(cls, problem: Problem, device: DeviceInfo, slices: int, *, pdl: bool) -> Self:
        width = min(SUM_WIDTH, 1 << (problem.n - 1).bit_length())
        config = Config(block_m=SUM_ELEMENTS // width, block_n=width, block_k=16, stages=1, warps=SUM_WARPS, pdl=pdl)
        tiles = tiles_of(problem, config)
        where = Geometry(tiles=tiles, splits=slices, k_per_split=0, splits_per_group=slices, group_m=1, programs=tiles)
        return dataclasses.replace(cls.of(problem, device, config), where=where)

    @property
    def spec(self) -> KernelSpec:
        """Spec in which a holds contiguous partial sums of the accumulator's type."""
        partials = Layout.contiguous((1, 1, 1), self.problem.accumulator)
        return dataclasses.replace(super().spec, a=OperandClass.of(partials, (1, 1, 1)))

    @property
    def values(self) -> Mapping[str, Any]:
        return {"chunk": min(SUM_CHUNK, 1 << (self.where.splits - 1).bit_length())}

    def expected(self, device: DeviceInfo) -> Expected:  # noqa: ARG002 - it multiplies nothing
        return Expected()


@dataclass(frozen=True, kw_only=True)
class DecomposedChoice(KernelsChoice):
    """Batch of ``slices`` products, computed by ``inner`` or by torch.bmm if that is None, and the kernel that adds them up."""

    slices: int = field(repr=False)
    inner: KernelChoice | None = field(repr=False)
    adding: AddingChoice = field(repr=False)

    @functools.cached_property
    def kernels(self) -> tuple[Compilation, ...]:
        return (*(self.inner.kernels if self.inner is not None else ()), *self.adding.kernels)

    @functools.cached_property
    def content_hash(self) -> str:
        product = self.inner.content_hash if self.inner is not None else "torch.bmm"
        text = f"{product} in {self.slices} slices, {self.adding.kernels[0].key} {self.adding.config}"
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> "DecomposedChoice | str":
        reason = check_problem(problem, device) or why_not_decomposed(problem, device) or why_not_slices(problem, self.slices)
        if reason is None and self.inner is not None:
            inner = self.inner.at(sliced_problem(problem, self.slices), device)
            reason = inner if isinstance(inner, str) else None
        if reason is not None:
            return reason
        config = self.inner.config if self.inner is not None else None
        return decomposed_choice(problem, device, self.slices, config, pdl=self.adding.config.pdl)

    @property
    def batch_invariant(self) -> bool:
        """True unless torch multiplies the slices."""
        return self.inner is not None

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        return (*(self.inner.artifacts(device) if self.inner is not None else ()), *self.adding.artifacts(device))

    def launch_variants(self) -> Sequence[Self]:
        variants: list[Self] = []
        for adding in self.adding.launch_variants():
            inner = next(iter(self.inner.launch_variants())) if self.inner is not None else None
            name = self.name.removesuffix("_pdl") + "_pdl" * adding.config.pdl
            info = {**self.info, "pdl": adding.config.pdl}
            variants.append(dataclasses.replace(self, name=name, info=info, inner=inner, adding=adding))
        return variants

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind both kernels to the current device. Each call allocates the partial sums from torch's allocator."""
        product = sliced_product(sliced_problem(self.problem, self.slices), self.inner, loaded[:-1])
        add_up = self.adding.bind(loaded[-1:]).run

        def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
            a, b, *rest = tensors
            add_up(out, (product(a, b), b, *rest), scalars)

        return Kernel(run=run)


def sliced_product(sliced: Problem, inner: KernelChoice | None, loaded: tuple[Any, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from (a, b) to the slices' products, computed by our kernel or by torch."""
    size, dtype = sliced.out.size, sliced.out.dtype
    named = {} if sliced.a.dtype == dtype else {"out_dtype": dtype}
    run = inner.bind(loaded).run if inner is not None else None

    def product(a: Tensor, b: Tensor) -> Tensor:
        partials = torch.empty(size, dtype=dtype, device=a.device)
        if run is None or a.device.type == "cpu":
            a, b = a.as_strided(sliced.a.size, sliced.a.stride), b.as_strided(sliced.b.size, sliced.b.stride)
        if run is None:
            return torch.bmm(a, b, **named, out=partials)
        run(partials, (a, b), ())  # on a GPU only addresses count, and slicing an operand changes none
        return partials

    return product


def sliced_problem(problem: Problem, slices: int) -> Problem:
    """Return the batch of products on the same memory: [slices, M, K/slices] times [slices, K/slices, N]."""
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
    """Return why decompose-K does not serve the problem on this device, or None. ``check_problem`` must have found nothing."""
    if (reason := why_not(problem, ("mm", "addmm"))) is not None:
        return reason
    if device.type == "cuda" and device.capability < 80:
        return f"{device.arch}: no tensor cores for Triton"
    if problem.alpha == "zero" or problem.k < LEAST_RATIO * max(problem.m, problem.n):
        return f"k = {problem.k}: less than {LEAST_RATIO} times m = {problem.m} or n = {problem.n}"
    return None


def why_not_slices(problem: Problem, slices: int) -> str | None:
    if problem.k % slices:
        return f"{slices} slices: k = {problem.k} is not a multiple"
    if slices * problem.m * problem.n * problem.accumulator.itemsize > MOST_PARTIALS_BYTES:
        return f"{slices} slices: more than {MOST_PARTIALS_BYTES} bytes of partial sums"
    if problem.m * problem.n >= INT32_LIMIT:
        return "indices into a partial sum do not fit 32 bits"
    return None


def decomposed_choice(problem: Problem, device: DeviceInfo, slices: int, config: Config | None, *, pdl: bool) -> DecomposedChoice:
    """Return the choice that cuts K into ``slices``, multiplied by the mm template with ``config``, or by torch for None."""
    inner = None
    # cuBLAS may split each slice again without reporting it.
    parts = max(1, min(MOST_SPLITS_OF_TORCH, problem.k // slices // LEAST_K_OF_TORCH))
    if config is not None:
        inner = TritonChoice.of(sliced_problem(problem, slices), device, dataclasses.replace(config, pdl=pdl))
        parts = inner.claims.splits
    return DecomposedChoice(
        name=f"triton:decompose_{slices}_{inner.config if inner is not None else 'bmm' + '_pdl' * pdl}",
        backend="triton",
        problem=problem,
        # Products are never rounded to a narrower type before the sum.
        claims=Claims(
            accumulate=problem.accumulator,
            splits=slices * parts,
            input_mode=problem.precision.input_mode,
            flush_subnormals=inner is None and problem.precision.input_mode == "tf32",
        ),
        info={
            "template": "decompose",
            "tile": [config.block_m, config.block_n, config.block_k] if config is not None else None,
            "splits": slices,
            "pdl": pdl,
        },
        slices=slices,
        inner=inner,
        adding=AddingChoice.after(problem, device, slices, pdl=pdl),
    )


Best = Callable[[Problem], Sequence[Config]]
"""Function that returns the configs of the mm template for a problem, best first."""

TILE_BYTES = 64 * 2**10
"""Bytes of sums in the tile that a library gives to one multiprocessor."""
WAVES = (1, 2)
"""Waves of tiles for which a search picks numbers of slices."""
PARTS_OF_SLICE = 4
EXHAUSTIVE_SLICES = (4, 8, 16, 32, 64, 128, 256)
ROW_BYTES = 16


def decomposed_choices(problem: Problem, device: DeviceInfo, search: str, best: Best) -> list[DecomposedChoice]:
    """Return the decompose-K choices.

    The second kernel adds up on every multiprocessor, while split-K leaves a tile to the last program to arrive. This outweighs the
    second launch in two cases. FMAs or float64 multiply, because libraries compute such batches better than long sums. Or there are
    so few tiles that each has many parts. Otherwise tensor cores finish before the partial sums are written and read.
    """
    if search == "quick" or why_not_decomposed(problem, device) is not None:
        return []
    overlaps = can_overlap(device.capability)
    return [
        decomposed_choice(problem, device, slices, config, pdl=overlaps)
        for slices, config in (_everything if search == "exhaustive" else _likely)(problem, device, best)
        if why_not_slices(problem, slices) is None
    ]


def _likely(problem: Problem, device: DeviceInfo, best: Best) -> Iterator[tuple[int, Config | None]]:
    """Yield (slices, config) pairs; the config is None for torch's product."""
    tiles = math.ceil(problem.m * problem.n * problem.accumulator.itemsize / TILE_BYTES)
    if problem.dtype == torch.float64 or (problem.dtype == torch.float32 and problem.precision.input_mode == "ieee"):
        for slices in dict.fromkeys(divisor(problem, waves * device.sm_count // tiles) for waves in WAVES):
            if slices is not None:
                yield slices, None
    elif tiles <= PARTS_OF_SLICE:
        # Each product covers several tiles, so that there are fewer partial sums.
        slices = divisor(problem, device.sm_count // PARTS_OF_SLICE)
        if slices is not None:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:1])


def divisor(problem: Problem, most: int) -> int | None:
    """Return the largest number of equal slices up to ``most`` and above its half, or None.

    Slices start at whole vectors. A slice is not shorter than a side of the result, or adding up would cost more than multiplying.
    """
    most = min(most, problem.k // max(problem.m, problem.n))
    unit = ROW_BYTES // problem.dtype.itemsize
    return next((slices for slices in range(most, max(most // 2, 1), -1) if problem.k % (slices * unit) == 0), None)


def _everything(problem: Problem, device: DeviceInfo, best: Best) -> Iterator[tuple[int, Config | None]]:
    # On CUDA only, torch's product keeps float32 sums of narrower operands.
    by_torch = device.type == "cuda" or problem.dtype == problem.accumulator
    for slices in EXHAUSTIVE_SLICES:
        if problem.k % slices == 0:
            yield from ((slices, config) for config in best(sliced_problem(problem, slices))[:2])
            if by_torch:
                yield slices, None
