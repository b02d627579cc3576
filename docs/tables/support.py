"""Operations, backends and dtypes: what serves what, asked of the code."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import gemmtune.backends.ck.legality as ck
import gemmtune.backends.cutlass.configs as cutlass
import gemmtune.backends.triton.legality as triton
from gemmtune.backends.cublaslt.gemm import gemm_of
from gemmtune.backends.table import BACKENDS, load
from gemmtune.cli.spec import Spec
from gemmtune.cli.words import DTYPES, OPS
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Problem
from gemmtune.problem.fused import NAMES
from gemmtune.problem.operations import BATCHED_OPS, OPERATIONS, SPARSE_OPS
from gemmtune.settings import Settings

from . import table

SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "tf32": "tf32", "int8": "i8",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3z", "float8_e5m2fnuz": "e5m2z",
}  # fmt: skip
SIZES = ((256, 256, 256), (16, 4096, 4096), (1, 1024, 1024), (256, 256, 16384), (4096, 1024, 1024))
"""M, N and K that are tried: kernels for few rows or long sums serve only some."""
STEPWISE = (*SPARSE_OPS, "routed_grouped_mm", "combined_grouped_mm")
"""Operations whose gradients the public functions make of other products, not the rules of their rows."""
SERVING = [name for name in BACKENDS if name != "own"]
ARCH = {"ck": "gfx942", "cpp": "avx512"}


def problems(operation: str, dtype: str, kind: str) -> Iterator[Problem]:
    """Yield problems of an operation: several sizes, b as it is and prepacked, weights as in a layer and gradients."""
    blocks = {"block": "32"} if operation in SPARSE_OPS else {}
    for (m, n, k), prepacked, layout in itertools.product(SIZES, (False, True), ("nt", "tn")):
        sizes = (2, m, n, k) if operation in BATCHED_OPS else (m, n, k)
        with contextlib.suppress(InvalidProblemError):
            spec = Spec(op=operation, dtype=dtype, device_type=kind, prepacked=prepacked, layout=layout, **blocks)
            yield spec.problem(sizes, "table")


def why_not(backend: str, problem: Problem) -> str | None:
    """Return why a backend has nothing for a problem, by its own predicate, or None."""
    device = preset(ARCH.get(backend, "sm90"))
    if backend == "cublaslt":
        try:
            return None if gemm_of(problem) else "nothing"
        except InvalidProblemError as error:
            return str(error)
    if backend in ("aten", "cuda", "cpp"):
        return None if load(backend).enumerate(problem, device, Settings()).choices else "nothing"
    return {"triton": triton, "ck": ck, "cutlass": cutlass}[backend].check_problem(problem, device)


@functools.cache
def serves(backend: str, operation: str, dtype: str) -> bool:
    """Return True if a backend has something for an operation on operands of a dtype."""
    kind = "cpu" if backend == "cpp" else "cuda"
    return any(why_not(backend, problem) is None for problem in problems(operation, dtype, kind))


def matrix() -> str:
    """Return operations by backends; a cell has the dtypes of a."""
    rows = []
    for operation in OPS:
        cells = [" ".join(SHORT[dtype] for dtype in DTYPES if serves(backend, operation, dtype)) for backend in SERVING]
        rows.append([f"`{operation}`", *cells])
    return table(["operation", *(f"`{name}`" for name in SERVING)], rows)


def operations() -> str:
    """Return the operations: formula, scalars, gradient, prepacked weights."""
    rows = []
    for name in OPS:
        row = OPERATIONS.get(name) or NAMES[name]
        formula = row.formula if name in OPERATIONS else "(a @ b) · scale of int8, the int32 sums never stored"
        rows.append([f"`{name}`", formula, "yes" if row.gradient or name in STEPWISE else "", "yes" if row.prepacks else ""])
    return table(["operation", "result", "gradient", "prepacked b"], rows)


def names() -> str:
    """Return the short names of dtypes."""
    return table(["short", "dtype"], [[short, f"`{name}`"] for name, short in SHORT.items()])


MAKERS: dict[str, Callable[[], str]] = {"support": matrix, "operations": operations, "dtypes": names}
