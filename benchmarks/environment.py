"""What a result was measured on: device, driver, clocks, versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from typing import Any

import torch

import gemmtune
from gemmtune.device import DeviceInfo
from gemmtune.store.key import driver_version, now

__all__ = ["clocks", "describe_environment"]

PACKAGES = ("torch", "triton", "numpy", "nvmath-python", "nvidia-cublas")


def describe_environment(device: DeviceInfo) -> dict[str, Any]:
    """Plain values for the head of a result file."""
    info: dict[str, Any] = {
        "measured_at": now(),
        "device": device.name,
        "arch": device.arch,
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "versions": {"gemmtune": gemmtune.__version__} | {name: _version(name) for name in PACKAGES},
    }
    if device.type == "cpu":
        return info | {"threads": device.threads, "isa": list(device.isa)}
    return info | {
        "sm_count": device.sm_count,
        "l2_bytes": device.l2_bytes,
        "driver": driver_version(device.type),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "clocks": clocks(device),
    }


def clocks(device: DeviceInfo) -> dict[str, float] | None:
    """Clock, power and temperature of a GPU at this moment; None on a CPU, without nvidia-ml-py, or if the driver does not tell."""
    if device.type != "cuda" or not _version("nvidia-ml-py"):
        return None
    nvml = importlib.import_module("pynvml")
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(device.index),
            "power_w": torch.cuda.power_draw(device.index) / 1e3,
            "temperature_c": torch.cuda.temperature(device.index),
        }
    except nvml.NVMLError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
