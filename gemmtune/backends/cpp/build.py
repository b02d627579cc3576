"""Choices of the cpp backend: compiled, loaded with ctypes, and bound to a problem."""

import ctypes
import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Self

import torch

from ...choice import Choice, Claims, Kernel, Run, Scalars, Tensors
from ...device import DeviceInfo
from ...numerics.reduction import Reduction, parts_of, reduction_of
from ...problem import Problem
from ...problem.dtypes import dtype_info
from ...toolchain.prepared import HostFunction
from .compiler import Compilable
from .configs import Config, pairs, refusal
from .library import SourceChoice
from .operands import VECTOR_BYTES, divided, numbers_per_step, oriented, sides
from .plan import Plan, block_of_k, make_plan, packed_shape
from .source import Source

NAME = "cpp"


def reduction_for(problem: Problem, config: Config, arch: str, *, vnni: bool) -> Reduction | None:
    """Return a run of fused multiply-adds for each block of K, added in rising order; dot products sum each lane or pair.

    None: few rows of 4-bit numbers use two sums, the rows of a group are data, and groups may divide the terms.
    """
    if problem.divides_terms or problem.encoding:
        return None
    numbers = numbers_per_step(problem.accumulator, arch, vnni=vnni)
    length = block_of_k(problem, config, numbers) * numbers
    lanes = config.mode == "dots"
    order = f"{VECTOR_BYTES[arch] // problem.accumulator.itemsize} lanes" if lanes else "pairs" if vnni else ""
    own = "cpp" if order or arch == "portable" or problem.scales else ""
    return reduction_of(problem, "cpp", unit="fma", parts=parts_of(problem.k, length), order=order, own=own)


