"""Baselines: for each problem the ratio of gemmtune's pick to torch, as one machine had it, in a file that people review.

``<folder>/<slug of the device>.json``; a ratio carries over to another machine of the same kind, a time does not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..device import DeviceInfo
from ..errors import GateError
from ..problem import Problem
from ..settings import Timing
from .statistics import Estimate

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What was measured of one problem: the mean and the spread over ``processes`` processes of the log ratio to torch."""

    problem: str
    """``str`` of the problem, for people."""
    key: Mapping[str, Any]
    """``Problem.to_json``."""
    timing: Timing
    pick: str
    log_ratio: float
    spread: float
    processes: int
    versions: Mapping[str, str]
    """The machine's fingerprint: torch, driver, …"""

    def __post_init__(self) -> None:
        numbers = (self.log_ratio, self.spread)
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers) or self.spread < 0:
            raise GateError(f"{self.problem}: got log_ratio {self.log_ratio!r} and spread {self.spread!r}, expected finite numbers")
        if not isinstance(self.processes, int) or self.processes < 2:
            raise GateError(f"{self.problem}: processes: got {self.processes!r}, expected a whole number of at least 2")

    @property
    def ratio(self) -> float:
        """The pick's time over torch's."""
        return math.exp(self.log_ratio)

    @property
    def estimate(self) -> Estimate:
        """The values as the rule takes them."""
        return Estimate(mean=self.log_ratio, spread=self.spread, count=self.processes)

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for equal problems, measured in the same way."""
        return (_canonical(self.key), self.timing)


@dataclass(slots=True, kw_only=True)
class Baselines:
    """The baselines of one kind of device, read from ``path`` if that is there."""

    path: Path
    device: Mapping[str, str]
    entries: dict[tuple[str, str], Baseline] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str, device: DeviceInfo) -> Baselines:
        """Those of a device; empty without a file.

        Raises:
            GateError: the file cannot be read, or is no file of baselines.
        """
        path = Path(folder) / f"{slug(device)}.json"
        found = cls(path=path, device={"name": device.name, "arch": device.arch})
        if not path.exists():
            return found
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GateError(f"baselines: {path} cannot be read: {error}; put it right, or remove it") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
            raise GateError(f"baselines: {path}: expected an object with format {FORMAT} and a list of entries")
        names = {f.name for f in dataclasses.fields(Baseline)}
        for number, entry in enumerate(data["entries"], 1):
            if not isinstance(entry, dict) or set(entry) != names or not isinstance(entry["key"], dict):
                got = f"fields {', '.join(sorted(entry))}" if isinstance(entry, dict) else repr(entry)
                raise GateError(f"baselines: {path}: entry {number}: got {got}, expected exactly {', '.join(sorted(names))}")
            try:
                found.put(Baseline(**entry))
            except GateError as error:
                raise GateError(f"baselines: {path}: entry {number}: {error}") from None
        return found

    def get(self, problem: Problem, timing: Timing) -> Baseline | None:
        """The baseline of a problem, None if there is none."""
        return self.entries.get((_canonical(problem.to_json()), timing))

    def put(self, baseline: Baseline) -> None:
        """Add a baseline, or replace that of the same problem."""
        self.entries[baseline.identity] = baseline

    def write(self) -> None:
        """Write the file whole, entries in the order of their problems' texts; equal entries give equal files.

        Raises:
            GateError: it cannot be written.
        """
        entries = sorted(self.entries.values(), key=lambda b: (b.problem, b.identity))
        # Each field on a line of its own, with the whole of its value: what changed is a line of a diff.
        fields = [[(f.name, getattr(entry, f.name)) for f in dataclasses.fields(entry)] for entry in entries]
        texts = [",\n".join(f'    "{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in rows) for rows in fields]
        text = ",\n".join(f"  {{\n{rows}\n  }}" for rows in texts)
        whole = f'{{\n"format": {FORMAT},\n"device": {json.dumps(dict(self.device))},\n"entries": [\n{text}\n]\n}}\n'
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(whole, encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            raise GateError(f"baselines: cannot write {self.path}: {error.strerror}; name another folder") from error


def slug(device: DeviceInfo) -> str:
    """The device's name as a file's: ``nvidia-h200``, ``cpu-amd-epyc-2-threads``: a CPU's ratios depend on the threads."""
    name = f"cpu {device.name} {device.threads} threads" if device.type == "cpu" else device.name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))
