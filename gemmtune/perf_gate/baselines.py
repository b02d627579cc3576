"""Baselines: ratios of gemmtune's pick to torch by problem in ``<folder>/<slug of the device>.json``, alike on equal machines."""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..device import DeviceInfo
from ..errors import GateError
from ..foreign import read_json, shown, visible
from ..problem import Problem
from ..replacing import write_text
from ..settings import Timing
from ..store.key import canonical
from .statistics import Estimate

FORMAT = 1
MOST_LOG_RATIO = 100.0
"""Largest logarithm of a ratio of two times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Measurement of one problem: mean and spread of the log ratio to torch over ``processes`` processes."""

    problem: str
    """Text of the problem, for readers of the file."""
    key: Mapping[str, Any]
    """Problem as ``Problem.to_json`` gives it."""
    timing: Timing
    pick: str
    log_ratio: float
    spread: float
    processes: int
    versions: Mapping[str, str]
    """Fingerprint of the machine: torch, driver, …"""

    def __post_init__(self) -> None:
        texts = (
            (self.problem, self.pick, *self.versions, *self.versions.values()) if isinstance(self.versions, Mapping) else (None,)
        )
        if not all(isinstance(x, str) and visible(x) == x for x in texts) or self.timing not in get_args(Timing):
            raise GateError(f"{shown(self.problem)}: got {shown(texts)} and timing {shown(self.timing)}, expected plain texts")
        numbers = (self.log_ratio, self.spread)
        if not all(type(x) in (int, float) and abs(x) <= MOST_LOG_RATIO for x in numbers) or self.spread < 0:
            got = f"log_ratio {shown(self.log_ratio)} and spread {shown(self.spread)}"
            raise GateError(f"{self.problem}: got {got}, expected finite numbers up to {MOST_LOG_RATIO:g}")
        if type(self.processes) is not int or self.processes < 2:
            raise GateError(f"{self.problem}: processes: got {shown(self.processes)}, expected a whole number of at least 2")

    @property
    def ratio(self) -> float:
        """Time of the pick divided by torch's."""
        return math.exp(self.log_ratio)

    @property
    def estimate(self) -> Estimate:
        """Values in the form that the rule takes."""
        return Estimate(mean=self.log_ratio, spread=self.spread, count=self.processes)

    @property
    def identity(self) -> tuple[str, str]:
        """Key that is equal for equal problems measured in the same way."""
        return (canonical(self.key), self.timing)


@dataclass(slots=True, kw_only=True)
class Baselines:
    """Baselines of one kind of device, read from ``path`` if it exists."""

    path: Path
    device: Mapping[str, str]
    entries: dict[tuple[str, str], Baseline] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str, device: DeviceInfo) -> "Baselines":
        """Read the baselines of a device, which are empty without a file. Raises GateError if the file is unusable."""
        path = Path(folder) / f"{slug(device)}.json"
        found = cls(path=path, device={"name": device.name, "arch": device.arch})
        if not os.path.exists(path):
            return found
        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            raise GateError(f"baselines: {path} cannot be read: {error}; repair it, or remove it") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
            got = f"format {data.get('format')!r}" if isinstance(data, dict) else type(data).__name__
            raise GateError(f"baselines: {path}: got {got}, expected an object with format {FORMAT} and a list of entries")
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
        """Return the baseline of a problem, or None."""
        return self.entries.get((problem.key, timing))

    def put(self, baseline: Baseline) -> None:
        """Add a baseline, or replace the one of the same problem."""
        self.entries[baseline.identity] = baseline

    def write(self) -> None:
        """Write the whole file, sorted by the problems' texts, so that equal entries give equal files. Raises GateError."""
        entries = sorted(self.entries.values(), key=lambda b: (b.problem, b.identity))
        # One line for each field with its whole value, so that a diff shows each change as a line.
        fields = [[(f.name, getattr(entry, f.name)) for f in dataclasses.fields(entry)] for entry in entries]
        texts = [",\n".join(f'    "{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in rows) for rows in fields]
        text = ",\n".join(f"  {{\n{rows}\n  }}" for rows in texts)
        whole = f'{{\n"format": {FORMAT},\n"device": {json.dumps(dict(self.device))},\n"entries": [\n{text}\n]\n}}\n'
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, whole)
        except OSError as error:
            raise GateError(f"baselines: cannot write {self.path}: {error.strerror}; name another folder") from error


def slug(device: DeviceInfo) -> str:
    """Return the file name of a device: ``nvidia-h200``, or ``cpu-amd-epyc-avx512-e93c2f-2-threads``.

    The ratios of a CPU depend on its instructions and threads, and virtual machines give one name to CPUs of several generations.
    So the name has a hash of all instruction sets.
    """
    generation = hashlib.sha256(" ".join(device.isa).encode()).hexdigest()[:6]
    name = f"cpu {device.name} {device.arch} {generation} {device.threads} threads" if device.type == "cpu" else device.name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
