"""The function that launches a compiled kernel, of Triton's several versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .kernels import toolchain

__all__ = ["Launcher", "launcher_of", "takes_encoded"]

FLAT_VERSIONS = ((3, 6),)
"""Versions of Triton whose C launcher takes the kernel's arguments one by one, after its own."""
PACKED_VERSIONS = ((3, 7), (3, 8), (3, 9))
"""Versions whose C launcher takes them as one tuple, after a description of their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """``function(*grid, stream, *middle, *arguments)``, or with ``packed`` the arguments as one tuple."""

    function: Callable[..., None]
    grid: tuple[int, int, int]
    middle: tuple[Any, ...]
    packed: bool


def launcher_of(compiled: Any, grid: tuple[int, int, int], *, pdl: bool = False) -> Launcher:
    """The cheapest way to launch: the C function below Triton's launcher object where the version's argument order is known.

    Launch hooks (a profiler's) are not called. Kernels that want scratch memory go through Triton's launcher, which allocates it.
    ``pdl``: the launch may overlap the end of the kernel before it, which this kernel must wait for by itself; Triton's launcher
    object is not told, and launches in order.
    """
    launcher = compiled.run
    handle, metadata = compiled.function, compiled.packed_metadata
    needs_scratch = getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1)
    version = tuple(int(part) for part in toolchain().__version__.split(".")[:2])
    unknown = torch.version.hip is not None or version not in (*FLAT_VERSIONS, *PACKED_VERSIONS)
    if unknown or needs_scratch or getattr(launcher, "gsan_enabled", False):
        return Launcher(function=launcher, grid=grid, middle=(handle, metadata, None, None, None), packed=False)
    flags = (launcher.launch_cooperative_grid, pdl)
    middle: tuple[Any, ...]
    if version in FLAT_VERSIONS:
        middle = (handle, *flags, None, None, metadata, None, None, None)
    else:
        middle = (handle, *flags, metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
    return Launcher(function=launcher.launch, grid=grid, middle=middle, packed=version in PACKED_VERSIONS)


def takes_encoded(compiled: Any, call: Launcher) -> Launcher | None:
    """``call`` with the function below Triton's handling of descriptors, which takes them encoded; None where that is not known.

    Triton 3.6 has a function of its own for each signature, below a closure; 3.7 to 3.9 have one for all kernels.
    """
    if call.function is compiled.run:
        return None
    if call.packed:
        function = importlib.import_module("triton").runtime.driver.active.utils.launch
    elif inspect.isfunction(call.function):
        function = inspect.getclosurevars(call.function).nonlocals.get("launcher")
    else:
        function = None
    if function is None or not inspect.isbuiltin(function):
        return None
    return Launcher(function=function, grid=call.grid, middle=call.middle, packed=call.packed)
