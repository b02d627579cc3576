"""Exceptions that gemmtune raises on purpose.

    GemmtuneError
    ├── InvalidProblemError (RuntimeError, ValueError)   operands that do not fit together, or that no GEMM supports
    ├── EpilogueError (ValueError)                       an epilogue function that is not pointwise, or uses an unknown function
    ├── SettingsError (ValueError)                       an unknown setting, or an illegal value
    ├── StoreError (RuntimeError)                        a store file that cannot be used as requested
    ├── CompileError (RuntimeError)                      a template instance that its compiler refused
    ├── UnavailableError (RuntimeError)                  a backend, compiler or device that this machine lacks
    ├── TraitsError (ValueError)                         an invalid declaration of a GEMM under test
    ├── CaseError (ValueError)                           an invalid id of a case of the conformance suite
    ├── SubjectError (RuntimeError)                      a GEMM under test that cannot be loaded or called at all
    ├── ConformanceError (RuntimeError)                  a run of the conformance suite with impossible options
    ├── GateError (RuntimeError)                         a performance gate with impossible options
    ├── FleetError (RuntimeError)                        jobs of a fleet that failed, after all others were done
    ├── ShortMemoryError (RuntimeError)                  operands that do not fit into the free memory
    ├── ErrorFromChoice (RuntimeError)                   a choice that failed while it ran
    └── NoValidChoicesError (RuntimeError)               every choice for a problem was left out

Messages say what was got, what was expected, and what to do about it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self


class GemmtuneError(Exception):
    """Base of all exceptions of this package."""


@contextmanager
def raised_as(
    kind: Callable[[str], Exception], caught: type[Exception] | tuple[type[Exception], ...] = GemmtuneError, *, before: str = ""
) -> Iterator[None]:
    """Raise exceptions of the block, of the ``caught`` types, as another one: their text, with ``before`` in front of it."""
    try:
        yield
    except caught as error:
        raise kind(f"{before}{error}") from error


class InvalidProblemError(GemmtuneError, RuntimeError, ValueError):
    """Operands that do not describe a GEMM. A RuntimeError, which torch raises for bad shapes, and also a ValueError."""


class EpilogueError(GemmtuneError, ValueError):
    """Epilogue function that cannot be expressed. The message names the function that prevents it."""


class SettingsError(GemmtuneError, ValueError):
    """Unknown setting or GEMMTUNE_* variable, or an illegal value."""


class StoreError(GemmtuneError, RuntimeError):
    """Failure to read, write, import or merge the store as requested."""


class UnavailableError(GemmtuneError, RuntimeError):
    """Requested backend, compiler or device that this machine lacks."""


class TraitsError(GemmtuneError, ValueError):
    """Declaration of a GEMM under test with an unknown name or an illegal value."""


class CaseError(GemmtuneError, ValueError):
    """Invalid id or field of a case of the conformance suite."""


class SubjectError(GemmtuneError, RuntimeError):
    """GEMM under test that cannot be loaded, or lacks all requested operations."""


class ConformanceError(GemmtuneError, RuntimeError):
    """Run of the conformance suite that is impossible: a wrong option, or a file that cannot be read or written."""


class ErrorWithData(GemmtuneError):
    """Base of errors whose attributes are the arguments of their constructor, by which another process makes them again."""

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), tuple(value for name, value in vars(self).items() if not name.startswith("_"))


class CompileError(ErrorWithData, RuntimeError):
    """Template instance that a compiler refused. Carries the last lines of the compiler's output."""

    def __init__(self, name: str, output: str, *, max_lines: int = 20) -> None:
        self.name = name
        self.output = "\n".join(output.strip().splitlines()[-max_lines:])
        super().__init__(f"{name} did not compile:\n{self.output}")


class GateError(GemmtuneError, RuntimeError):
    """Performance gate that cannot run: a wrong option, or an invalid baseline file."""


class FleetError(ErrorWithData, RuntimeError):
    """Failed jobs of a fleet. ``failures`` holds (job, reason) for each. The measurements of all others are stored."""

    def __init__(self, failures: Sequence[tuple[str, str]]) -> None:
        self.failures = tuple(failures)
        lines = "\n".join(f"  {job}: {reason}" for job, reason in self.failures)
        super().__init__(
            f"fleet: got {len(self.failures)} jobs that failed, expected none; all others are stored, and the same call tries "
            f"these again:\n{lines}"
        )


class ShortMemoryError(ErrorWithData, RuntimeError):
    """Operands of a problem that do not fit into the free memory of a device."""

    def __init__(self, problem: str, device: str, needed_bytes: int, free_bytes: int) -> None:
        self.problem = problem
        self.device = device
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(
            f"{problem}: got {free_bytes:,} bytes of free memory on {device}, expected at least {needed_bytes:,} for the operands; "
            "take smaller sizes, free memory, raise the container's limit, or use another machine"
        )


class ErrorFromChoice(ErrorWithData, RuntimeError):
    """Choice that failed while it ran. Names the choice and its problem."""

    def __init__(self, choice: str, problem: str, reason: str) -> None:
        self.choice = choice
        self.problem = problem
        self.reason = reason
        super().__init__(f"{reason}\n  from choice {choice}\n  for problem {problem}")


MORE_BACKENDS = "Enable more backends (settings.backends)"
ONLY_COMPILED = "only kernels that were compiled before"
"""Part of the availability of a backend that cannot compile here."""
DISABLED = "the setting disable is on (GEMMTUNE_DISABLE)"
"""Reason why torch runs everything."""
ELSE_TORCH = f"{MORE_BACKENDS}, or set fallback_to_aten to run torch instead."
"""Remedy if torch may run the call."""


class NoValidChoicesError(ErrorWithData, RuntimeError):
    """Lack of any choice for a problem.

    ``left_out`` holds (choice, status, reason) for every considered choice, and ``remedy`` is a sentence that says what to
    do.
    """

    def __init__(self, problem: str, left_out: Sequence[tuple[str, str, str]], remedy: str = ELSE_TORCH) -> None:
        self.problem = problem
        self.left_out = tuple(left_out)
        self.remedy = remedy
        lines = [f"  {choice}: {status}: {reason}" for choice, status, reason in self.left_out]
        detail = "\n".join(lines) if lines else "  no enabled backend offers a choice for it"
        super().__init__(f"no valid choice for {problem}:\n{detail}\n{remedy}")
