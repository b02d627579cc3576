"""The Recording of a run: each distinct Problem with its count. ``gemmtune tune --recorded`` reads its file."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import InvalidProblemError
from ..foreign import read_json, shown
from ..problem import Problem, precision_of
from ..replacing import write_text

FORMAT = "gemmtune-recording"
VERSION = 1


@dataclasses.dataclass(slots=True)
class Recording:
    """Distinct problems with their numbers of calls."""

    counts: Counter[Problem] = dataclasses.field(default_factory=Counter)

    def __repr__(self) -> str:
        return f"<Recording of {len(self.counts)} problems in {self.counts.total()} calls>"

    def note(self, problem: Problem, count: int = 1) -> None:
        """Add ``count`` calls of a problem."""
        self.counts[problem] += count

    def problems(self, device_type: str | None = None) -> list[Problem]:
        """Return the distinct problems, ordered by their total FLOPs, so that an interrupted tuning has tuned the largest.

        With ``device_type`` all are for such a device, at the precision of torch's current flags there.
        """
        ordered = sorted(self.counts, key=lambda p: (-p.flops * self.counts[p], p.key))
        return list(dict.fromkeys(ordered if device_type is None else (_on(p, device_type) for p in ordered)))

    def rows(self) -> dict[str, dict[int, int]]:
        """Return a histogram of M for each problem without its M: the number of calls for each number of rows."""
        found: dict[str, dict[int, int]] = {}
        for problem, count in self.counts.items():
            sizes = f"{problem.batch}x" * problem.batched
            rows = found.setdefault(str(problem).replace(f" {sizes}{problem.m}x", f" {sizes}Mx", 1), {})
            rows[problem.m] = rows.get(problem.m, 0) + count
        return {text: dict(sorted(found[text].items())) for text in sorted(found)}

    def to_json(self) -> dict[str, Any]:
        """Return the recording as plain values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "problems": [{"text": str(p), "count": self.counts[p], "problem": p.to_json()} for p in self.problems()],
            "rows": [{"text": text, "m": {str(m): count for m, count in rows.items()}} for text, rows in self.rows().items()],
        }

    @classmethod
    def from_json(cls, data: object, source: str) -> "Recording":
        """Return the recording from ``to_json``. Raise InvalidProblemError for other data, with ``source`` and the entry."""
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            got = type(data).__name__
            if isinstance(data, dict):
                got = ", ".join(f"{x} {shown(data.get(x))}" for x in ("format", "version"))
            entries = data.get("shapes") if isinstance(data, dict) else data
            other = isinstance(entries, list) and any(isinstance(entry, dict) and "m" in entry for entry in entries)
            raise InvalidProblemError(
                f"{source}: got {got}, expected a file that gemmtune record has written, {FORMAT!r} of version {VERSION}"
                + "; tune a file of shapes by --shapes" * other
            )
        recording = cls()
        if not isinstance(data.get("problems"), list):
            raise InvalidProblemError(f"{source}: problems: got {shown(data.get('problems'))}, expected a list; record it again")
        for index, entry in enumerate(data["problems"]):
            try:
                if type(entry["count"]) is not int or entry["count"] < 1:
                    raise InvalidProblemError(f"count: got {shown(entry['count'])}, expected a whole number from 1 on")
                recording.note(Problem.from_json(entry["problem"]), entry["count"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InvalidProblemError(f"{source}: problems[{index}]: {error}; record it again") from error
        return recording

    def write(self, path: Path | str) -> None:
        """Write ``to_json`` to a file, which replaces an old one only when it is complete."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> "Recording":
        """Read a file of ``write``.

        Raises:
            InvalidProblemError: the file has other content.
            OSError: the file cannot be read.
        """
        try:
            data = read_json(path)
        except ValueError as error:
            raise InvalidProblemError(f"{path}: got text that is not JSON ({error}), expected a file of gemmtune record") from error
        return cls.from_json(data, str(path))


def _on(problem: Problem, device_type: str) -> Problem:
    if problem.device_type == device_type:
        return problem
    return dataclasses.replace(problem, device_type=device_type, precision=precision_of(problem.dtype, device_type))
