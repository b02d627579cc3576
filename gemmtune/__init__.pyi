"""The public names, for type checkers and for ``__init__.py``, which imports each at its first use."""

from . import settings as settings, sparse as sparse
from .dispatch.prepack import PackedOperand as PackedOperand
from .errors import (
    CompileError as CompileError,
    EpilogueError as EpilogueError,
    ErrorFromChoice as ErrorFromChoice,
    FleetError as FleetError,
    GemmtuneError as GemmtuneError,
    InvalidProblemError as InvalidProblemError,
    NoValidChoicesError as NoValidChoicesError,
    SettingsError as SettingsError,
    StoreError as StoreError,
    UnavailableError as UnavailableError,
)
from .integration.background import BackgroundTuning as BackgroundTuning, tuning_in_background as tuning_in_background
from .integration.explain import explain as explain
from .integration.optimize import optimize as optimize, restore as restore
from .integration.quantize import quantize_ as quantize_
from .integration.record import record as record
from .integration.recording import Recording as Recording
from .integration.sparsify import sparsify_ as sparsify_
from .integration.using import use as use
from .judging.verdict import Judgement as Judgement, judge as judge
from .ops.grouped import grouped_mm as grouped_mm, mixed_grouped_mm as mixed_grouped_mm, scaled_grouped_mm as scaled_grouped_mm
from .ops.packing import pack_int4 as pack_int4, prepack as prepack, unpack_int4 as unpack_int4
from .ops.products import (
    addmm as addmm,
    baddbmm as baddbmm,
    bmm as bmm,
    int_mm as int_mm,
    int_mm_mul as int_mm_mul,
    mixed_mm as mixed_mm,
    mm as mm,
    mm_plus_mm as mm_plus_mm,
    scaled_mm as scaled_mm,
)
from .problem import Epilogue as Epilogue, Layout as Layout, Precision as Precision, Problem as Problem
from .quantized.weight import QuantizedWeight as QuantizedWeight
from .selector.table import TuningResult as TuningResult
from .sparse.products import bsr_addmm as bsr_addmm, bsr_mm as bsr_mm, int_bsr_addmm as int_bsr_addmm
from .sparse.sampled import sampled_addmm_bsr as sampled_addmm_bsr
from .tuning.multi import Multi as Multi, multi as multi
from .tuning.tune import tune as tune
from .version import __version__ as __version__
