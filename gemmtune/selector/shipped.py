"""Measurements that the package ships: the fastest choices of weights of public models, by GPU. Files are read on demand."""

import functools
import hashlib
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..device import DeviceInfo
from ..errors import StoreError
from ..foreign import parse_json
from ..problem import Problem
from ..problem.dtypes import dtype_name
from ..store.key import difference, fingerprint
from .features import kind_of

log = logging.getLogger("gemmtune")

FOLDER = Path(__file__).parents[1] / "data"
FORMAT, VERSION = "gemmtune-data", 1
MOST_BYTES = 2**24
"""Largest text of a file."""
SAME = ("device", "arch", "sm_count", "triton", "torch", "cuda", "cublas", "method")
"""Fields of the fingerprint that must be equal on this machine. Another driver or timing mode keeps the order of choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedTime:
    """Time of one choice, in µs as between other kernels. ``content_hash`` has the first digits of the choice's."""

    name: str
    content_hash: str
    time_us: float
    baseline: bool


Times = Mapping[str, Mapping[int, Sequence[ShippedTime]]]
"""Times of choices by weight (``weight_of``) and M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """Shipped measurements of one GPU, by weight (``weight_of``) and M."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    """Version of gemmtune and days of the measurements."""
    times: Times
    digest: str

    def at(self, problem: Problem) -> Sequence[ShippedTime]:
        """Return the times of a problem, the fastest first. Empty if it was not measured."""
        return self.times.get(weight_of(problem), {}).get(problem.m, ()) if problem.op in ("mm", "mixed_mm") else ()

    def has(self, problem: Problem) -> bool:
        """Return True if the problem's weight was measured at some M."""
        return problem.op in ("mm", "mixed_mm") and weight_of(problem) in self.times

    def why_elsewhere(self, device: DeviceInfo) -> str:
        """Return how this machine differs from the one that measured. Empty if its picks are valid here."""
        here = fingerprint(device, self.machine.get("timing", ""))
        was, now = ({name: fields.get(name, "") for name in SAME} for fields in (self.machine, here))
        return "; ".join(difference(was, now))


def weight_of(problem: Problem) -> str:
    """Return a text that is equal for weights with equal sizes and scales, such as ``int4 128 6144x4096 bfloat16``."""
    scales = "" if problem.scale_b is None else f" {problem.scale_block('scale_b')[0]}"
    zero = " zero" if problem.zero_b is not None else ""
    return f"{kind_of(problem)}{scales}{zero} {problem.n}x{problem.k} {dtype_name(problem.dtype)}"


def file_of(device_name: str) -> Path:
    """Return the path of the file for a GPU."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower())}.json.gz"


def unpacked(data: bytes) -> Shipped:
    """Return the measurements of a file. Raises StoreError if the bytes are no such file, or one of another version."""
    try:
        unzip = zlib.decompressobj(wbits=31)
        text = unzip.decompress(data, MOST_BYTES)
        if not unzip.eof:
            raise StoreError(f"got a file that is cut off, or of more than {MOST_BYTES} bytes")
        top: Any = parse_json(text.decode())
        if (top["format"], top["version"]) != (FORMAT, VERSION):
            raise StoreError(f"got {top['format']!r} of version {top['version']!r}, expected {FORMAT!r} of version {VERSION}")
        times = {
            str(weight): {int(m): tuple(_time(*x) for x in found) for m, found in by_m.items()}
            for weight, by_m in top["weights"].items()
        }
        machine, versions = ({str(x): str(y) for x, y in top[name].items()} for name in ("machine", "versions"))
    except (zlib.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"got damaged data ({type(error).__name__}: {error})") from error
    return Shipped(machine=machine, versions=versions, times=times, digest=hashlib.sha256(data).hexdigest()[:8])


def _time(name: str, content_hash: str, time_us: float, baseline: bool) -> ShippedTime:
    if not isinstance(name, str) or not isinstance(content_hash, str) or not 0 < time_us < 1e9:
        raise ValueError(f"{name!r}: got a time of {time_us!r} µs")
    return ShippedTime(name=name, content_hash=content_hash, time_us=float(time_us), baseline=bool(baseline))


@functools.cache
def shipped_for(device: DeviceInfo) -> Shipped | None:
    """Return the shipped measurements that are valid for a device. None, logged once, if there are none."""
    path = file_of(device.name)
    if not path.is_file():
        return None
    try:
        found = unpacked(path.read_bytes())
    except (OSError, StoreError) as error:
        log.warning("%s: %s; install gemmtune again. The measurements that it ships are not used", path, error)
        return None
    if why := found.why_elsewhere(device):
        text = "the measurements that gemmtune ships for %s are not used here (%s): tunings begin with the choices that they favour"
        log.info(text, device.name, why)
        return None
    return found
