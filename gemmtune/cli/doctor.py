"""``gemmtune doctor``: facts about this machine, missing parts, and remedies."""

import contextlib
import dataclasses
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from .. import __version__, settings
from ..backends.cpp import compiler
from ..backends.table import BACKENDS, load
from ..cache import folder_of
from ..cache.ownership import trusted_file
from ..device import DeviceInfo, detect
from ..errors import ONLY_COMPILED, GemmtuneError, UnavailableError
from ..native import build
from ..selector.machine_limits import MachineLimits
from ..selector.offers import enabled_backends
from ..selector.result import busy
from ..settings import Settings
from ..store.key import driver_version, package_version
from ..store.store import open_store
from ..toolchain.codeobject import find_hip_compiler
from ..toolchain.cubin import find_nvrtc
from ..toolchain.tool import version_text
from .printing import answer

PACKAGES = (
    "torch", "triton", "nvmath-python", "nvidia-cutlass", "nvidia-ml-py", "amd-aiter", "numpy", "jinja2", "filelock",
    "platformdirs", "rich", "click",
)  # fmt: skip
COMPILERS: Mapping[str, Callable[[], tuple[str, ...]]] = {"C++": compiler.names, "CUDA": lambda: ("nvcc",)}
"""Names of compilers to look for, by language."""
PLATFORMS = {"cuda": "CUDA", "hip": "ROCm"}
INTERPRETER_HELP = "off; for correctness on the CPU: TRITON_INTERPRET=1 gemmtune tune 64x64x64 --device cpu --backends triton"
MIB = 1024 * 1024


def doctor(json_file: str | None, *, build_native: bool = False) -> int:
    """Show versions, devices, compilers, backends, the native look-up, the store and the cache folder.

    Return 1 if the store or the cache folder cannot be used, or if no backend works on any device. Return 1 also if a
    requested build of the native look-up fails.
    """
    data = report(settings.given(), build_native=build_native)
    parts: list[Text] = []
    for title, lines in _sections(data):
        parts += [Text(title, style="bold"), *(Text(f"  {line}") for line in lines)]
    problems = [Text(f"problem: {problem}", style="bold red") for problem in data["problems"]]
    notes = [Text(f"note: {line}", style="yellow") for line in _not_compiling(data["backends"])]
    answer(json_file, data, [*parts, *notes, *(problems or [Text("no problems found", style="bold green")] * (not notes))])
    return 1 if data["problems"] else 0


def report(chosen: Settings, *, build_native: bool = False) -> dict[str, Any]:
    """Return everything that ``doctor`` shows as plain values. ``problems`` lists what keeps gemmtune from working."""
    devices = [detect("cpu"), *(detect(f"cuda:{i}") for i in range(torch.cuda.device_count()))]
    backends = {name: _backend(name, devices) for name in BACKENDS}
    cache, store = _cache_folder(chosen), _store(chosen, devices)
    native = _native(chosen, build_native=build_native)
    problems = list(dict.fromkeys(entry["problem"] for entry in (cache, store, native) if entry["problem"]))
    if not any(entry["ok"] for entry in backends.values()):
        problems.append("no backend works on any device of this machine")
    interpreted = any(seen["ok"] for seen in backends["triton"]["devices"] if seen["device"] == "cpu")
    return {
        "gemmtune": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: package_version(name) or None for name in PACKAGES},
        "gpu": _gpu(),
        "devices": [
            {k: v for k, v in dataclasses.asdict(device).items() if v not in (0, (), "")}
            | {"index": device.index, "torch_device": str(device.torch_device)}
            for device in devices
        ],
        "compilers": {language: _compiler(names()) for language, names in COMPILERS.items()}
        | {"NVRTC": _found_by(find_nvrtc), "HIP": _found_by(find_hip_compiler)},
        "triton_interpreter": "on" if interpreted else INTERPRETER_HELP,
        "backends": backends,
        "native_lookup": native,
        "store": store,
        "cache_folder": cache,
        "settings": {k: v for k, v in dataclasses.asdict(chosen).items() if v != getattr(Settings(), k)},
        "problems": problems,
    }


