"""Library that finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it.

``__init__.pyi`` lists the public names.
"""

import importlib

import lazy_loader

from . import forks as _forks  # noqa: F401 - what it does at forks is needed from the first use of a name on
from . import settings as settings
from .version import __version__ as __version__

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, because the command's help needs no torch.

    The first use of any name also defines the operators of torch, of which saved graphs may consist.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".integration.compile.extern", __name__)
    return _imported(name)
