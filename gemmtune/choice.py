"""What a backend offers: choices, each one runnable way to do a Problem."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import torch

from .device import DeviceInfo
from .numerics.bounds import Claims
from .problem import Problem
from .settings import Settings

T = TypeVar("T")

__all__ = [
    "Availability",
    "Backend",
    "Choice",
    "Claims",
    "Kernel",
    "Offers",
    "Prepared",
    "Refusal",
    "Run",
    "RunNew",
    "Scalars",
    "Status",
    "Tensors",
]


class Status(StrEnum):
    """How a choice fared. Everything but OK is a failure that is stored with its reason and left out of the pick."""

    OK = "ok"
    REFUSED = "refused"
    """Filtered before compilation: not legal for this problem and device."""
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    OUT_OF_RESOURCES = "out_of_resources"
    """Shared memory, registers or device memory were not enough at launch."""
    WRONG_RESULT = "wrong_result"
    RUNTIME_ERROR = "runtime_error"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    """The worker process died, or its device became unusable."""


Tensors = tuple[torch.Tensor, ...]
Scalars = tuple[float, ...]
Run = Callable[[torch.Tensor, Tensors, Scalars], None]
"""``run(out, tensors, scalars)``: write the problem's result into ``out``.

``tensors`` are those of ``Problem.operands``, in that order, then the epilogue's operands. ``scalars`` are the values of those that
the operation's row names: (alpha, beta), or none.
"""
RunNew = Callable[[Tensors, Scalars], torch.Tensor]


class Prepared:
    """A launch as plain data; the kinds are in ``toolchain.prepared``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A choice made ready in this process, for operands with exactly the problem's sizes, strides and alignment.

    ``run`` launches on the current stream and does not synchronise. ``run_new(tensors, scalars)`` does the same into a result of
    its own, for library kernels that are cheaper to call so; None means allocate and ``run``. ``prepared`` is the same launch as
    plain data, where that says it all: the native look-up does it without Python.
    """

    run: Run
    run_new: RunNew | None = None
    prepared: Prepared | None = None


@dataclass(frozen=True, kw_only=True)
class Choice(ABC):
    """One runnable way to do a Problem. Frozen and picklable: it travels to compile and measuring processes as it is.

    ``name`` is unique among the choices of a problem and is the one name everywhere: tables, logs, filters, store.
    """

    name: str
    backend: str
    problem: Problem = field(repr=False)
    claims: Claims = field(repr=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """What the log tells of the choice: tile, stages, warps, splits, … whatever the backend's configs have."""
    baseline: bool = field(default=False, repr=False)
    """This is what a caller without gemmtune gets: torch's own operation with its default settings."""

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """A hash over everything that makes the kernel: source, config and, for a library call, its name and arguments."""

    @property
    def compile_key(self) -> str | None:
        """Equal for choices that need the same compilation; None when there is nothing to compile."""
        return None

    @property
    def compiled(self) -> bool:
        """The artifact is there already: nothing to wait for."""
        return self.compile_key is None

    @property
    def obstacle(self) -> str | None:
        """Why its artifact is neither here nor can be made here, and what to do about it; None where nothing is in the way."""
        return None

    def compile(self) -> None:  # noqa: B027 - nothing to compile is the rule for library calls
        """Make the artifact that ``build`` loads, in the content-addressed cache. Runs in any process and touches no GPU.

        Raises:
            CompileError: the compiler refused it.
        """

    def load(self) -> Any:
        """What ``compile`` made (compiling if it is missing), loaded for the current device.

        It is the same for every choice of this ``compile_key``: a class of problems that differ in sizes shares it, and ``bind``
        makes it a kernel for the sizes of one. None where there is nothing to load, as for most library calls.
        """
        return None

    @abstractmethod
    def bind(self, loaded: Any) -> Kernel:
        """The kernel for the problem's sizes and strides: grid, arguments that no call changes, workspace.

        ``loaded`` is from ``load``, of this choice or of another one with its ``compile_key``. Nothing is compiled or loaded.
        """

    def build(self) -> Kernel:
        """Load the class's artifact and bind it to the problem. Raises what these raise."""
        return self.bind(self.load())

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:  # noqa: ARG002 - for those that have it
        """The same kernel, told the same, for a problem that differs in M alone; or why it is not legal there.

        What answers for many M serves calls with any number of rows (``problem.rows``). It may be of another ``compile_key`` there.
        """
        return f"{self.name} serves {self.problem} alone"

    def proved_at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """``at`` for an M of which it is known that the choice is legal there, and of the same ``compile_key``: in microseconds."""
        return self.at(problem, device)

    @property
    def legal_between(self) -> bool:
        """It is legal for each M between two where ``at`` finds it so, if all three have the same largest power of two up to 16.

        So it is where legality asks of M no more than its alignment and whether it is too small or too large.
        """
        return False

    def launch_variants(self) -> Sequence[Choice]:
        """Other choices with the same ``compile_key``: what a compiled kernel can be told at launch.

        They are not enumerated. The selector asks the fastest few choices for theirs; repeatedly, so that those which differ in one
        respect are enough.
        """
        return ()

    @property
    def axes(self) -> Mapping[str, Sequence[int]]:
        """Parameters with more values than a table of configs has a place for: what each may be, rising, by name. None as a rule.

        From the fastest choices that have such, the selector goes along these axes (``selector/minimize.py``).
        """
        return {}

    @property
    def parameters(self) -> Mapping[str, int]:
        """What the parameters of ``axes`` are here."""
        return {}

    def moved(self, parameters: Mapping[str, int], device: DeviceInfo) -> Choice | str:  # noqa: ARG002 - for those that have axes
        """The choice with other ``parameters``, all else alike; or why it is not legal."""
        return f"{self.name} has no axes"

    @property
    def own_results(self) -> bool:
        """Whether each result of ``run_new`` is known to be memory of its own; where it is not, verification calls twice to see."""
        return True

    @property
    def batch_invariant(self) -> bool:
        """The bits of a row of the result are the same whatever rows are beside it, and however many: at every M where ``at`` finds
        the choice legal. What says so is held to it before it is used for that.
        """
        return False

    def why_unordered(self, allowing: str) -> str:
        """Why its claims are not ``deterministic`` where the settings ask for it; ``allowing`` is the way to allow that."""
        return f"equal inputs need not give equal bits: deterministic forbids it ({allowing} allows it where torch does)"

    @property
    def packed_format(self) -> str | None:
        """The name of the layout in which this choice wants a prepacked b; None means b as it is."""
        return None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """b in ``packed_format``; ``run`` is then given this tensor in b's place."""
        return b


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A choice, or a whole backend, that was filtered before compilation, and why. ``count`` is how many choices it stands for."""

    name: str
    reason: str
    count: int = 1

    @classmethod
    def apart(cls, found: Iterable[T | str], whose: str, what: str) -> tuple[list[T], list[Refusal]]:
        """What is no reason, in order; and for the others ``counted``."""
        both = list(found)
        return [x for x in both if not isinstance(x, str)], cls.counted(whose, what, Counter(x for x in both if isinstance(x, str)))

    @classmethod
    def counted(cls, whose: str, what: str, reasons: Counter[str]) -> list[Refusal]:
        """One for each reason, the most frequent first: of 3 ``what``, such as configs, the name is ``whose:3 configs``."""
        return [cls(name=f"{whose}:{count} {what}", reason=reason, count=count) for reason, count in reasons.most_common()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What a backend has for a problem."""

    choices: Sequence[Choice] = ()
    refusals: Sequence[Refusal] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a backend can work on this machine; ``detail`` is its version, or what is missing and how to get it."""

    ok: bool
    detail: str


class Backend(Protocol):
    """A family of choices. ``BACKEND`` in each module of the table in backends.py is one of these."""

    name: str

    def available(self, device: DeviceInfo) -> Availability:
        """Can its choices be made and run here, on this device? For ``doctor``, and asked before ``enumerate`` when tuning."""
        ...

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """Is it among the backends when the settings name none?"""
        ...

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """The choices for a problem: pure where the backend's kernels are ours (no GPU, no compiler, any preset device)."""
        ...
