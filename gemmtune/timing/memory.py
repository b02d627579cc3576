"""Memory that a measurement needs, compared with what is free, before operands are made."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..device import MIB, DeviceInfo
from ..errors import ShortMemoryError
from ..foreign import text_of
from ..problem import Problem
from ..settings import Settings
from . import cores

TIMED, CHECKED, VERIFIED = 1, 2, 3
"""Sets of operands that exist at once at least: one to time, one for a check afterwards, and a probe for a proof before."""
SMALL_BYTES = 256 * MIB
"""Sizes that are tried without a look at the memory."""


def require_memory_to_tune(problems: Iterable[Problem], device: DeviceInfo, settings: Settings) -> None:
    """Raise ShortMemoryError if the operands that the tuning of a problem has at once exceed the free memory of the device."""
    for problem in dict.fromkeys(problems):
        require_memory(str(problem), (VERIFIED if settings.verify else TIMED) * problem.bytes, device)


def require_memory(what: str, needed: int, device: DeviceInfo) -> None:
    """Raise ShortMemoryError if so many bytes, a lower bound of what is needed, exceed the free memory of the device."""
    if needed <= SMALL_BYTES:
        return
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ShortMemoryError(what, str(device.torch_device), needed, free)


def free_bytes(device: DeviceInfo) -> int | None:
    """Return the bytes that this process can still have on a device, None if unknown.

    A GPU that this process does not use yet answers with its whole memory: asking for more would take some of it.
    """
    if device.type == "cpu":
        return min(_host_bytes(), default=None)
    if not torch.cuda.is_available():
        return None
    place = device.torch_device
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_properties(place).total_memory
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return torch.cuda.mem_get_info(place)[0] + unused


def _host_bytes() -> Iterator[int]:
    """Yield the available memory of the host, and what each cgroup of this process leaves below its limit."""
    for line in text_of(cores.PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024
    for folder in cores.folders("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            words = text_of(folder / "memory.stat").split()
            facts = dict(zip(words[::2], words[1::2], strict=False))
            cached = int(facts.get("total_inactive_file", facts.get("inactive_file", 0)))  # the kernel drops it when asked
            yield max(limit - used + cached, 0)


def _number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that exists, None for ``max`` and without a file."""
    text = next((text for name in names if (text := text_of(folder / name).strip())), "")
    return int(text) if text.isdecimal() else None
