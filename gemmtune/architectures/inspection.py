"""Inspection of choices compiled in worker processes: resources, spills and instructions of their kernels."""

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..choice import Status
from ..device import DeviceInfo, preset
from ..errors import CompileError
from ..selector.precompile import Compilation
from ..selector.samples import Sample
from ..settings import Settings, current
from ..toolchain.compiled import Artifact, CompiledChoice

MOST_STACK_BYTES = 128
"""Local memory of one thread that is always accepted: a few spilled registers."""
MOST_SPILLED_SHARE = 1 / 8
"""Maximum share of spill instructions in the main loop, for kernels with more local memory than that."""
LOOSE = 1.5
"""Maximum ratio of predicted to real shared memory, for a large kernel."""
LARGE_BYTES = 49152
ALLOCATED_TOGETHER = 8
"""Granularity in which registers of a thread are allocated (CUDA occupancy calculator; CDNA 3 ISA)."""
MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_|[DHIQ]G?MMA\b)[\w.:]*")
"""Matrix instructions in PTX, amdgcn and SASS."""
SCALAR = re.compile(r"\b(?:fma\.rn[\w.:]*|v_(?:pk_)?fmac?_\w+|[DF]FMA2?\b[\w.]*)")
"""Instructions that multiply and add single numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of compiling a choice for an architecture. Numbers are the maximum over its kernels, or None if unknown."""

    choice: str
    backend: str
    problem: str
    arch: str
    status: Status
    """Status of the compilation. It is OK even if the compiled kernel has ``problems``."""
    shared_bytes: int | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    spilled_share: float = 0.0
    instructions: tuple[tuple[str, int], ...] = ()
    """Multiplying instructions and their numbers in the code."""
    expected: tuple[str, ...] = ()
    """Expected multiplying instructions. ``*`` stands for any text."""
    problems: tuple[str, ...] = ()
    """Faults of the kernels. Empty if there are none."""

    def __str__(self) -> str:
        return f"{self.choice} for {self.problem} on {self.arch}"


def compile_and_inspect(choice: CompiledChoice, settings: Settings | None = None) -> Inspection:
    """Compile a choice in a worker, and inspect it. Raises UnavailableError unless it is for a GPU with a preset."""
    [inspection] = inspect_choices([choice], settings)
    return inspection


def inspect_choices(choices: Sequence[CompiledChoice], settings: Settings | None = None) -> Iterator[Inspection]:
    """Yield ``compile_and_inspect`` of each choice, in order, with compilers on every core. Group choices of one problem."""
    with Compilation(choices, settings or current()) as compilation:
        for _, group in itertools.groupby(choices, key=lambda choice: choice.problem):
            for choice in group:
                failures = compilation.wait([choice])
                yield _inspect(choice, failures.get(choice.name))


def _inspect(choice: CompiledChoice, failure: Sample | None) -> Inspection:
    plain = Inspection(choice=choice.name, backend=choice.backend, problem=str(choice.problem), arch=choice.arch, status=Status.OK)

    def failed(status: Status, reason: str) -> Inspection:
        return replace(plain, status=status, problems=(f"{status.value}: {reason}",))

    if failure is not None:
        return failed(failure.status, failure.reason)
    device = preset(choice.arch)
    try:
        artifacts = choice.artifacts(device)
    except CompileError as error:
        return failed(Status.COMPILE_ERROR, error.output)
    except RuntimeError as error:  # no assembly text was kept, or a tool could not read the binary
        return failed(Status.RUNTIME_ERROR, str(error))
    found = Counter(mnemonic for artifact in artifacts for mnemonic in _multiplying(artifact))
    return replace(
        plain,
        arch=device.arch,
        shared_bytes=max(artifact.shared_bytes for artifact in artifacts),
        registers=_largest([artifact.registers for artifact in artifacts]),
        stack_bytes=_largest([artifact.stack_bytes for artifact in artifacts]),
        spilled_share=max(artifact.spilled_share for artifact in artifacts),
        instructions=tuple(sorted(found.items())),
        expected=tuple(artifact.expected for artifact in artifacts if artifact.expected is not None),
        problems=tuple(f"{artifact.kernel}: {text}" for artifact in artifacts for text in faults(artifact, device)),
    )


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _multiplying(artifact: Artifact) -> list[str]:
    return MATRIX.findall(artifact.code) + SCALAR.findall(artifact.code)


def faults(artifact: Artifact, device: DeviceInfo) -> Iterator[str]:
    """Yield the faults of one kernel for ``device``: first of its resources, then of its instructions."""
    shared, predicted = artifact.shared_bytes, artifact.predicted_bytes
    if (reason := device.why_no_smem(shared)) is not None:
        yield reason
    if predicted is not None and shared > predicted:
        yield f"shared memory: {shared} bytes, predicted at most {predicted}"
    if predicted is not None and artifact.slack_bytes is not None:
        close = max(LOOSE * shared, artifact.slack_bytes + 1024, LARGE_BYTES)
        if predicted > close:
            yield f"shared memory: {shared} bytes, but {predicted} predicted: too loose"
    spilled, share = artifact.stack_bytes or 0, artifact.spilled_share
    if spilled > MOST_STACK_BYTES and share > MOST_SPILLED_SHARE:
        yield f"registers: {spilled} bytes of a thread spilled, {share:.0%} of the main loop's instructions move them"
    if artifact.registers is not None:
        allocated = -(-artifact.registers // ALLOCATED_TOGETHER) * ALLOCATED_TOGETHER * artifact.threads
        if allocated > device.registers_per_sm:
            yield f"registers: {artifact.threads} threads of {artifact.registers}, a multiprocessor has {device.registers_per_sm}"
    # The expected instruction must be present, and no matrix instruction of another kind or type.
    expected = artifact.expected
    found = sorted(set(_multiplying(artifact)))
    if expected is None:
        if found:
            yield f"instructions: expected none that multiplies, found {', '.join(found)}"
        return
    foreign = [m for m in found if MATRIX.match(m) and not fnmatch.fnmatchcase(m, expected)]
    if not any(fnmatch.fnmatchcase(m, expected) for m in found):
        yield f"instructions: expected {expected}, found {', '.join(found) or 'none that multiplies'}"
    elif foreign:
        yield f"instructions: expected no matrix instruction but {expected}, found {', '.join(foreign)} too"
