"""Selection of problems of the store: by shape, by a regular expression of their text, and by machine."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import click
import torch

from ..device import DeviceInfo, detect
from ..errors import InvalidProblemError
from ..report.names import class_text, problem_text
from ..selector.machine_limits import DISTURBED_LIMITS, LIMITS
from ..settings import Timing
from ..store.key import fingerprint_text
from ..store.row import Limit, Ranged, Row
from .shapes import parse_shape

Removable = Row | Limit | Ranged


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that a stored problem must meet. Without any, all problems do."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """(M, N, K) or (B, M, N, K)."""
    pattern: re.Pattern[str] | None = None
    machines: Collection[str] | None = None
    """Fingerprints."""

    @classmethod
    def of(cls, shapes: Sequence[str], match: str | None, here: bool) -> "Selection":
        """Return the selection of the options. Raises click.UsageError for a malformed one."""
        try:
            sizes = tuple(map(parse_shape, shapes))
            pattern = None if match is None else re.compile(match)
        except InvalidProblemError as error:
            raise click.UsageError(str(error)) from error
        except (re.error, OverflowError, RecursionError) as error:
            raise click.UsageError(
                f"--match: got {match!r}, expected a regular expression of Python's re module ({error})"
            ) from error
        return cls(shapes=sizes, pattern=pattern, machines=machines_here() if here else None)

    @property
    def empty(self) -> bool:
        """True without any condition."""
        return not self.shapes and self.pattern is None and self.machines is None

    def chooses(self, x: Removable) -> bool:
        """Return True for a row or table of a selected problem, and for a limit of a selected machine."""
        if isinstance(x, Limit):
            return self.machines is None or x.fingerprint in self.machines
        return self.has(*x.scope) if isinstance(x, Row) else self.has_table(x.key, x.fingerprint)

    def has(self, key: str, fingerprint: str) -> bool:
        """Return True for the problem with this key on this machine."""
        return self._fits(problem_text(key), fingerprint) and (not self.shapes or _sizes(key) in self.shapes)

    def has_table(self, key: str, fingerprint: str) -> bool:
        """Return True for the class with this key: a shape selects the tables that have its M."""
        *batch, _, n, k = _sizes(key) or (0, 0, 0)
        of_shape = not self.shapes or any([*shape[:-3], *shape[-2:]] == [*batch, n, k] for shape in self.shapes)
        return of_shape and self._fits(class_text(key), fingerprint)

    def _fits(self, text: str, fingerprint: str) -> bool:
        here = self.machines is None or fingerprint in self.machines
        return here and (self.pattern is None or self.pattern.search(text) is not None)


def machines_here() -> dict[str, DeviceInfo]:
    """Return this machine's devices by their fingerprints, for every timing mode and for limits."""
    modes = (*get_args(Timing), LIMITS, DISTURBED_LIMITS)
    devices = [detect("cpu"), *(detect(f"cuda:{index}") for index in range(torch.cuda.device_count()))]
    return {fingerprint_text(device, mode): device for device in devices for mode in modes}


def _sizes(key: str) -> tuple[int, ...] | None:
    """Return the sizes in a key as a shape has them, or None if another version wrote it."""
    try:
        data: dict[str, Any] = json.loads(key)
        sizes = data["m"], data["n"], data["k"]
        batched = len(data["out"]["size"]) == 3
    except (KeyError, TypeError, ValueError):
        return None
    return (data.get("batch", 1), *sizes) if batched else sizes