@dataclass(frozen=True, kw_only=True)
class CppChoice(SourceChoice):
    """One configuration of the packed GEMM for one problem."""

    arch: str
    config: Config
    vnni: bool = False

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo) -> Self:
        """Return the choice of ``config``. Sums use the accumulator's dtype, and weights are scaled first.

        Pairs round scaled weights to bfloat16 and flush subnormals.
        """
        accumulator, vnni = problem.accumulator, pairs(config, problem, device)
        terms = config.kc * numbers_per_step(accumulator, device.arch, vnni=vnni)
        return cls(
            name=name_of(config, problem, device),
            backend=NAME,
            problem=problem,
            claims=Claims(
                accumulate=accumulator,
                epilogue_input=problem.epilogue_dtype if problem.epilogue else accumulator,
                splits=max(1, -(-problem.k // terms)),
                weights=(torch.bfloat16 if vnni else torch.float32) if problem.widens_b and problem.scale_b is not None else None,
                flush_subnormals=vnni and accumulator == torch.float32,
                reduction=reduction_for(problem, config, device.arch, vnni=vnni),
            ),
            info={
                "mode": config.mode, "mr": config.mr, "nr": config.nr(device.arch, accumulator), "kc": config.kc,
                "task_m": config.task_m, "task_n": config.task_n, "direct": config.direct,
            },
            arch=device.arch,
            vnni=vnni,
            config=config,
        )  # fmt: skip

    @property
    def compilable(self) -> Compilable:
        return self.source

    @property
    def source(self) -> Source:
        """Source to compile, shared by all problems that differ only in sizes, strides and blocking."""
        a, b = sides(self.problem, swapped=oriented(self.problem, self.nr).swapped)
        return Source(
            arch=self.arch,
            vnni=self.vnni,
            a=a,
            b=b,
            scales=tuple(layout.dtype for layout in self.problem.scales),
            groups=divided(self.problem),
            out_dtype=self.problem.out.dtype,
            mr=self.config.mr,
            nv=self.config.nv,
            epilogue=self.problem.epilogue,
        )

    @property
    def nr(self) -> int:
        """Columns of a panel of b."""
        return self.config.nr(self.arch, self.problem.accumulator)

    @property
    def content_hash(self) -> str:
        return hashlib.blake2b(f"{self.source.digest} {self.config}".encode(), digest_size=16).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        return refusal(self.config, problem, device) or self.of(self.config, problem, device)

    def proved_at(self, problem: Problem, device: DeviceInfo) -> Choice:  # noqa: ARG002 - shared signature
        return dataclasses.replace(self, problem=problem)

    @property
    def legal_between(self) -> bool:
        """True, because M may be too large, or the transposed product may be computed from some M on."""
        return True

    @property
    def batch_invariant(self) -> bool:
        """True if sums do not depend on M. Few rows of 4-bit numbers use two sums, and the rows of a group are data."""
        return not (self.problem.groups and self.problem.encoding)

    def bind(self, loaded: ctypes.CDLL) -> Kernel:
        """Bind the compiled function to its plan. Calls release the GIL and use up to ``torch.get_num_threads()`` threads."""
        plan = make_plan(self.problem, self.config, self.arch, vnni=self.vnni)
        return Kernel(run=_bind(loaded, plan, self.problem, self.name), prepared=_prepared(loaded, plan, self.problem))

    @property
    def packed_format(self) -> str | None:
        """Format of panels with ``nr`` columns in the operand's dtype, shared by all configurations of this micro-tile width."""
        if not self.problem.prepacked:
            return None
        numbers = f"x{self._numbers}" if self._numbers > 1 else ""
        return f"cpp_{dtype_info(self.problem.b.dtype).short}{numbers}_nr{self.nr}"

    @property
    def _numbers(self) -> int:
        return numbers_per_step(self.problem.accumulator, self.arch, vnni=self.vnni)

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """Return b [K, N] packed as contiguous [⌈N/nr⌉, K, nr] or, interleaved, [⌈N/nr⌉, ⌈K/numbers⌉, nr, numbers], zero-padded."""
        if self.packed_format is None:
            return b
        given = b.view(torch.uint8) if b.dtype.itemsize == 1 else b  # torch cannot fill and copy every 8-bit float
        k, n = b.shape
        shape = packed_shape(k, n, self.nr, self._numbers)
        packed = given.new_zeros((shape[0], shape[1] * self._numbers, self.nr))
        whole = n // self.nr
        packed[:whole, :k] = given[:, : whole * self.nr].reshape(k, whole, self.nr).transpose(0, 1)
        if n % self.nr:
            packed[whole, :k, : n % self.nr] = given[:, whole * self.nr :]
        if self._numbers > 1:
            packed = packed.reshape(shape[0], shape[1], self._numbers, self.nr).transpose(2, 3).contiguous()
        return packed.view(b.dtype)


def name_of(config: Config, problem: Problem, device: DeviceInfo) -> str:
    """Return the choice's name: ``cpp:avx512_14x32_columns_kc512_t8x1_direct`` or ``cpp:grouped_avx512_14x32_dots_kc512_t8x1``."""
    tile = f"{config.mr}x{config.nr(device.arch, problem.accumulator)}"
    several = "vnni" if problem.accumulator == torch.int32 else "bf16"
    isa = f"{device.arch}{several * pairs(config, problem, device)}"
    groups = {"": "", "rows": "grouped_", "terms": "grouped_k_"}[divided(problem)]
    name = f"{NAME}:{groups}{isa}_{tile}_{config.mode}_kc{config.kc}_t{config.task_m}x{config.task_n}"
    return f"{name}_direct" if config.direct else name


_POINTER = ctypes.c_void_p


def _bind(library: ctypes.CDLL, plan: Plan, problem: Problem, name: str) -> Run:
    """Return a function with the signature of ``choice.Run``. It keeps the plan's memory alive."""
    sizes = "x".join(map(str, plan.words[:4]))

    def fail() -> NoReturn:
        raise MemoryError(f"{name}: not enough memory for the packed panels of a {sizes} product")

    return _plain(library, plan, fail) if _is_plain(problem) else _general(library, plan, problem, fail)


def _is_plain(problem: Problem) -> bool:
    return problem.inp is None and not _operand_count(problem) and problem.alpha == "one"


def _prepared(library: ctypes.CDLL, plan: Plan, problem: Problem) -> HostFunction:
    plain = _is_plain(problem)
    function = library.gemmtune_product if plain else library.gemmtune_gemm
    return HostFunction(
        function=ctypes.cast(function, ctypes.c_void_p).value or 0,
        plan=ctypes.addressof(plan.words),
        words=len(plan.words),
        plain=plain,
        swapped=plan.swapped,
        added=problem.inp is not None,
        owner=(library, plan),
        rows=plan.rows,
    )


def _operand_count(problem: Problem) -> int:
    """Return the number of tensors after a, b and inp: scales, group ends and epilogue operands."""
    return len(problem.scales) + bool(problem.groups) + (len(problem.epilogue.operands) if problem.epilogue else 0)


def _plain(library: ctypes.CDLL, plan: Plan, fail: Callable[[], NoReturn]) -> Run:
    """Return the run of a product without added operands, with the fewest arguments: the call dominates small problems."""
    function = library.gemmtune_product
    function.argtypes, function.restype = [_POINTER] * 4 + [ctypes.c_int], ctypes.c_int
    first, threads, address = int(plan.swapped), torch.get_num_threads, ctypes.addressof(plan.words)

    def run(out: torch.Tensor, tensors: Tensors, _scalars: Scalars, _plan: Plan = plan) -> None:
        if function(address, out.data_ptr(), tensors[first].data_ptr(), tensors[1 - first].data_ptr(), threads()):
            fail()

    return run


def _general(library: ctypes.CDLL, plan: Plan, problem: Problem, fail: Callable[[], NoReturn]) -> Run:
    function = library.gemmtune_gemm
    function.argtypes = [_POINTER] * 5 + [ctypes.c_double] * 2 + [ctypes.c_int] + [_POINTER] * _operand_count(problem)
    function.restype = ctypes.c_int
    words, swapped, threads = plan.words, plan.swapped, torch.get_num_threads
    first = 2 if problem.inp is None else 3
    without = (1.0, 0.0)

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        a, b = (tensors[1], tensors[0]) if swapped else (tensors[0], tensors[1])
        added = tensors[2].data_ptr() if first == 3 else None
        operands = [x.data_ptr() for x in tensors[first:]]
        address = ctypes.addressof(words)
        if function(address, out.data_ptr(), a.data_ptr(), b.data_ptr(), added, *(scalars or without), threads(), *operands):
            fail()

    return run
