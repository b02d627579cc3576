"""Post: the seat of a fleet on a node of a cluster. It tunes into a store of its own, and answers with that store's new rows."""

from __future__ import annotations

import dataclasses
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..device import detect
from ..settings import Settings
from ..store.exchange import from_json, to_json
from ..store.row import Row
from ..store.store import Ranged, Store
from .dealer import Task
from .kernels import PREFIX, Kernels, unpack
from .seat import Device, JobFunction, LocalSeat, Report, compiling_share

Stamp = tuple[str, ...]
"""Identity and time of a record."""


class Post:
    """Local seat behind its own store, in a process that Ray makes on the node, whose ``seats`` posts share its cores."""

    def __init__(self, place: str, function: JobFunction, settings: Settings, seats: int, *, probed: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        path = Path(self._folder.name, "store.sqlite")
        self._settings = dataclasses.replace(compiling_share(settings, seats), store_path=str(path))
        self._store = Store.open(path)
        self._sent: set[Stamp] = set()
        name = f"{socket.gethostname()} {place}"
        self._seat = LocalSeat(name, detect(place), function, self._settings, probed=probed)

    def open(self) -> Device:
        return self._seat.open()

    def run(self, task: Task, known: Mapping[str, Any], *kernels: Kernels) -> Report:
        """Run a task, given what the fleet's store knows of it and kernels that other nodes have compiled."""
        for archive in kernels:
            unpack(archive, self._settings)
        seeds = from_json(known, "the fleet's store")
        self._store.absorb(*seeds)
        self._sent |= {stamp for records in seeds for stamp in map(_stamp, records)}
        report = self._seat.run(task)
        return dataclasses.replace(report, rows=self._news())

    def stop(self) -> None:
        self._seat.stop()

    def close(self) -> None:
        """End the process of the seat, and remove the store."""
        self._seat.abort()
        self._seat.close()
        self._store.close()
        self._folder.cleanup()

    def _news(self) -> dict[str, Any]:
        """Return the records that the fleet does not have yet. They count as sent."""
        rows, limits, ranged = self._store.every_row(), self._store.every_limit(), self._store.every_ranged()
        fresh = [[x for x in records if _stamp(x) not in self._sent] for records in (rows, limits, ranged)]
        self._sent |= {_stamp(x) for records in fresh for x in records}
        return to_json(*fresh)  # type: ignore[arg-type] # the lists keep their types


def _stamp(record: Any) -> Stamp:
    """Return what tells a record from others, and from the same one measured at another time."""
    identity = record.identity if isinstance(record, Row | Ranged) else (record.fingerprint, record.name)
    return (*identity, record.measured_at)
