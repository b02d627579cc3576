"""torch's precision flags of this process, set to what a Problem recorded.

A Problem carries the flags that were in force where it was made (see ``problem.precision``). Library kernels read the flags of the
process in which they run, so a process that measures for another one calls ``set_precision`` before it runs any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import Precision, Problem
from .precision import precision_of

_IEEE_NAMES = ("none", "ieee")
"""Values of ``fp32_precision`` that mean float32 as it is; ``none`` is what a process begins with."""
_CPU_FLOAT32: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
"""oneDNN's switch for float32 products in bfloat16 or tf32, on CPUs that multiply those faster."""


def set_precision(problem: Problem) -> None:
    """Make this process's flags those of ``problem``. Touches only a flag that differs; the rest of the program sees the change."""
    if problem.device_type == "cuda":
        if precision_of(problem.dtype, "cuda") != problem.precision:
            _set_cuda(problem.dtype, problem.precision)
    elif problem.dtype == torch.float32 and _CPU_FLOAT32.fp32_precision not in _IEEE_NAMES:
        _CPU_FLOAT32.fp32_precision = "ieee"


@contextmanager
def precision_scope(problem: Problem) -> Iterator[None]:
    """``set_precision`` for a ``with`` block, for code that shares its process with a caller."""
    before_cuda = precision_of(problem.dtype, "cuda")
    before_cpu = _CPU_FLOAT32.fp32_precision
    set_precision(problem)
    try:
        yield
    finally:
        if precision_of(problem.dtype, "cuda") != before_cuda:
            _set_cuda(problem.dtype, before_cuda)
        if _CPU_FLOAT32.fp32_precision != before_cpu:
            _CPU_FLOAT32.fp32_precision = before_cpu


def _set_cuda(dtype: torch.dtype, precision: Precision) -> None:
    matmul = torch.backends.cuda.matmul
    if dtype == torch.float32:
        matmul.fp32_precision = precision.input_mode
    elif dtype == torch.float16:
        matmul.allow_fp16_reduced_precision_reduction = _with_split_k("fp16", precision)
    elif dtype == torch.bfloat16:
        matmul.allow_bf16_reduced_precision_reduction = _with_split_k("bf16", precision)


def _with_split_k(short: str, precision: Precision) -> bool | tuple[bool, bool]:
    """The flag's new value; where torch keeps a second one beside it, whether split-K is allowed, that one stays as it is."""
    name = f"allow_{short}_reduced_precision_reduction_split_k"
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, name):
        return precision.reduced_partials
    return (precision.reduced_partials, bool(getattr(matmul, name)))
