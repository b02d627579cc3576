"""gemmtune finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it."""

from . import settings
from .dispatch.explain import explain
from .dispatch.prepack import PackedOperand, prepack
from .dispatch.tuning import tune
from .errors import (
    CompileError,
    EpilogueError,
    ErrorFromChoice,
    GemmtuneError,
    InvalidProblemError,
    NoValidChoicesError,
    SettingsError,
    StoreError,
    UnavailableError,
)
from .ops.dense import addmm, baddbmm, bmm, mm
from .problem import Epilogue, Layout, Precision, Problem
from .selector.tuning_result import TuningResult
from .version import __version__

__all__ = [
    "CompileError",
    "Epilogue",
    "EpilogueError",
    "ErrorFromChoice",
    "GemmtuneError",
    "InvalidProblemError",
    "Layout",
    "NoValidChoicesError",
    "PackedOperand",
    "Precision",
    "Problem",
    "SettingsError",
    "StoreError",
    "TuningResult",
    "UnavailableError",
    "__version__",
    "addmm",
    "baddbmm",
    "bmm",
    "explain",
    "mm",
    "prepack",
    "settings",
    "tune",
]