def _compiler(names: tuple[str, ...]) -> dict[str, str] | None:
    """Return the path and version line of the first of ``names`` on the PATH, or None."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return None
    try:
        lines = [line for line in version_text(path).splitlines() if line.strip()]
    except UnavailableError as error:
        return {"path": path, "version": str(error)}
    # nvcc's first line is its name, and a later one has the release.
    version = next((line for line in lines if "release" in line), lines[0] if lines else "no version given")
    return {"path": path, "version": version.strip()}


def _found_by(find: Callable[[], Any]) -> dict[str, str] | None:
    """Return the path and version of the compiler that ``find`` returns, or None if there is none."""
    try:
        found = find()
    except UnavailableError:
        return None
    return {"path": str(found.path), "version": str(found)}


def _gpu() -> dict[str, Any]:
    """Return the platform of torch's build (``cuda``, ``hip`` or empty), the kernel driver, and the number of GPUs."""
    platform_name = "hip" if torch.version.hip else "cuda" if torch.version.cuda else ""
    return {
        "platform": platform_name,
        "torch_built_for": torch.version.hip or torch.version.cuda,
        "driver": driver_version(platform_name or "cuda"),
        "devices": torch.cuda.device_count(),
    }


def _backend(name: str, devices: list[DeviceInfo]) -> dict[str, Any]:
    try:
        backend = load(name)
    except ImportError as error:
        return {"ok": False, "problem": f"its module cannot be imported: {error}", "devices": []}
    seen = [(device, backend.available(device)) for device in devices]
    none_named = dataclasses.replace(settings.current(), backends=None)
    return {
        "ok": any(available.ok for _, available in seen),
        "problem": None,
        "devices": [
            {
                "device": str(device.torch_device),
                "ok": available.ok,
                "detail": available.detail,
                "by_default": name in enabled_backends(device, none_named),
            }
            for device, available in seen
        ],
    }


def _native(chosen: Settings, *, build_native: bool) -> dict[str, Any]:
    """Return the state of the native look-up of warm calls, which ``build_native`` compiles first if it is missing."""
    problem = None
    if build_native:
        try:
            build.make()
        except GemmtuneError as error:
            problem = str(error)
    path, reason = build.made(), build.why_impossible()
    if not chosen.native:
        detail = "disabled by the setting native: Python looks up calls"
    elif path is not None:
        detail = f"{path}, for torch {torch.__version__} and Python {platform.python_version()}"
    elif reason is not None:
        detail = f"no, Python looks up calls, which costs a few microseconds each: {reason}"
    else:
        detail = "not built yet, Python looks up calls: gemmtune doctor --build compiles it, and so do programs that tune"
    return {"path": str(path) if path is not None else None, "detail": detail, "problem": problem}


def _cache_folder(chosen: Settings) -> dict[str, Any]:
    """Return the state and size of the cache folder. It may be read-only, but nobody else may be able to change what is in it."""
    place, sizes, unsafe = folder_of(chosen), [], []
    for parent, _, names in os.walk(chosen.folder):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # other processes may be changing the folder
                sizes.append(path.lstat().st_size)
                if trusted_file(path) is None and path.suffix != ".lock":
                    unsafe.append(path)
    problem = place.advice if place.lost or not os.path.isdir(place.folder) else None
    if unsafe and problem is None:
        count = f"{len(unsafe)} files are" if len(unsafe) > 1 else "one file is"
        problem = (
            f"cache_dir: {count} not used, expected files that only this user and root can change, got {unsafe[0]}. If you trust "
            "them, chown them to this user and chmod go-w"
        )
    mib = round(sum(sizes) / MIB, 1)
    return {"path": str(chosen.folder), "problem": problem, "writable": not place.problem, "files": len(sizes), "mib": mib}


