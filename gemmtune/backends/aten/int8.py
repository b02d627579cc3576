"""int_mm by torch: ``_int_mm`` unchanged, or on a GPU with operands padded to supported sizes."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ...choice import Kernel, Scalars, Tensors
from ...problem import Layout, Problem
from ...problem.compositions import GPU_INT_COLUMN_MULTIPLE, GPU_INT_LEAST_ROWS, GPU_INT_MULTIPLE, int_product
from .dense import copied, with_epilogue

Tensor = torch.Tensor
PADDED_ROWS = 32


def why_not_native(problem: Problem) -> str | None:
    """Return why ``_int_mm`` does not support the operands unchanged, or None. ``int_product`` handles a CPU and K = 0."""
    if problem.device_type == "cpu" or problem.k == 0:
        return None
    if problem.m < GPU_INT_LEAST_ROWS:
        return f"on a GPU it takes at least {GPU_INT_LEAST_ROWS} rows of a, got {problem.m}"
    for name, size in (("K", problem.k), ("N", problem.n)):
        if size % GPU_INT_MULTIPLE:
            return f"on a GPU it takes multiples of {GPU_INT_MULTIPLE} for {name}, got {size}"
    for name, layout in (("a", problem.a), ("b", problem.b)):
        if not _regular(layout):
            return (
                f"on a GPU {name} has to lie without gaps at an aligned address, with a multiple of {GPU_INT_COLUMN_MULTIPLE} rows "
                f"if it is column-major, got {layout}"
            )
    return None


def padded(x: Tensor, rows: int, cols: int) -> Tensor:
    """Return a copy padded with ``rows`` rows and ``cols`` columns of zeros: column-major as before if ``_int_mm`` takes it."""
    if x.stride(0) == 1 and x.stride(1) != 1 and (x.shape[0] + rows) % GPU_INT_COLUMN_MULTIPLE == 0:
        return pad(x.t(), (0, rows, 0, cols)).contiguous().t()
    return pad(x, (0, cols, 0, rows)).contiguous()


def kernel_of(problem: Problem, aten_name: str) -> Kernel:
    """Return the kernel of an int_mm problem: ``_int_mm``, or ``_int_mm_pad`` with copies. An epilogue gets float sums."""
    product = int_product if aten_name == "_int_mm" else _padded_product(problem)
    dtype = torch.int32 if problem.epilogue is None else torch.float32
    ordinary = problem.out == Layout.contiguous(problem.out.size, problem.out.dtype)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
        return product(*tensors).to(dtype)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors
        torch._int_mm(a, b, out=out)

    direct = aten_name == "_int_mm" and problem.device_type == "cuda" and problem.k > 0 and ordinary
    return with_epilogue(Kernel(run=run, run_new=run_new) if direct else copied(run_new), problem)


def _padded_product(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product on copies of the operands that ``_int_mm`` does not support unchanged."""
    rows = PADDED_ROWS - problem.m if problem.m < GPU_INT_LEAST_ROWS else 0
    cols, along_k = -problem.n % GPU_INT_MULTIPLE, -problem.k % GPU_INT_MULTIPLE
    copy_a = bool(rows or along_k) or not _regular(problem.a)
    copy_b = bool(cols or along_k) or not _regular(problem.b)
    m, n = problem.m, problem.n

    def product(a: Tensor, b: Tensor) -> Tensor:
        a = padded(a, rows, along_k) if copy_a else a
        b = padded(b, along_k, cols) if copy_b else b
        sums = torch._int_mm(a, b)
        return sums[:m, :n].clone(memory_format=torch.contiguous_format) if rows or cols else sums

    return product


def _regular(layout: Layout) -> bool:
    """Return True if ``_int_mm`` on a GPU supports the memory layout of the matrix or its transpose."""
    rows, cols = layout.size
    transposed = layout.stride == (1, rows) and rows > 1 and cols > 1 and rows % GPU_INT_COLUMN_MULTIPLE == 0
    return (layout.stride == (cols, 1) or transposed) and layout.offset == 0
