"""How products of a model are measured: beside other kernels.

A product that follows itself may begin while the one before ends, which saves up to 4 µs; in a model, other kernels are between.
"""

from __future__ import annotations

import dataclasses

from ..device import DeviceInfo
from ..settings import Settings


def in_models(settings: Settings, device: DeviceInfo) -> Settings:
    """The settings with ``timing="spaced"``, on a GPU and in the place of ``graph``."""
    return dataclasses.replace(settings, timing="spaced") if device.type != "cpu" and settings.timing == "graph" else settings
