"""Targets, the user-supplied GEMMs: names, imports that leave gemmtune's functions as they are, and a digest of their sources."""

import functools
import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from ...choice import Backend
from ...declaration.named import found_at
from ...declaration.subject import Subject, SubjectSpec, wrapped
from ...declaration.traits import ATTRIBUTE, Traits
from ...errors import SubjectError
from ...settings import Settings

T = TypeVar("T")

PACKAGE = __name__.partition(".")[0]
KEPT: tuple[tuple[object, str], ...] = (
    *((torch, name) for name in ("mm", "matmul", "bmm", "addmm", "baddbmm", "equal", "allclose")),
    *((torch.Tensor, name) for name in ("mm", "matmul", "bmm", "__matmul__", "copy_", "__eq__", "double")),
    *((time, name) for name in ("perf_counter", "monotonic", "time")),
    *((torch.cuda.Event, name) for name in ("record", "elapsed_time", "synchronize")),
)
"""Functions outside of gemmtune on which a measurement rests."""


def unchanged(target: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which imports a target. Raises SubjectError if it replaced functions, which are put back."""
    before = {(id(owner), name): (owner, value) for owner, name, value in _held()}
    try:
        return work()
    finally:
        changed = [(owner, name, value) for (_, name), (owner, value) in before.items() if _now(owner, name) is not value]
        for owner, name, value in changed:
            setattr(owner, name, value)
        if changed:
            names = ", ".join(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in changed[:3])
            raise SubjectError(f"{target}: its import replaced {names}, expected that it leaves other modules as they are")


def _now(owner: object, name: str) -> object:
    """Return what an owner has under a name, itself and not what a class makes of it."""
    own = vars(owner)
    return own[name] if name in own else getattr(owner, name, None)


def _held() -> Iterator[tuple[object, str, object]]:
    """Yield the functions, methods and properties of gemmtune's modules, and those of KEPT, with their owners and names."""
    for owner, name in KEPT:
        yield owner, name, _now(owner, name)
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] != PACKAGE or module is None:
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                yield module, name, value
            if isinstance(value, type) and value.__module__ == key:
                yield from ((value, each, made) for each, made in list(vars(value).items()) if isinstance(made, _METHODS))


_METHODS = (type(unchanged), property, staticmethod, classmethod)


GROUP = "gemmtune.backends"
"""Group of entry points by which packages supply GEMMs."""
ASSUMED = {"deterministic": True, "streams": True, "capturable": True}
"""Declarations that a GEMM needs to be offered. Where it does not mention one, its calls are observed (``selector.observed``)."""
MOST_FILES = 256
MOST_BYTES = 64 * 2**20
"""Largest size of a package hashed file by file. Larger: its version and the files that define the GEMM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Target in the state in which this process imported it.

    ``folder`` is the folder on the module path with its package. ``digest`` is a hash of its sources, version and
    declarations. ``undeclared`` is True for a GEMM that leaves declarations out, for which ``ASSUMED`` has values.
    """

    target: str
    found: Subject | Backend
    folder: str
    version: str
    digest: str
    undeclared: bool = False


def targets_of(settings: Settings) -> tuple[str, ...]:
    """Return the targets of the settings, then of installed packages if allowed and backends are unnamed or include ``own``."""
    installed = installed_targets() if settings.backends is None or "own" in settings.backends else ()
    return tuple(dict.fromkeys((*(settings.extra_choices or ()), *installed)))


@functools.cache
def installed_targets() -> tuple[str, ...]:
    """Return the targets of the entry points of installed packages, sorted by name."""
    return tuple(point.value for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value)))


def loaded(target: str, folder: str = "") -> Loaded:
    """Return a target, imported once in this process. ``folder``, where another process found it, is searched last.

    Raises:
        SubjectError, TraitsError: it cannot be imported or called, or its declarations are invalid.
    """
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return _loaded(target)


@functools.cache
def _loaded(target: str) -> Loaded:
    object_ = unchanged(target, functools.partial(found_at, target))
    methods = (getattr(object_, name, None) for name in ("available", "enumerate"))
    whole = all(map(callable, methods)) and hasattr(object_, "name")  # it has the members of ``choice.Backend``
    found: Subject | Backend = object_ if whole else wrapped(SubjectSpec(target=target), object_)  # type: ignore[assignment]
    undeclared = False
    if isinstance(found, Subject) and found is not object_:
        assumed = _assumed(getattr(object_, ATTRIBUTE, None), found.traits)
        undeclared, found.traits = bool(assumed), found.traits.changed(assumed)
    module = sys.modules.get(target.partition(":")[0])
    if module is None:
        raise SubjectError(f"GEMM: got {target!r}, which is gemmtune's own, expected one of yours; --backends selects gemmtune's")
    version = _version(module)
    digest = _digest(module, object_, found, version)
    return Loaded(target=target, found=found, folder=_folder_of(module), version=version, digest=digest, undeclared=undeclared)


def _assumed(declared: object, traits: Traits) -> Mapping[str, Any]:
    """Return what is assumed of a GEMM beside its declarations. A function f(a, b) without any is tried for batches too.

    Streams and CUDA graphs do not concern one that declares itself to be for CPUs.
    """
    if declared is None:
        return ASSUMED | ({"ops": ["mm", "bmm"]} if traits.ops == ("mm",) else {})
    if not isinstance(declared, Mapping):
        return {}
    names = ASSUMED.keys() - declared.keys() - ({"streams", "capturable"} if traits.devices == ("cpu",) else set())
    return {name: value for name, value in ASSUMED.items() if name in names}


def _digest(module: ModuleType, object_: object, found: Subject | Backend, version: str) -> str:
    """Return a hash of the sources of a GEMM's package or module, its version and its declarations."""
    own = sys.modules.get(getattr(inspect.unwrap(object_), "__module__", None) or "", module) if callable(object_) else module
    hashed = hashlib.sha256(f"{version}\0".encode())
    if isinstance(found, Subject):
        hashed.update(json.dumps(found.traits.as_json(), sort_keys=True).encode())
    for path in sorted({path for part in (module, own) for path in _files(part)}):
        hashed.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


def _files(module: ModuleType) -> list[Path]:
    """Return the files of the module's package, or only the module's file if it has no package or a large one."""
    if not getattr(module, "__file__", None):
        return []
    file = Path(str(module.__file__)).resolve()
    found, size = [file], 0
    for path in _walk(file.parent) if module.__package__ else ():
        found.append(path)
        size += path.stat().st_size
        if len(found) > MOST_FILES or size > MOST_BYTES:
            return [file]
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if Path(parent, name).is_file() and not name.startswith("."))


def _version(module: ModuleType) -> str:
    """Return the version of the module's package from ``__version__`` or its installation, or "" if neither is known."""
    top = module.__name__.partition(".")[0]
    said = getattr(sys.modules.get(top), "__version__", None)
    if said is not None:
        return str(said)
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return ""


def _folder_of(module: ModuleType) -> str:
    """Return the folder on the module path with the package, or "" for a built-in module."""
    top = sys.modules[module.__name__.partition(".")[0]]
    if paths := list(getattr(top, "__path__", [])):
        return str(Path(paths[0]).resolve().parent)
    file = getattr(top, "__file__", None)
    return str(Path(file).resolve().parent) if file else ""
