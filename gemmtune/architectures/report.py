"""Report of an architecture matrix: counts, failures, text and JSON."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..choice import Status
from ..selector.samples import Sample
from ..selector.text_table import counted
from .inspection import Inspection
from .running import Way


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
    way: Way
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
        """Results of the choices that ran."""
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
        """Return everything as plain values."""
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
