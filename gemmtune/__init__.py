"""Library that finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it.

Calls: ``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``mixed_mm``, ``scaled_mm``, ``grouped_mm`` and others, with torch's arguments.
Models: ``optimize`` makes the layers of a model run the fastest kernels, ``restore`` undoes it, ``quantize_`` shrinks weights.
Tuning: ``tune`` measures ahead, ``explain`` shows what a call runs and why, ``record`` collects the GEMMs of a program.
Settings: ``settings.patch(name=value)``, variables ``GEMMTUNE_NAME``, or ``[tool.gemmtune]`` in pyproject.toml.

``gemmtune --help`` lists the commands, and ``docs`` has the pages. ``__init__.pyi`` lists the public names.
"""

import importlib

import lazy_loader

from . import forks as _forks  # noqa: F401 - what it does at forks is needed from the first use of a name on
from .version import __version__ as __version__

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, because the command's help needs no torch.

    The first use of any name but ``settings`` also defines the operators of torch, of which saved graphs may consist.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "settings":
        importlib.import_module(".integration.compile.extern", __name__)
    return _imported(name)
