"""Fleets of this host or of a Ray cluster, by the words of a user."""

from collections.abc import Sequence

from ..device import DeviceInfo
from ..errors import InvalidProblemError, UnavailableError
from ..selector.progress import Progress
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from .host import Devices, HostRoster, devices_of, writable
from .job import Job
from .kernels import compiled_for
from .ray_roster import RayRoster
from .result import FleetResult
from .run import Fleet, Roster
from .seat import Device, JobFunction, SeatGone

__all__ = ["Devices", "devices_for", "run_fleet"]


def run_fleet(
    jobs: Sequence[Job],
    function: JobFunction,
    settings: Settings,
    progress: Progress,
    *,
    devices: Devices | None = None,
    ray: str | None = None,
    keep: bool = True,
) -> FleetResult:
    """Run jobs on the devices of this host, or with ``ray`` on those of a cluster. ``function`` tunes one job.

    Raises UnavailableError without the device, cluster or Ray, InvalidProblemError for a job of another type of device, and
    StoreError if the store cannot be written.
    """
    store = writable(open_store(settings))
    roster: Roster
    if ray is None:
        found = _checked_devices(devices, jobs)
        roster = HostRoster(found, function, settings)
    else:
        kind = _kind_of(devices, jobs)
        roster = RayRoster(ray, kind, function, settings, store, None if kind == "cpu" else compiled_for)
    return Fleet(jobs, roster, store, settings, progress, keep=keep).run()


def devices_for(
    jobs: Sequence[Job], function: JobFunction, settings: Settings, *, devices: Devices | None = None, ray: str | None = None
) -> dict[str, Device]:
    """Return the devices on which ``run_fleet`` would run, by name. Nothing is tuned. Raises what ``run_fleet`` raises."""
    if ray is None:
        infos = _checked_devices(devices, jobs)
        return {str(x.torch_device): Device(info=x, fingerprint=fingerprint_text(x, settings.timing)) for x in infos}
    roster = RayRoster(ray, _kind_of(devices, jobs), function, settings, open_store(settings))
    found: dict[str, Device] = {}
    try:
        for seat in roster.joining(()):
            try:
                found[seat.name] = seat.open()
            except SeatGone as gone:
                raise UnavailableError(f"{seat.name}: {gone}") from gone
            finally:
                seat.abort()
    finally:
        roster.close()
    return found


def _checked_devices(devices: Devices | None, jobs: Sequence[Job]) -> list[DeviceInfo]:
    found = devices_of("all" if devices is None else devices)
    _check_type(found[0].torch_device.type, jobs)
    return found


def _kind_of(devices: Devices | None, jobs: Sequence[Job]) -> str:
    """Return the type of the devices of a cluster, cpu or cuda. Raises UnavailableError for numbers of GPUs."""
    if devices not in (None, "all", "cpu"):
        raise UnavailableError(
            f"devices: got {devices!r} with a Ray cluster, expected all, its GPUs, or cpu, a device for each node"
        )
    kind = "cpu" if devices == "cpu" else "cuda"
    _check_type(kind, jobs)
    return kind


def _check_type(kind: str, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.problem.device_type != kind:
            got = f"{job.problem.device_type} ({job.problem})"
            raise InvalidProblemError(f"fleet: got a problem for {got}, expected one for {kind}, the type of the devices")
