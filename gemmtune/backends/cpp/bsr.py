"""Block-sparse weights on a CPU: one micro-kernel walks panels with as many rows as its vectors hold."""

import ctypes
import dataclasses
import functools
from dataclasses import dataclass
from typing import Self

import torch

from ...choice import Choice, Claims, Kernel, Offers, Refusal, Scalars, Tensors
from ...device import DeviceInfo
from ...numerics.block_sparse import assembled, panels_of, parts
from ...problem import Problem
from ...problem.dtypes import FLOAT8, accumulator_dtype, dtype_info
from .build import NAME
from .configs import VECTOR_BYTES, VECTOR_REGISTERS, why_not_epilogue
from .library import SourceChoice
from .operands import Side, uses_vnni
from .plan import strides_of, thread_count
from .source import VectorSource, rendered

WIDTHS = (2, 1, 4)
"""Vectors in one row of the micro-tile, in the order of trials."""
LEAST_HEIGHT = 4
"""Minimum rows of a micro-tile; below it loads of the weight limit the speed."""
MOST_JOINED = 8
"""Most blocks that one panel merges; beyond it nearly all of the panel is zeros."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, *FLOAT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSource(VectorSource):
    """Everything that determines the text of a kernel. Sizes and strides are arguments of the compiled function."""

    dtype: torch.dtype
    panel_k: int

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_dtype(self.dtype)

    @property
    def nr(self) -> int:
        """Rows of the weight in a panel."""
        return self.nv * VECTOR_BYTES[self.arch] // self.accumulator.itemsize

    @property
    def heights(self) -> tuple[int, ...]:
        """Numbers of tokens for which there is a micro-kernel; registers limit the largest."""
        most = (VECTOR_REGISTERS[self.arch] - self.nv - 1) // self.nv
        return tuple(dict.fromkeys(min(rows, most) for rows in (1, 2, 4, 8, most)))

    @property
    def text(self) -> str:
        return _render(self)


@functools.lru_cache(maxsize=256)
def _render(source: BlockSource) -> str:
    side = Side(dtype=source.dtype)
    return rendered(
        "bsr.cpp.jinja",
        source,
        side,
        side,
        groups="",
        mr=max(source.heights),
        panel_k=source.panel_k,
        heights=source.heights,
    )


@dataclass(frozen=True, kw_only=True)
class BlockChoice(SourceChoice):
    """Kernel with panels of ``nv`` vectors, for a prepacked weight."""

    source: BlockSource

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, nv: int) -> Self:
        sparsity, accumulator = problem.blocks, problem.accumulator
        source = BlockSource(
            arch=device.arch,
            dtype=problem.dtype,
            out_dtype=problem.out.dtype,
            nv=nv,
            panel_k=sparsity.block_k,
            vnni=uses_vnni(problem, device),
            epilogue=problem.epilogue,
        )
        return cls(
            name=f"{NAME}:bsr_{device.arch}{'vnni' * source.vnni}_{max(source.heights)}x{source.nr}",
            backend=NAME,
            problem=problem,
            claims=Claims(
                accumulate=accumulator,
                epilogue_input=problem.epilogue_dtype if problem.epilogue else accumulator,
                skips_absent=sparsity.block_n % source.nr == 0,
            ),
            info={"template": "bsr", "mr": max(source.heights), "nr": source.nr},
            source=source,
        )

    @property
    def content_hash(self) -> str:
        return self.source.digest

    @property
    def compilable(self) -> BlockSource:
        return self.source

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        return why_not_blocks(problem, device) or dataclasses.replace(self, problem=problem)

    @property
    def packed_format(self) -> str:
        """Format of panels whose rows are interleaved, one number or several of each row at a time."""
        numbers = f"x{self.source.numbers}" if self.source.numbers > 1 else ""
        return f"cpp_bsr_{dtype_info(self.problem.dtype).short}{numbers}_{self.source.nr}x{self.source.panel_k}"

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """Pack a sparse_bsr weight into transposed panels of ``nr`` rows, as a sparse_bsr tensor with blocks of other sides."""
        nr, panel_k, numbers = self.source.nr, self.source.panel_k, self.source.numbers
        values, crow, col = parts(panels_of(b, nr, panel_k))
        columns = b.shape[1] // panel_k
        if numbers > 1:
            panel_k = -(-panel_k // numbers) * numbers
            whole = torch.nn.functional.pad(values, (0, panel_k - values.shape[2]))
            packed = whole.reshape(-1, nr, panel_k // numbers, numbers).transpose(1, 2).reshape(-1, panel_k, nr)
        else:
            packed = values.mT.contiguous()
        return assembled(crow, col, packed, ((len(crow) - 1) * panel_k, columns * nr))

    def bind(self, loaded: ctypes.CDLL) -> Kernel:
        function, words, problem = loaded.gemmtune_blocks, _plan(self.problem, self.source), self.problem
        extras = len(problem.epilogue.operands) if problem.epilogue else 0
        function.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_double] * 2 + [ctypes.c_int] + [ctypes.c_void_p] * extras
        function.restype = ctypes.c_int
        address, threads, name, added = ctypes.addressof(words), torch.get_num_threads, self.name, problem.inp is not None

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars, _words: object = words) -> None:
            a, weight, *rest = tensors
            values, crow, col = parts(weight)
            given = [x.data_ptr() for x in rest]
            inp = given.pop(0) if added else None
            pointers = (out.data_ptr(), a.data_ptr(), values.data_ptr(), crow.data_ptr(), col.data_ptr(), inp)
            if function(address, *pointers, *(scalars or (1.0, 0.0)), threads(), *given):
                raise MemoryError(f"{name}: not enough memory for the converted rows of a {problem.m}x{problem.k} operand")

        return Kernel(run=run)


def block_offers(problem: Problem, device: DeviceInfo) -> Offers:
    if (reason := why_not_blocks(problem, device)) is not None:
        return Offers(refusals=(Refusal(name=f"{NAME}:bsr", reason=reason),))
    choices = [BlockChoice.of(problem, device, nv) for nv in WIDTHS]
    sparsity = problem.blocks
    return Offers(
        choices=tuple(
            choice
            for choice in choices
            if max(choice.source.heights) >= LEAST_HEIGHT and choice.source.nr <= MOST_JOINED * sparsity.block_n
        )
    )


def why_not_blocks(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why there is no kernel for a block-sparse problem, or None."""
    if problem.device_type != "cpu":
        return f"the problem is on {problem.device_type}, these kernels run on a CPU"
    if device.arch not in VECTOR_BYTES:
        return f"no kernels for {device.arch}"
    if problem.dtype not in DTYPES:
        return f"got {problem.dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if not problem.prepacked:
        return "the weight is not prepacked; call gemmtune.prepack first"
    return None if problem.epilogue is None else why_not_epilogue(problem.epilogue)


def _plan(problem: Problem, source: BlockSource) -> ctypes.Array[ctypes.c_int64]:
    """Return sizes and strides in the order of ``struct Plan``."""
    heights = source.heights
    tall = -(-problem.m // max(heights))
    rows = next(height for height in sorted(heights) if height * tall >= problem.m)
    words = [
        problem.m, problem.n, problem.k // source.panel_k, *problem.a.stride,
        *strides_of(problem.out, problem), *strides_of(problem.inp, problem), rows,
        int(problem.alpha == "zero"), int(problem.beta == "zero"), thread_count(problem),
    ]  # fmt: skip
    for layout in problem.epilogue.operands if problem.epilogue else ():
        words += strides_of(layout, problem)
    return (ctypes.c_int64 * len(words))(*words)
