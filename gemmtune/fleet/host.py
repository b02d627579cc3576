"""Devices of this host as a roster of seats."""

import re
from collections.abc import Collection, Sequence

import torch

from ..device import DeviceInfo, detect
from ..errors import StoreError, UnavailableError
from ..settings import Settings
from ..store.store import Store
from .dealer import Task
from .seat import Device, JobFunction, LocalSeat, Seat, compiling_share

Devices = str | Sequence[int] | Sequence[str]
"""``all``, ``cpu``, ``0,1``, ``cuda:0,cuda:1``, or a sequence of the latter."""


def devices_of(given: Devices) -> list[DeviceInfo]:
    """Return the devices of this host that ``all``, ``cpu`` or numbers name. Raises UnavailableError if it lacks one."""
    words = [word.strip() for word in (given.split(",") if isinstance(given, str) else map(str, given))]
    if words == ["cpu"]:
        return [detect("cpu")]
    if words == ["all"]:
        if not torch.cuda.is_available():
            raise UnavailableError(
                "devices: got 'all', but torch sees no GPU of NVIDIA or AMD here; use devices cpu for this machine's CPU, or ray "
                "for the GPUs of a cluster"
            )
        return [detect(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    for word in words:
        if not re.fullmatch(r"(cuda:)?\d{1,4}", word):
            raise UnavailableError(f"devices: got {given!r}, expected all, cpu, or numbers of GPUs such as 0,1")
    numbers = [int(word.removeprefix("cuda:")) for word in words]
    if len(set(numbers)) != len(numbers):
        raise UnavailableError(f"devices: got {given!r}, expected each GPU once")
    return [detect(f"cuda:{number}") for number in numbers]


class HostRoster:
    """Roster of the devices of this host, each with a process and a share of the cores."""

    def __init__(self, devices: Sequence[DeviceInfo], function: JobFunction, settings: Settings) -> None:
        shared = compiling_share(settings, len(devices))
        alike = len(devices) > 1 and devices[0].type != "cpu"
        self._seats = [LocalSeat(str(info.torch_device), info, function, shared, probed=alike) for info in devices]

    def joining(self, present: Collection[str]) -> Sequence[Seat]:  # noqa: ARG002 - all seats join at the start
        """Return the seats at the first call."""
        seats, self._seats = self._seats, []
        return seats

    def ahead(self, tasks: Sequence[Task], device: Device) -> None:
        """Prepare nothing: each process compiles its own kernels."""

    def close(self) -> None:
        """Free nothing."""


def writable(store: Store) -> Store:
    """Return the store. Raises StoreError if its file cannot be written: other processes would keep their results to themselves."""
    if not store.writable:
        raise StoreError(
            f"fleet: got the store {store.path}, which cannot be written, expected one that every process can write: set "
            "store_path (GEMMTUNE_STORE_PATH) to a file in a folder of yours"
        )
    return store
