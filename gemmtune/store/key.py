"""Machine part of a store key: everything except the problem and the choice that a measured time depends on."""

import ctypes
import functools
import importlib
import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata

import torch

from ..device import DeviceInfo
from ..foreign import parse_json, text_of
from ..problem.layout import COLUMN_ROLES, settled_stride

METHOD_VERSION = 1
"""Version of the measuring method. Raise it when times of the same kernel on the same machine are no longer comparable."""

UNKNOWN = "unknown"


def fingerprint(device: DeviceInfo, timing: str) -> dict[str, str]:
    """Return the conditions under which a time measured on ``device`` is valid. A change in any field makes the stored time a
    miss.

    A GPU has its name, architecture, SM count and the versions of driver, triton, and CUDA and cuBLAS or HIP and ROCm. A CPU
    has its model, instruction sets and torch's thread count. Both have torch's version, the timing mode and
    ``METHOD_VERSION``. Several equal GPUs have equal fingerprints. A compiler belongs to the content hash of the choices that
    it compiles.
    """
    fields = {"device": device.name, "arch": device.arch}
    if device.type == "cpu":
        fields |= {"threads": str(device.threads), "isa": " ".join(device.isa)}
    else:
        runtime = torch.version.hip if device.type == "hip" else torch.version.cuda
        fields |= {
            "sm_count": str(device.sm_count),
            "driver": driver_version(device.type),
            device.type: runtime or UNKNOWN,
            "triton": package_version("triton") or "not installed",
        }
        fields |= {"rocm": rocm_version()} if device.type == "hip" else {"cublas": cublas_version()}
    return fields | {"torch": torch.__version__, "timing": timing, "method": str(METHOD_VERSION)}


@functools.cache
def fingerprint_text(device: DeviceInfo, timing: str) -> str:
    """Return ``fingerprint`` as canonical JSON, the form in the store: equal texts for equal fingerprints."""
    return canonical(fingerprint(device, timing))


def canonical(value: object) -> str:
    """Return JSON with sorted keys and no spaces: equal texts for equal plain values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


_SINGLE = re.compile(r'"size":\[(?:\d+,)*1[,\]]')


def may_be_unsettled(key: str) -> bool:
    """Return True if a problem's key has a dimension of size 1, so that an earlier version may have kept its arbitrary stride."""
    return _SINGLE.search(key) is not None


def settled_key(key: str) -> str:
    """Return the key of the same problem with the strides of ``Layout.settled``; another text unchanged."""
    if not may_be_unsettled(key):
        return key
    try:
        data = parse_json(key)
        operands = (data.get("epilogue") or {}).get("operands", ())
        for role, layout in (*data.items(), *(("", layout) for layout in operands)):
            if isinstance(layout, dict) and {"size", "stride"} <= layout.keys():
                layout["stride"] = list(settled_stride(layout["size"], layout["stride"], columns=role in COLUMN_ROLES))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return key
    return canonical(data)


def difference(stored: Mapping[str, str] | str, current: Mapping[str, str] | str) -> list[str]:
    """Return the fields in which two fingerprints (mappings or texts) differ, each as ``driver: was 550.54.15, is 560.35.03``."""
    was, now_is = (json.loads(f) if isinstance(f, str) else f for f in (stored, current))
    fields = [*now_is, *(f for f in was if f not in now_is)]
    return [
        f"{field}: was {was.get(field, 'not recorded')}, is {now_is.get(field, 'not recorded')}"
        for field in fields
        if was.get(field) != now_is.get(field)
    ]


def now() -> str:
    """Return the UTC time in ISO 8601 with microseconds, the form of ``measured_at``, whose texts sort by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@functools.cache
def driver_version(device_type: str) -> str:
    """Return the version of the GPU's kernel driver, such as ``550.54.15``, or ``unknown`` if the system does not report it."""
    if device_type == "hip":
        return text_of("/sys/module/amdgpu/version").strip() or UNKNOWN
    # The file reads "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  <build date>".
    found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", text_of("/proc/driver/nvidia/version"))
    return found.group(1) if found else _driver_version_from_nvml() or UNKNOWN


def rocm_version() -> str:
    """Return the version of the installed ROCm, whose libraries torch may use, such as ``6.4.1-83``, else of torch's HIP."""
    return text_of("/opt/rocm/.info/version").strip() or torch.version.hip or UNKNOWN


def _driver_version_from_nvml() -> str:
    """Return the driver's version from NVML, for guests without /proc/driver, or "" without nvidia-ml-py or NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else str(version)


@functools.cache
def cublas_version() -> str:
    """Return the version of the cuBLAS that torch has loaded, such as ``12.8.4``, else of an installed wheel, else ``unknown``."""
    major = (torch.version.cuda or "").split(".")[0]
    if not major:
        return UNKNOWN
    try:
        # RTLD_NOLOAD: query the library that torch uses, and never load another one.
        library = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = int(library.cublasLtGetVersion())
        return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
    except (OSError, AttributeError):
        wheels = (f"nvidia-cublas-cu{major}", "nvidia-cublas")
        return next((v for v in map(package_version, wheels) if v), UNKNOWN)


def package_version(name: str) -> str:
    """Return the version of an installed package without importing it, or "" if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
