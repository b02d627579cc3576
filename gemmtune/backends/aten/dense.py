"""Float products by torch: the dense operations, mm_plus_mm, mixed_mm, and wider result dtypes for an epilogue."""

from collections.abc import Callable, Mapping

import torch

from ...choice import Kernel, RunNew, Scalars, Tensors
from ...problem import Layout, Problem
from ...problem.compositions import dequantized
from ...problem.epilogue import evaluate
from ...toolchain.prepared import TorchOperation

Tensor = torch.Tensor


def gemm_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the product before the epilogue: out's if it is wider than a's or a's has one byte, else a's."""
    wanted = problem.out.dtype
    return wanted if problem.dtype.itemsize == 1 or wanted.itemsize > problem.dtype.itemsize else problem.dtype


def as_stated(x: Tensor, layout: Layout) -> Tensor:
    """Return x with the strides of its problem, for functions of torch that check those of dimensions of size 1."""
    return x if x.stride() == layout.stride else x.as_strided(layout.size, layout.stride)


def copied(run_new: RunNew) -> Kernel:
    """Return a kernel that copies the result into ``out``."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        out.copy_(run_new(tensors, scalars))

    return Kernel(run=run, run_new=run_new)


def of_sums(sums: RunNew, problem: Problem) -> Kernel:
    """Return the kernel of sums in a wider dtype than out's, which an epilogue gets unrounded."""
    kernel, dtype = copied(sums), problem.out.dtype

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        return sums(tensors, scalars).to(dtype)

    return with_epilogue(kernel if problem.epilogue is not None else Kernel(run=kernel.run, run_new=run_new), problem)


def with_epilogue(kernel: Kernel, problem: Problem, *, fused: bool = False) -> Kernel:
    """Return the product, then its epilogue eagerly unless ``fused``. ``run_new`` exists if torch's result has the layout."""
    if problem.epilogue is not None and not fused:
        kernel = _then_eager(kernel, problem)
    contiguous = problem.out == Layout.contiguous(problem.out.size, problem.out.dtype)
    return kernel if contiguous else Kernel(run=kernel.run)


def _then_eager(gemm: Kernel, problem: Problem) -> Kernel:
    epilogue, out_dtype, fresh, count = problem.epilogue, problem.out.dtype, gemm.run_new, len(problem.operands)
    in_place = gemm_dtype(problem) == problem.dtype == out_dtype and problem.out.row_major
    assert epilogue is not None
    assert fresh is not None

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        if in_place:
            gemm.run(out, tensors[:count], scalars)
            evaluate(epilogue, out, tensors[count:], out=out)
        else:
            evaluate(epilogue, fresh(tensors[:count], scalars), tensors[count:], out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        return evaluate(epilogue, fresh(tensors[:count], scalars), tensors[count:]).to(out_dtype).contiguous()

    return Kernel(run=run, run_new=run_new)


def kernel_of(problem: Problem, aten_name: str, kwargs: Mapping[str, str]) -> Kernel:
    """Return the kernel of a dense problem. The keyword ``bias`` selects if addmm gets it as a ``vector`` or a ``matrix``."""
    if gemm_dtype(problem) != problem.dtype:
        return with_epilogue(copied(_wide(problem)), problem)
    function: Callable[..., Tensor] = getattr(torch, aten_name)
    if aten_name in ("mm", "bmm"):
        return with_epilogue(_product(function, TorchOperation(operation=aten_name)), problem)  # type: ignore[arg-type]
    size = problem.out.size
    views: dict[str | None, Callable[[Tensor], Tensor]] = {
        "vector": lambda inp: inp if inp.dim() == 1 else inp[0],
        "matrix": lambda inp: inp.expand(size),
    }
    form = kwargs.get("bias")
    prepared = TorchOperation(operation=aten_name, inp=form or "given")  # type: ignore[arg-type]
    return with_epilogue(_scaled(function, views.get(form), prepared), problem)


def sum_kernel(problem: Problem) -> Kernel:
    """Return the kernel of a @ b + c @ d. c @ d is rounded to a's dtype unless the result is wider."""
    # torch.compile generates the same: one product, and another one added in place.
    multiply, add = (torch.bmm, Tensor.baddbmm_) if problem.batched else (torch.mm, Tensor.addmm_)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b, c, d = tensors
        add(multiply(c, d, out=out), a, b)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
        a, b, c, d = tensors
        return add(multiply(c, d), a, b)

    wide = _wide(problem)

    def both_wide(tensors: Tensors, scalars: Scalars) -> Tensor:
        return wide(tensors[2:], scalars).add_(wide(tensors[:2], scalars))

    widens = gemm_dtype(problem) != problem.dtype
    return with_epilogue(copied(both_wide) if widens else Kernel(run=run, run_new=run_new), problem)


def mixed_kernel(problem: Problem) -> Kernel:
    """Return the kernel of a mixed_mm problem: b converted to a matrix of a's dtype, then torch.mm."""
    product = copied(_wide(problem)) if gemm_dtype(problem) != problem.dtype else _product(torch.mm)
    dtype, encoding, zeros = problem.dtype, problem.encoding, problem.zero_b is not None
    fresh = product.run_new
    assert fresh is not None

    def pair(tensors: Tensors) -> Tensors:
        a, b, *scales = tensors
        scale, zero = scales[0] if scales else None, scales[1] if zeros else None
        return a, dequantized(b, scale, zero, encoding, dtype)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        product.run(out, pair(tensors), scalars)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        return fresh(pair(tensors), scalars)

    return with_epilogue(Kernel(run=run, run_new=run_new), problem)


def _product(function: Callable[..., Tensor], prepared: TorchOperation | None = None) -> Kernel:
    """Return a @ b by torch.mm or torch.bmm."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b = tensors
        function(a, b, out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
        a, b = tensors
        return function(a, b)

    return Kernel(run=run, run_new=run_new, prepared=prepared)


def _scaled(function: Callable[..., Tensor], view: Callable[[Tensor], Tensor] | None, prepared: TorchOperation) -> Kernel:
    """Return alpha · a @ b + beta · view(inp) by torch.addmm or torch.baddbmm."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        (a, b, inp), (alpha, beta) = tensors, scalars
        function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha, out=out)

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        (a, b, inp), (alpha, beta) = tensors, scalars
        return function(inp if view is None else view(inp), a, b, beta=beta, alpha=alpha)

    return Kernel(run=run, run_new=run_new, prepared=prepared)


def _wide(problem: Problem) -> RunNew:
    """Return the product in a wider dtype than the inputs: torch's ``out_dtype`` if cuBLAS supports it, else converted inputs."""
    dtype = gemm_dtype(problem)
    function: Callable[..., Tensor] = torch.bmm if problem.batched else torch.mm
    # cuBLAS multiplies 16-bit inputs into float32.
    direct = problem.device_type == "cuda" and torch.version.hip is None and dtype == torch.float32

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        a, b, *added = tensors
        result = function(a, b, out_dtype=dtype) if direct else function(a.to(dtype), b.to(dtype))
        if added:
            alpha, beta = scalars
            if alpha != 1:
                result *= alpha
            if beta != 0:
                result.add_(added[0], alpha=beta)
        return result

    return run_new
