"""Report of an architecture matrix: counts, failures, text and JSON."""

import dataclasses
import fnmatch
import re
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from ..choice import Status
from ..device import DeviceInfo
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.remote import RemoteSession
from ..selector.samples import Sample
from ..selector.text_table import counted
from ..settings import Settings, current
from ..toolchain.compiled import CompiledChoice
from .inspection import Inspection


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One choice on the GPU: its result, or the reason for not running it."""

    choice: str
    problem: str
    result: Sample | str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixReport:
    """Results of all choices of an architecture."""

    arch: str
    search: str
    toolchains: tuple[str, ...]
    problems: int
    left_out: tuple[str, ...]
    """Backends that took no part, or only in part, with the reason."""
    inspections: tuple[Inspection, ...]
    way: "Way"
    """Way in which the kernels run on the present GPU."""
    device: str
    """Name of that GPU. Empty without one."""
    run: bool
    """True if running was requested."""
    ran: tuple[Ran, ...]
    seconds: float

    @property
    def executed(self) -> int:
        """Number of checks made: kernels compiled and inspected, and kernels verified on the GPU."""
        return sum(i.status is Status.OK for i in self.inspections) + len(self.results)

    @property
    def results(self) -> tuple[Sample, ...]:
        return tuple(r.result for r in self.ran if isinstance(r.result, Sample))

    @property
    def failures(self) -> tuple[str, ...]:
        """Texts of all failures. Empty if the architecture is clean."""
        lines = [] if self.inspections else [f"{self.arch}: no choice to compile; the settings' backends and filters exclude all"]
        lines += [f"{inspection}: {text}" for inspection in self.inspections for text in inspection.problems]
        for ran in self.ran:
            if isinstance(ran.result, Sample) and ran.result.status is not Status.OK:
                where = f"{ran.choice} for {ran.problem}, {self.arch} on {self.device}"
                lines.append(f"{where}: {ran.result.status}: {ran.result.reason}")
        if self.run and self.way.mode is None:
            lines.append(f"{self.arch} was to be run, but cannot be: {self.way.reason}")
        elif self.run and not self.results:
            lines.append(f"{self.arch} was to be run on {self.device}, but no kernel could be run")
        return tuple(lines)

    def text(self) -> str:
        """Return the report as readable text: counts, then the failures."""
        statuses = Counter(i.status for i in self.inspections)
        right = statuses.pop(Status.OK, 0)
        others = "".join(f", {count} {status.value}" for status, count in sorted(statuses.items()))
        lines = [
            f"{self.arch}: {counted(len(self.inspections), 'kernel')} of {counted(self.problems, 'problem')}, search {self.search} "
            f"({', '.join(self.toolchains)}), {self.seconds:.1f} s",
            f"  compiled      {right} of {len(self.inspections)}{others}",
            f"  resources     {self._resources()}",
            *(f"  instruction   {name}: {counted(count, 'kernel')}" for name, count in sorted(self._instructions().items())),
            *(f"  left out      {text}" for text in self.left_out),
            f"  run           {self._running()}",
        ]
        failures = self.failures
        lines.append(f"  {counted(len(failures), 'failure')}" + (":" if failures else ""))
        lines += [f"  - {text}".replace("\n", "\n    ") for text in failures]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["ran"] = [{"verdict" if name == "result" else name: value for name, value in x.items()} for x in data["ran"]]
        return data | {"executed": self.executed, "failures": list(self.failures), "instructions": dict(self._instructions())}

    def _resources(self) -> str:
        compiled = [i for i in self.inspections if i.status is Status.OK]
        shared = [i.shared_bytes for i in compiled if i.shared_bytes is not None]
        registers = [i.registers for i in compiled if i.registers is not None]
        spilled = [i for i in compiled if i.stack_bytes]
        text = f"shared memory up to {max(shared, default=0)} bytes"
        if registers:
            text += f", registers up to {max(registers)}, {counted(len(spilled), 'kernel')} with a stack"
            if spilled:
                most, share = max(i.stack_bytes or 0 for i in spilled), max(i.spilled_share for i in spilled)
                text += f" (up to {most} bytes and {share:.0%} of the main loop)"
        unread = len(compiled) - len(registers)
        return text + (f"; registers and spills of {counted(unread, 'kernel')} were not read: no cuobjdump here" if unread else "")

    def _instructions(self) -> Counter[str]:
        """Return the number of kernels for each multiplying instruction, without its shape."""
        return Counter(
            name
            for i in self.inspections
            for name in {
                re.sub(r"(?<=[._])m?\d+[nx]\d+[kx]\d+[._]?", "", mnemonic).rstrip("._")
                for mnemonic, _ in i.instructions
                if any(fnmatch.fnmatchcase(mnemonic, pattern) for pattern in i.expected)
            }
        )

    def _running(self) -> str:
        if self.way.mode is None:
            return f"no: {self.way.reason}"
        how = "natively" if self.way.mode == "native" else f"from PTX for {self.arch}"
        if not self.run:
            return f"not asked for: {self.device} can, {how}"
        results = self.results
        right = sum(result.status is Status.OK for result in results)
        text = f"{right} of {len(results)} right on {self.device}, {how}"
        too_large = len(self.ran) - len(results)
        return text + (f"; {counted(too_large, 'kernel')} left out: not enough shared memory" if too_large else "")


FIRST_SPECIFIC = 90
"""Capability from which on kernels use instructions of one architecture only (``sm_90a``), which no newer one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way in which kernels of an architecture run on a device: ``native``, ``forward`` (the driver translates PTX), or None."""

    mode: Literal["native", "forward"] | None
    reason: str = ""
    """Reason for a mode of None."""


def how_to_run(arch: str, device: DeviceInfo | None) -> Way:
    """Return the way in which kernels compiled for ``arch`` run on ``device``, which is None without a GPU."""
    if device is None or device.type == "cpu":
        return Way(mode=None, reason=f"no GPU here: {arch} was compiled for and not run")
    if device.arch == arch:
        return Way(mode="native")
    if device.type == "hip" or not arch.startswith("sm"):
        return Way(mode=None, reason=f"{arch} on {device.name} ({device.arch}): HIP kernels run on one architecture only")
    capability = int(arch.removeprefix("sm"))
    if device.capability < capability:
        return Way(mode=None, reason=f"{device.name} is {device.arch}, which is older than {arch}")
    if capability >= FIRST_SPECIFIC:
        own = f"{arch} uses instructions of its own (PTX target sm_{capability}a), which run on {arch} alone"
        return Way(mode=None, reason=f"{device.name} is {device.arch}; {own}")
    return Way(mode="forward")


class Runner(AbstractContextManager["Runner"]):
    """Context manager that verifies choices in a worker process. A crash, a hang or an illegal access costs one choice."""

    def __init__(self, device: DeviceInfo, settings: Settings | None = None) -> None:
        self._device = device
        self._settings = dataclasses.replace(settings or current(), verify=True)
        self._problem: Problem | None = None
        self._session: RemoteSession | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, choice: CompiledChoice) -> Sample:
        """Build and verify a choice, from its PTX if the device is newer. An error of the kernel becomes the sample's status.

        It is CRASHED or TIMED_OUT if the worker dies. Consecutive choices of one problem share a session. Raises UnavailableError
        if the device cannot run kernels of this architecture.
        """
        way = how_to_run(choice.arch, self._device)
        if way.mode is None:
            raise UnavailableError(f"{choice.name}: {way.reason}")
        if self._session is None or self._problem != choice.problem:
            self.close()
            self._problem = choice.problem
            self._session = RemoteSession(choice.problem, self._device, self._settings)
        return self._session.prove(choice.forward() if way.mode == "forward" else choice)

    def close(self) -> None:
        """Free the operands of the last problem and return the worker."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
