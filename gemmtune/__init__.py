"""Library that finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it."""

import importlib
from typing import TYPE_CHECKING

from . import settings
from .version import __version__

if TYPE_CHECKING:
    from .public import *  # noqa: F403

__all__ = [  # noqa: F405
    "CompileError",
    "Epilogue",
    "EpilogueError",
    "ErrorFromChoice",
    "GemmtuneError",
    "InvalidProblemError",
    "Layout",
    "Multi",
    "NoValidChoicesError",
    "PackedOperand",
    "Precision",
    "Problem",
    "QuantizedWeight",
    "Recording",
    "SettingsError",
    "StoreError",
    "TuningResult",
    "UnavailableError",
    "__version__",
    "addmm",
    "baddbmm",
    "bmm",
    "bsr_addmm",
    "bsr_mm",
    "explain",
    "grouped_mm",
    "int_bsr_addmm",
    "int_mm",
    "int_mm_mul",
    "mixed_grouped_mm",
    "mixed_mm",
    "mm",
    "mm_plus_mm",
    "multi",
    "optimize",
    "pack_int4",
    "prepack",
    "quantize_",
    "record",
    "restore",
    "sampled_addmm_bsr",
    "scaled_grouped_mm",
    "scaled_mm",
    "settings",
    "sparse",
    "sparsify_",
    "tune",
    "unpack_int4",
    "use",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import torch and the other dependencies at the first use of a public name, because the command's help needs none of
        them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = importlib.import_module(".public", __name__)
        globals().update({known: getattr(public, known) for known in public.__all__})
        return globals()[name]
