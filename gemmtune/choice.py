"""Choices, the runnable solutions of a Problem that backends offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import torch

from .device import DeviceInfo
from .numerics.bounds import Claims as Claims
from .problem import Problem
from .settings import Settings

T = TypeVar("T")


class Status(StrEnum):
    """Outcome of a choice. Every value except OK is a failure, which is stored with its reason and excluded from the pick."""

    OK = "ok"
    REFUSED = "refused"
    """Filtered before compilation: not legal for this problem and device."""
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    OUT_OF_RESOURCES = "out_of_resources"
    """Shared memory, registers or device memory were not enough at launch."""
    WRONG_RESULT = "wrong_result"
    TOO_FAST = "too_fast"
    """Its time is shorter than the measured limits of the hardware allow."""
    DISHONEST = "dishonest"
    """In a process of its own it computes something else, takes longer, or does more than compute."""
    RUNTIME_ERROR = "runtime_error"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    """The worker process died, or its device became unusable."""


Tensors = tuple[torch.Tensor, ...]
Scalars = tuple[float, ...]
Run = Callable[[torch.Tensor, Tensors, Scalars], None]
"""Function ``run(out, tensors, scalars)`` that writes the problem's result into ``out``.

``tensors`` are those of ``Problem.operands``, in that order, then the epilogue's operands. ``scalars`` are the values that
the operation's row names: (alpha, beta), or none.
"""
RunNew = Callable[[Tensors, Scalars], torch.Tensor]


class Prepared:
    """Launch as plain data. Its kinds are in ``toolchain.prepared``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Choice prepared in this process for operands with exactly the problem's sizes, strides and alignment.

    ``run`` launches on the current stream and does not synchronise. ``run_new(tensors, scalars)`` does the same into a new
    result, for library kernels that are cheaper to call so. None means to allocate and ``run``. ``prepared`` is the same
    launch as plain data, if plain data can describe it. The native look-up then launches without Python.
    """

    run: Run
    run_new: RunNew | None = None
    prepared: Prepared | None = None


@dataclass(frozen=True, kw_only=True)
class Choice(ABC):
    """Runnable solution of a Problem. Frozen and picklable, so it can be sent to compile and measuring processes.

    ``name`` is unique among the choices of a problem, and tables, logs, filters and the store all use it.
    """

    name: str
    backend: str
    problem: Problem = field(repr=False)
    claims: Claims = field(repr=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Facts for the log: tile, stages, warps, splits, … or other parameters of the backend's configs."""
    baseline: bool = field(default=False, repr=False)
    """Mark of what a caller without gemmtune gets: torch's operation with its default settings."""

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """Hash of everything that makes the kernel: source, config and, for a library call, its name and arguments."""

    @property
    def compile_key(self) -> str | None:
        """Key that is equal for choices that need the same compilation, or None if there is nothing to compile."""
        return None

    @property
    def compiled(self) -> bool:
        """True if the artifact exists and nothing has to be compiled."""
        return self.compile_key is None

    @property
    def obstacle(self) -> str | None:
        """Reason why the artifact neither exists nor can be made here, with a remedy, or None."""
        return None

    def compile(self) -> None:  # noqa: B027 - library calls usually have nothing to compile
        """Make the artifact that ``build`` loads, in the content-addressed cache. Runs in any process and touches no GPU.

        Raises:
            CompileError: the compiler refused it.
        """

    def compilation(self) -> Callable[[], object]:
        """Return ``compile`` as a function for another process. It starts in a tenth of the time if the function needs no torch."""
        return self.compile

    def load(self) -> Any:
        """Load the artifact of ``compile`` (made if it is missing) for the current device.

        It is the same for every choice with this ``compile_key``. Problems that differ in sizes share it, and ``bind`` makes
        a kernel of it for one problem's sizes. None means that there is nothing to load, as for most library calls.
        """
        return None

    @abstractmethod
    def bind(self, loaded: Any) -> Kernel:
        """Return the kernel for the problem's sizes and strides, with grid, constant arguments and workspace.

        ``loaded`` comes from ``load`` of this choice or of another one with its ``compile_key``. Nothing is compiled or
        loaded.
        """

    def build(self) -> Kernel:
        """Load the artifact and bind it to the problem. Raises the exceptions of ``load`` and ``bind``."""
        return self.bind(self.load())

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:  # noqa: ARG002 - subclasses use them
        """Return the same kernel with the same parameters for a problem that differs in M alone, or why it is illegal there.

        A choice that supports many M serves calls with any number of rows. It may have another ``compile_key`` there.
        """
        return f"{self.name} serves {self.problem} only"

    def proved_at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """Return ``at`` within microseconds, for an M where the choice is known to be legal with the same ``compile_key``."""
        return self.at(problem, device)

    @property
    def legal_between(self) -> bool:
        """True if legality at two M implies legality between them.

        The M between must have the same largest power of two up to 16 as both. This holds if legality depends on the
        alignment of M and on limits of M only.
        """
        return False

    @property
    def one_kernel(self) -> bool:
        """True if ``at`` keeps the ``compile_key`` for every M at which it finds the choice legal."""
        return False

    def launch_variants(self) -> Sequence[Choice]:
        """Return other choices with the same ``compile_key``: the launch parameters of a compiled kernel.

        They are not enumerated. The selector asks again for the fastest few, so variants that differ in one respect are enough.
        """
        return ()

    def with_parts(self, count: int, device: DeviceInfo) -> Sequence[Choice]:  # noqa: ARG002 - subclasses that divide K use them
        """Return the legal choices with K divided into ``count`` parts and everything else equal."""
        return ()

    @property
    def estimate_us(self) -> float | None:
        """The time of one launch by its backend's model, in µs. None without a model."""
        return None

    @property
    def own_results(self) -> bool:
        """True if each result of ``run_new`` is known to be separate memory. Otherwise verification calls it twice to find out."""
        return True

    @property
    def batch_invariant(self) -> bool:
        """True if the bits of a row of the result depend on no other rows and on no number of rows.

        This holds for every M where ``at`` finds the choice legal. It is verified before the choice is used for batch
        invariance. ``claims.reduction`` says in addition which other choices give the same bits.
        """
        return False

    @property
    def undeclared(self) -> bool:
        """True if its claims are assumed, because its author declares nothing. Its calls are observed before it is used."""
        return False

    def why_unordered(self, allowing: str) -> str:
        """Return why it is not ``deterministic`` although the settings require it. ``allowing`` names the setting to change."""
        return f"equal inputs need not give equal bits: deterministic forbids it ({allowing} allows it where torch does)"

    @property
    def packed_format(self) -> str | None:
        """Name of the layout in which this choice needs a prepacked b, or None if b stays unchanged."""
        return None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """Return b in ``packed_format``. ``run`` then gets this tensor instead of b."""
        return b


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Choice, or a whole backend, that was filtered before compilation, and the reason. ``count`` is the number of choices."""

    name: str
    reason: str
    count: int = 1

    @classmethod
    def apart(cls, found: Iterable[T | str], whose: str, what: str) -> tuple[list[T], list[Refusal]]:
        """Separate results from reasons: return the results in order, and the reasons as ``counted``."""
        both = list(found)
        return [x for x in both if not isinstance(x, str)], cls.counted(whose, what, Counter(x for x in both if isinstance(x, str)))

    @classmethod
    def counted(cls, whose: str, what: str, reasons: Counter[str]) -> list[Refusal]:
        """Return one refusal for each reason, the most frequent first.

        For 3 ``what``, such as configs, its name is ``whose:3 configs``.
        """
        return [cls(name=f"{whose}:{count} {what}", reason=reason, count=count) for reason, count in reasons.most_common()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Choices and refusals of a backend for a problem."""

    choices: Sequence[Choice] = ()
    refusals: Sequence[Refusal] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Availability of a backend on this machine. ``detail`` is its version, or the missing part and how to get it."""

    ok: bool
    detail: str


class Backend(Protocol):
    """Family of choices. Each module of the table in backends/table.py has one as ``BACKEND``."""

    name: str

    def available(self, device: DeviceInfo) -> Availability:
        """Return if its choices can be made and run on this device. ``doctor`` and tuning call it before ``enumerate``."""
        ...

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """Return True if the backend takes part when the settings name no backends."""
        ...

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the choices for a problem.

        The function is pure if the backend's kernels are ours: no GPU, no compiler, any preset device.
        """
        ...
