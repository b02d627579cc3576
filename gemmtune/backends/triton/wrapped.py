"""Choices whose kernel multiplies for another problem. Some first run a second kernel that copies operands."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...choice import Kernel, Run, Scalars, Tensors
from ...device import DeviceInfo
from ...problem import Problem
from ...toolchain.compiled import Artifact
from ...toolchain.triton_kernels import Argument, Compilation, Source
from .artifact import artifact
from .build import KernelChoice, KernelsChoice
from .descriptors import Address
from .launch import Launcher, launcher_of

COPY_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Launch of a kernel that copies operands of type ``dtype``, given as addresses of each and its copy, then ``constants``.

    ``elements`` has (index among a call's tensors, elements of the copy) for each operand.
    """

    source: Source
    grid: tuple[int, int, int]
    dtype: torch.dtype
    elements: tuple[tuple[int, int], ...]
    constants: tuple[int, ...]


def copying_source(text: str, function: str, arguments: Iterable[tuple[str, str, int]]) -> Source:
    """Return the source of a copying kernel. Each argument is (name, type, divisor)."""
    given = (Argument(name=name, type=kind, source=("copying", name), divisor=divisor) for name, kind, divisor in arguments)
    return Source(text=text, function=function, arguments=tuple(given))


@dataclass(frozen=True, kw_only=True)
class WrappedChoice(KernelsChoice):
    """Choice that runs ``inner``, a kernel for another problem, after ``copying`` if there is one."""

    suffix: ClassVar[str]
    """Suffix added to the name of ``inner``."""
    inner: KernelChoice = field(repr=False)

    @classmethod
    def around(cls, problem: Problem, inner: KernelChoice, info: dict[str, Any], **fields: Any) -> Self:
        """Return the choice that computes ``problem`` with ``inner``. ``info`` is added to the info of ``inner``."""
        return cls(
            name=f"{inner.name}{cls.suffix}",
            backend=inner.backend,
            problem=problem,
            claims=inner.claims,
            info={**inner.info, **info},
            inner=inner,
            **fields,
        )

    @property
    def batch_invariant(self) -> bool:
        return self.inner.batch_invariant

    @functools.cached_property
    def copying(self) -> Copying | None:
        """Copies made before ``inner`` runs, or None."""
        return None

    @functools.cached_property
    def kernels(self) -> tuple[Compilation, ...]:
        if self.copying is None:
            return self.inner.kernels
        copies = Compilation(name=self.name, source=self.copying.source, warps=COPY_WARPS, target=self.inner.target)
        return (copies, *self.inner.kernels)

    @property
    def content_hash(self) -> str:
        helper = self.kernels[0].key if self.copying else ""
        return hashlib.sha256(f"{self.inner.content_hash}{self.suffix} after {helper}".encode()).hexdigest()

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        return (*(artifact(kernel.compile()) for kernel in self.kernels[:-1]), *self.inner.artifacts(device))

    def launch_variants(self) -> Sequence[Self]:
        return tuple(
            dataclasses.replace(self, name=f"{inner.name}{self.suffix}", info={**self.info, "pdl": inner.config.pdl}, inner=inner)
            for inner in self.inner.launch_variants()
        )

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the current device. Each call allocates the copies from torch's allocator."""
        inner = self.inner.bind(loaded[-1:])
        if self.copying is None:
            return inner
        call = launcher_of(loaded[0], self.copying.grid, pdl=self.inner.config.pdl)
        return Kernel(run=_after_copies(call, self.copying, inner.run, torch.cuda.current_device()))


def _after_copies(call: Launcher, copying: Copying, inner: Run, device: int) -> Run:
    """Return a ``Run`` that copies, then runs ``inner`` on the copies."""
    dtype, constants = copying.dtype, copying.constants
    total = sum(count for _, count in copying.elements)
    steps = [(place, count * dtype.itemsize) for place, count in copying.elements]
    stream_of = torch._C._cuda_getCurrentRawStream
    where = torch.device("cuda", device)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        operands: list[Any] = list(tensors)
        buffer = torch.empty(total, dtype=dtype, device=where)
        address = buffer.data_ptr()
        pointers: list[int] = []
        for place, step in steps:
            pointers += (operands[place].data_ptr(), address)
            operands[place] = Address(address, dtype)
            address += step
        values = (*pointers, *constants)
        arguments: tuple[Any, ...] = (values,) if call.packed else values
        call.function(*call.grid, stream_of(device), *call.middle, *arguments)
        inner(out, tuple(operands), scalars)

    return run
