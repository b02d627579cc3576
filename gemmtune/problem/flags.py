"""torch's precision flags of this process, set to the values that a Problem recorded.

A Problem carries the flags that were in force when it was made (see ``problem.precision``). Library kernels read the flags of the
process that runs them. A process that measures for another one therefore calls ``set_precision`` first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import Precision, Problem
from .precision import precision_of

_IEEE_NAMES = ("none", "ieee")
"""Values of ``fp32_precision`` that mean full float32. ``none`` is the initial value in a process."""
_CPU_FLOAT32: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
"""oneDNN's switch for float32 products in bfloat16 or tf32, on CPUs that multiply those faster."""


def set_precision(problem: Problem) -> None:
    """Set this process's flags to the values of ``problem``. Change only flags that differ; the whole program sees the change."""
    if problem.device_type == "cuda":
        if precision_of(problem.dtype, "cuda") != problem.precision:
            _set_cuda(problem.dtype, problem.precision)
    elif problem.dtype == torch.float32 and _CPU_FLOAT32.fp32_precision not in _IEEE_NAMES:
        _CPU_FLOAT32.fp32_precision = "ieee"


@contextmanager
def precision_scope(problem: Problem) -> Iterator[None]:
    """Apply ``set_precision`` inside a ``with`` block, for code that shares its process with a caller."""
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
    """Return the flag's new value. If torch pairs it with a second flag that permits split-K, keep that second value."""
    name = f"allow_{short}_reduced_precision_reduction_split_k"
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, name):
        return precision.reduced_partials
    return (precision.reduced_partials, bool(getattr(matmul, name)))