def _store(chosen: Settings, devices: list[DeviceInfo]) -> dict[str, Any]:
    """Return the state and contents of the store, and its limits for the devices."""
    store = open_store(dataclasses.replace(chosen, disable=False))
    health = store.health()
    problem = health.detail if health.state == "memory" else None
    facts = dataclasses.asdict(health) | {"path": str(health.path)}
    known = {str(d.torch_device): MachineLimits(d, chosen, store).known() for d in devices}
    limits = {device: dict(found.values) for device, found in known.items()}
    disturbed = {device: sorted(found.disturbed) for device, found in known.items()}
    return facts | {"problem": problem, "limits": limits, "disturbed_limits": disturbed}


def _sections(data: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    yield f"gemmtune {data['gemmtune']}, Python {data['python']}, {data['system']}", []
    yield "packages", [f"{name} {version or 'not installed'}" for name, version in data["packages"].items()]
    gpu = data["gpu"]
    what = f"for {PLATFORMS[gpu['platform']]} {gpu['torch_built_for']}" if gpu["platform"] else "without CUDA and ROCm"
    yield "GPU", [f"torch is built {what}; driver {gpu['driver']}; {gpu['devices']} device(s)"]
    yield "devices", [_device_line(device) for device in data["devices"]]
    yield "compilers", [_compiler_line(language, found) for language, found in data["compilers"].items()]
    yield "backends", [line for name, entry in data["backends"].items() for line in _backend_lines(name, entry)]
    yield "C++ look-up", [data["native_lookup"]["detail"]]
    yield "triton interpreter", [data["triton_interpreter"]]
    yield "store", _store_lines(data["store"])
    cache = data["cache_folder"]
    state = "" if cache["writable"] else ", read-only: what is in it is used"
    yield "cache folder", [f"{cache['path']}: {cache['files']} files, {cache['mib']} MiB{'' if cache['problem'] else state}"]
    yield "settings that differ from the defaults", [f"{k} = {v!r}" for k, v in data["settings"].items()] or ["none"]


def _compiler_line(language: str, found: dict[str, str] | None) -> str:
    if found is None:
        names = COMPILERS.get(language)
        return f"{language}: none of {', '.join(names())} on the PATH" if names else f"{language}: not found"
    return f"{language}: {found['version']} ({found['path']})"


def _backend_lines(name: str, entry: dict[str, Any]) -> Iterator[str]:
    if entry["problem"]:
        yield f"{name}: no, {entry['problem']}"
    for seen in entry["devices"]:
        when = "" if seen["by_default"] else " (only when named)"
        yield f"{name} on {seen['device']}: {'yes' if seen['ok'] else 'no'}, {seen['detail']}{when}"


def _not_compiling(backends: dict[str, Any]) -> list[str]:
    """Return lines of the backends that would serve a device of this machine, and cannot compile for it."""
    return [
        f"{name} on {seen['device']}: {seen['detail']}"
        for name, entry in backends.items()
        for seen in entry["devices"]
        if seen["by_default"] and ONLY_COMPILED in seen["detail"]
    ]


def _device_line(device: dict[str, Any]) -> str:
    facts = [device["arch"]]
    facts += [f"{device['threads']} threads"] if "threads" in device else []
    facts += [f"{device['sm_count']} {'CUs' if device['type'] == 'hip' else 'SMs'}"] if "sm_count" in device else []
    facts += [" ".join(device["isa"])] if "isa" in device else []
    return f"{device['torch_device']}: {device['name']}, {', '.join(facts)}"


def _store_lines(store: dict[str, Any]) -> list[str]:
    lines = [
        f"{store['path']}: {store['state']}, {store['rows']} rows of {store['scopes']} problems, "
        f"{store['size_bytes'] / MIB:.1f} MiB, journal {store['journal_mode']}"
    ]
    for device, limits in store["limits"].items():
        marks = {name: busy(name) for name in store["disturbed_limits"][device]}
        text = ", ".join(f"{name} {value:.1f}{marks.get(name, '')}" for name, value in limits.items())
        lines.append(f"measured limits of {device}: {text or 'none yet; the first tuning measures them'}")
    return lines
