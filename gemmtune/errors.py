"""Every exception that gemmtune raises on purpose.

    GemmtuneError
    ├── InvalidProblemError (RuntimeError, ValueError)   operands that do not fit together, or that no GEMM takes
    ├── EpilogueError (ValueError)                       an epilogue function that is not pointwise, or uses an unknown function
    ├── SettingsError (ValueError)                       an unknown setting, or a value outside the legal ones
    ├── StoreError (RuntimeError)                        a store file that cannot be used as asked
    ├── CompileError (RuntimeError)                      a template instance that its compiler refused
    ├── UnavailableError (RuntimeError)                  a backend, compiler or device that this machine lacks
    ├── TraitsError (ValueError)                         a declaration of a GEMM under test that means nothing
    ├── CaseError (ValueError)                           the id of a case of the conformance suite that is none
    ├── SubjectError (RuntimeError)                      a GEMM under test that cannot be loaded or called at all
    ├── ConformanceError (RuntimeError)                  a run of the conformance suite that cannot be made as asked
    ├── GateError (RuntimeError)                         a performance gate that cannot be run as asked
    ├── ErrorFromChoice (RuntimeError)                   a choice that failed while it ran
    └── NoValidChoicesError (RuntimeError)               every choice for a problem was left out

Messages say what was got, what was expected, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class GemmtuneError(Exception):
    """Base of all exceptions of this package."""


class InvalidProblemError(GemmtuneError, RuntimeError, ValueError):
    """The operands do not describe a GEMM. A RuntimeError, as torch raises for bad shapes, and a ValueError as well."""


class EpilogueError(GemmtuneError, ValueError):
    """The epilogue function cannot be expressed; the message names the function that stands in the way."""


class SettingsError(GemmtuneError, ValueError):
    """A setting or GEMMTUNE_* variable is unknown or has a value outside the legal ones."""


class StoreError(GemmtuneError, RuntimeError):
    """The store cannot be read, written, imported or merged as asked."""


class UnavailableError(GemmtuneError, RuntimeError):
    """Something that was asked for by name (a backend, a compiler, a device) is not on this machine."""


class TraitsError(GemmtuneError, ValueError):
    """A GEMM under test declares something unknown, or with a value outside the legal ones."""


class CaseError(GemmtuneError, ValueError):
    """The id or a field of a case of the conformance suite is not one."""


class SubjectError(GemmtuneError, RuntimeError):
    """A GEMM under test cannot be loaded, or has none of the operations that were asked for."""


class ConformanceError(GemmtuneError, RuntimeError):
    """A run of the conformance suite cannot be made as asked: a wrong option, or a file of it that cannot be read or written."""


class CompileError(GemmtuneError, RuntimeError):
    """A compiler refused a template instance. Carries the last lines of what the compiler printed."""

    def __init__(self, name: str, output: str, *, max_lines: int = 20) -> None:
        self.name = name
        self.output = "\n".join(output.strip().splitlines()[-max_lines:])
        super().__init__(f"{name} did not compile:\n{self.output}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        return (type(self), (self.name, self.output))


class GateError(GemmtuneError, RuntimeError):
    """A performance gate cannot be run as asked: a wrong option, or a baseline file that is none."""


class ErrorFromChoice(GemmtuneError, RuntimeError):
    """A choice failed while it ran. Names the choice and the problem that it was given."""

    def __init__(self, choice: str, problem: str, reason: str) -> None:
        self.choice = choice
        self.problem = problem
        self.reason = reason
        super().__init__(f"{reason}\n  from choice {choice}\n  for problem {problem}")

    def __reduce__(self) -> tuple[type[ErrorFromChoice], tuple[str, str, str]]:
        return (type(self), (self.choice, self.problem, self.reason))


ELSE_TORCH = "Enable more backends (settings.backends), or set fallback_to_aten to run torch instead."
"""The remedy where a call may be torch's."""


class NoValidChoicesError(GemmtuneError, RuntimeError):
    """Nothing is left to run for a problem. ``left_out`` holds (choice, status, reason) for every choice that was considered,
    ``remedy`` is a sentence that says what to do."""

    def __init__(self, problem: str, left_out: Sequence[tuple[str, str, str]], remedy: str = ELSE_TORCH) -> None:
        self.problem = problem
        self.left_out = tuple(left_out)
        self.remedy = remedy
        lines = [f"  {choice}: {status}: {reason}" for choice, status, reason in self.left_out]
        detail = "\n".join(lines) if lines else "  no enabled backend offers a choice for it"
        super().__init__(f"no valid choice for {problem}:\n{detail}\n{remedy}")

    def __reduce__(self) -> tuple[type[NoValidChoicesError], tuple[str, tuple[tuple[str, str, str], ...], str]]:
        return (type(self), (self.problem, self.left_out, self.remedy))
