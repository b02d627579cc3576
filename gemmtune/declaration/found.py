"""Objects by name: ``package.module:name``, or ``backend:triton`` for one of gemmtune's backends."""

import functools
import importlib
import importlib.util
import os
import sys

from ..errors import SubjectError

OURS = "gemmtune.conformance.gemms.backends"
"""Module of ``backend:triton`` and the like."""


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
            raise SubjectError(
                f"{target}: there is no module {error.name!r} here; is it installed, or in the working folder?"
            ) from error
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
