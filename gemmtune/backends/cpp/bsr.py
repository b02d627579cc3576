"""Block-sparse weights on a CPU: panels of as many rows as vectors hold, walked by one micro-kernel."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from typing import Self

import torch

from ...choice import Choice, Claims, Kernel, Offers, Refusal, Scalars, Tensors
from ...device import DeviceInfo
from ...numerics.block_sparse import assembled, parts
from ...problem import Problem
from ...problem.dtypes import dtype_info
from ...toolchain.made_once import opened
from ..panels import panels_of
from .build import NAME, load
from .compiler import artifact_path, compile_source, find_compiler
from .configs import VECTOR_BYTES, VECTOR_REGISTERS
from .plan import thread_count
from .printer import STORAGE_TYPES
from .source import flags, rendered

WIDTHS = (2, 1, 4)
"""Vectors of a row of the micro-tile, those that are tried first in front."""
LEAST_HEIGHT = 4
"""Rows of a micro-tile below which loads of the weight are the limit, and it is not offered."""
MOST_JOINED = 8
"""Blocks of which a panel is joined at most: beyond, nearly all of it is zeros."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSource:
    """What decides the text of a kernel: sizes and strides are arguments of the compiled function."""

    arch: str
    dtype: torch.dtype
    nv: int
    panel_k: int

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which products are summed."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def nr(self) -> int:
        """Rows of the weight in a panel."""
        return self.nv * VECTOR_BYTES[self.arch] // self.accumulator.itemsize

    @property
    def heights(self) -> tuple[int, ...]:
        """Numbers of tokens that there is a micro-kernel for, the largest as registers allow."""
        most = (VECTOR_REGISTERS[self.arch] - self.nv - 1) // self.nv
        return tuple(dict.fromkeys(min(rows, most) for rows in (1, 2, 4, 8, most)))

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags."""
        return flags(self.arch)

    @property
    def text(self) -> str:
        """The C++ source."""
        return _render(self)

    @property
    def digest(self) -> str:
        """A hash over the source and the flags."""
        return hashlib.blake2b("\n".join((*self.flags, self.text)).encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=256)
def _render(source: BlockSource) -> str:
    return rendered(
        "bsr.cpp.jinja",
        arch=source.arch,
        accumulator=source.accumulator,
        mr=max(source.heights),
        nv=source.nv,
        storage=STORAGE_TYPES[source.dtype],
        panel_k=source.panel_k,
        heights=source.heights,
    )


@dataclass(frozen=True, kw_only=True)
class BlockChoice(Choice):
    """The kernel with panels of ``nv`` vectors, for a prepacked weight."""

    source: BlockSource

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, nv: int) -> Self:
        """The choice for a problem on a device."""
        sparsity, accumulator = problem.sparsity, problem.accumulator
        assert sparsity is not None
        source = BlockSource(arch=device.arch, dtype=problem.dtype, nv=nv, panel_k=sparsity.block_k)
        return cls(
            name=f"{NAME}:bsr_{device.arch}_{max(source.heights)}x{source.nr}",
            backend=NAME,
            problem=problem,
            claims=Claims(
                accumulate=accumulator,
                partials=accumulator,
                epilogue_input=accumulator,
                skips_absent=sparsity.block_n % source.nr == 0,
            ),
            info={"template": "bsr", "mr": max(source.heights), "nr": source.nr},
            source=source,
        )

    @property
    def content_hash(self) -> str:
        """A hash over source and flags."""
        return self.source.digest

    @property
    def compile_key(self) -> str:
        """The same: one shared object serves every size."""
        return self.source.digest

    @property
    def compiled(self) -> bool:
        """The shared object is in the cache."""
        compiler = find_compiler()
        return compiler is not None and artifact_path(self.source, compiler).exists()

    def compile(self) -> None:
        """Make the shared object, unless it is there. Raises CompileError; UnavailableError without a compiler."""
        compile_source(self.source, self.name)

    def load(self) -> ctypes.CDLL:
        """The compiled function. Raises CompileError, UnavailableError without a compiler, OSError."""
        return opened(lambda: compile_source(self.source, self.name), load)

    @property
    def packed_format(self) -> str:
        """Panels whose rows lie side by side."""
        return f"cpp_bsr_{dtype_info(self.problem.dtype).short}_{self.source.nr}x{self.source.panel_k}"

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """A sparse_bsr weight in panels of ``nr`` rows, each transposed: so the blocks of a sparse_bsr tensor of other sides."""
        nr, panel_k = self.source.nr, self.source.panel_k
        values, crow, col = parts(panels_of(b, nr, panel_k))
        size = ((len(crow) - 1) * panel_k, b.shape[1] // panel_k * nr)
        return assembled(crow, col, values.mT.contiguous(), size)

    def bind(self, loaded: ctypes.CDLL) -> Kernel:
        """The compiled function with the plan of the problem."""
        function, words, problem = loaded.gemmtune_blocks, _plan(self.problem, self.source), self.problem
        function.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_double] * 2 + [ctypes.c_int]
        function.restype = ctypes.c_int
        address, threads, name = ctypes.addressof(words), torch.get_num_threads, self.name

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars, _words: object = words) -> None:
            a, weight, *inp = tensors
            values, crow, col = parts(weight)
            added = inp[0].data_ptr() if inp else None
            pointers = (out.data_ptr(), a.data_ptr(), values.data_ptr(), crow.data_ptr(), col.data_ptr(), added)
            if function(address, *pointers, *(scalars or (1.0, 0.0)), threads()):
                raise MemoryError(f"{name}: not enough memory for the converted rows of a {problem.m}x{problem.k} operand")

        return Kernel(run=run)


def block_offers(problem: Problem, device: DeviceInfo) -> Offers:
    """The kernels for a block-sparse problem."""
    reason = why_not_blocks(problem, device)
    if reason is not None:
        return Offers(refusals=(Refusal(name=f"{NAME}:bsr", reason=reason),))
    choices = [BlockChoice.of(problem, device, nv) for nv in WIDTHS]
    sparsity = problem.sparsity
    assert sparsity is not None
    return Offers(
        choices=tuple(
            choice
            for choice in choices
            if max(choice.source.heights) >= LEAST_HEIGHT and choice.source.nr <= MOST_JOINED * sparsity.block_n
        )
    )


def why_not_blocks(problem: Problem, device: DeviceInfo) -> str | None:
    """Why there is no kernel for a block-sparse problem, or None."""
    if problem.device_type != "cpu":
        return f"the problem is on {problem.device_type}, these kernels run on a CPU"
    if device.arch not in VECTOR_BYTES:
        return f"no kernels for {device.arch}"
    if problem.dtype not in DTYPES:
        return f"got {problem.dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if problem.epilogue is not None:
        return "the kernel has no epilogue"
    if not problem.prepacked:
        return "panels are made of a prepacked weight; see gemmtune.prepack"
    return None


def _plan(problem: Problem, source: BlockSource) -> ctypes.Array[ctypes.c_int64]:
    """Sizes and strides in the order of ``struct Plan``."""
    heights = source.heights
    tall = -(-problem.m // max(heights))
    rows = next(height for height in sorted(heights) if height * tall >= problem.m)
    inp = (0, 0) if problem.inp is None else problem.inp.expanded(problem.out.size).stride
    words = (
        problem.m, problem.n, problem.k, *problem.a.stride, *problem.out.stride, *inp, rows,
        int(problem.alpha == "zero"), int(problem.beta == "zero"), thread_count(problem),
    )  # fmt: skip
    return (ctypes.c_int64 * len(words))(*words)
