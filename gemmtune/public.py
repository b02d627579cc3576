"""Public names except ``settings``, which ``gemmtune/__init__.py`` imports at the first use of one of them."""

from . import sparse
from .dispatch.prepack import PackedOperand
from .dispatch.weights import QuantizedWeight
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
from .integration.compile import extern as _extern  # noqa: F401 - defines operators of torch, of which saved graphs may consist
from .integration.explain import explain
from .integration.optimize import optimize, restore
from .integration.quantize import quantize_
from .integration.record import record
from .integration.recording import Recording
from .integration.sparsify import sparsify_
from .integration.using import use
from .ops.grouped import grouped_mm, mixed_grouped_mm, scaled_grouped_mm
from .ops.packing import pack_int4, prepack, unpack_int4
from .ops.products import addmm, baddbmm, bmm, int_mm, int_mm_mul, mixed_mm, mm, mm_plus_mm, scaled_mm
from .problem import Epilogue, Layout, Precision, Problem
from .selector.tuning_result import TuningResult
from .sparse import operators as _block_operators  # noqa: F401 - defines operators of torch
from .sparse.products import bsr_addmm, bsr_mm, int_bsr_addmm
from .sparse.sampled import sampled_addmm_bsr
from .tuning.multi import Multi, multi
from .tuning.tune import tune

__all__ = [
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
    "sparse",
    "sparsify_",
    "tune",
    "unpack_int4",
    "use",
]
