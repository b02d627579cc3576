"""GEMMs by name: ``package.module:function``, ``folder/file.py:function``, or ``backend:triton`` and the like."""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from ..errors import SubjectError

OURS = "gemmtune.conformance.gemms.backends"
"""Module of ``backend:triton`` and the like."""


def importable(target: str) -> str:
    """Return a target whose module can be imported: for ``folder/file.py:name`` it is ``file``, and the folder becomes a place of
    modules. Raises SubjectError if there is no such file, or if another module has its name."""
    place, colon, name = target.partition(":")
    file = Path(place)
    if file.suffix != ".py":
        return target
    if not file.is_file():
        raise SubjectError(f"GEMM: got {target!r}, expected a file that exists, or a module such as mypkg.ops:matmul")
    sys.path[:] = dict.fromkeys([str(file.resolve().parent), *sys.path])
    importlib.invalidate_caches()
    found = importlib.util.find_spec(file.stem)
    if found is None or found.origin is None or not Path(found.origin).exists() or not file.samefile(found.origin):
        raise SubjectError(f"GEMM: got {target!r}, but {file.stem} is the name of another module; rename the file")
    return f"{file.stem}{colon}{name}"


def why_no_module(target: str, module: str) -> str:
    """Return the message for a target whose module, or a package that it is in, does not exist."""
    place, _, name = target.partition(":")
    if place.endswith(".py"):
        return f"{target}: got the name of a file, expected that of a module, such as {Path(place).stem}:{name}"
    return f"{target}: there is no module {module!r} here; is it installed, or in the working folder?"


def found_at(target: str) -> object:
    """Return the object at ``package.module:name``, or the module. Imports the module. Raises SubjectError if that fails."""
    module_name, _, path = target.partition(":")
    if not module_name:
        raise SubjectError(f"GEMM: got {target!r}, expected package.module:function, for instance mypkg.ops:matmul")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module_name in ("backend", "own") and (ours := _our_backend(target, module_name, path)) is not None:
        return ours
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SubjectError(why_no_module(target, error.name)) from error
        raise SubjectError(f"{target}: {module_name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise SubjectError(f"{target}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, path.split("."), module) if path else module
    except AttributeError as error:
        raise SubjectError(f"{target}: {error}") from error


def _our_backend(target: str, prefix: str, name: str) -> object:
    """Return one of gemmtune's backends as a GEMM. Return None for another name in a module ``backend`` or ``own`` of the user's.

    Raises SubjectError if there is no such module, and the prefix is own: or the name is unknown.
    """
    ours: dict[str, object] = importlib.import_module(OURS).BACKENDS
    if prefix == "backend" and name in ours:
        return ours[name]
    if importlib.util.find_spec(prefix) is not None:
        return None
    expected = f"backend:{name}" if name in ours else name if ":" in name else f"backend: and one of {', '.join(ours)}"
    raise SubjectError(f"GEMM: got {target!r}, expected {expected}; own: is the prefix of choices that are your GEMMs")
