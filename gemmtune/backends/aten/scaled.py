"""scaled_mm by torch's ``_scaled_mm``: the problems that it supports, and copies that adapt operands and scales to it."""

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from ...choice import Kernel, Scalars, Tensors
from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import FLOAT8_FNUZ, dtype_name
from ...problem.layout import ALIGNED_BYTES
from ..scaling import MODES, Mode, has_plain_bias, mode_of, scale_placer
from .dense import as_stated, with_epilogue

Tensor = torch.Tensor
ScaledCall = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""``call(a, b, scale_a, scale_b, bias, out)``, which writes into ``out``, or into a new tensor if that is None."""
MULTIPLE = 16
"""Multiple of K, N and the addresses of rows that ``_scaled_mm`` requires on a GPU."""
FLOAT8_CAPABILITY, HOPPER = 89, 90
FNUZ_ARCH = "gfx942"
"""AMD GPU whose 8-bit floats are the ones without infinities, the only ones that hipBLASLt supports there."""
CUDA_OF_VECTOR_SCALES = (12, 9)
"""First CUDA version whose cuBLASLt has a scale for each row or block."""
BLOCK_ROWS_MULTIPLE = 4
"""Multiple of the rows of a with block scales, so that each column of those scales begins at an aligned address."""


def why_not_native(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why ``_scaled_mm`` cannot solve the problem on the device, even with copies, or None."""
    mode, dtypes = mode_of(problem), (problem.a.dtype, problem.b.dtype)
    if problem.k == 0:
        return "K is 0: nothing to multiply"
    if device.arch == FNUZ_ARCH or not set(dtypes).isdisjoint(FLOAT8_FNUZ):
        return _why_not_fnuz(problem, device)
    if device.type == "cpu":
        if mode == "row" and not rows_on_this_cpu():
            return f"torch {torch.__version__} has scales for tensors only on this CPU, got {mode}"
        return None if mode in ("tensor", "row") else f"on a CPU it has scales for tensors and rows only, got {mode}"
    if device.type != "cuda" or device.capability < FLOAT8_CAPABILITY:
        return f"its 8-bit floats need an NVIDIA GPU of compute capability 8.9, got {device.arch}"
    if problem.a.dtype == problem.b.dtype == torch.float8_e5m2:
        return "cuBLASLt does not multiply two float8_e5m2 matrices"
    if mode == "tensor":
        return None
    if device.capability != HOPPER:
        return f"scales for {mode} are tried on sm90 only, got {device.arch}"
    if torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2])) < CUDA_OF_VECTOR_SCALES:
        return f"scales for {mode} need CUDA 12.9, got {torch.version.cuda}"
    if MODES[mode].blocks and torch.float8_e5m2 in dtypes:
        return f"with scales for {mode} it multiplies float8_e4m3fn only, got {' and '.join(map(dtype_name, dtypes))}"
    return None


def _why_not_fnuz(problem: Problem, device: DeviceInfo) -> str | None:
    own, got = (" and ".join(map(dtype_name, pair)) for pair in (FLOAT8_FNUZ, (problem.a.dtype, problem.b.dtype)))
    if device.arch != FNUZ_ARCH:
        return f"{own} are floats of {FNUZ_ARCH} only, got {got} on {device.arch}"
    if not {problem.a.dtype, problem.b.dtype} <= set(FLOAT8_FNUZ):
        return f"{FNUZ_ARCH} multiplies {own}, got {got}"
    mode = mode_of(problem)
    return None if mode == "tensor" else f"on {FNUZ_ARCH} only one scale for each tensor is tried, got {mode}"


@functools.cache
def rows_on_this_cpu() -> bool:
    """Return True if ``_scaled_mm`` on this CPU takes a scale for each row, found by trying. torch 2.11 does not."""
    try:
        with _disable_current_modes():
            x, scale = torch.zeros(16, 16, dtype=torch.int8).view(torch.float8_e4m3fn), torch.ones(16, 1)
            torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@functools.cache
def bias_on_this_cpu() -> bool:
    """Return True if ``_scaled_mm`` on this CPU adds a bias of the result's dtype before it rounds, found by trying."""
    try:
        with _disable_current_modes():
            # 2 + 2^-7 rounds to 2 in bfloat16. With the bias it is 1 + 2^-7, which bfloat16 holds.
            x, bias = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.full((16,), -1.0, dtype=torch.bfloat16)
            scales = torch.tensor(2 + 2**-7), torch.tensor(1 / 16)
            result = torch._scaled_mm(x, x.t(), *scales, bias=bias, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return bool((result == 1 + 2**-7).all())


def fuses_bias(problem: Problem) -> bool:
    """Return True if the epilogue is only a bias that ``_scaled_mm`` adds."""
    return has_plain_bias(problem) and (problem.device_type == "cuda" or bias_on_this_cpu())


def product_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of what ``_scaled_mm`` returns. On a CPU, an epilogue that follows it reads float32."""
    follows = problem.epilogue is not None and not fuses_bias(problem)
    return torch.float32 if follows and problem.device_type == "cpu" else problem.out.dtype


def kernel_of(problem: Problem) -> Kernel:
    """Return the kernel of ``_scaled_mm``, with a bias if the epilogue is only that, else followed by the epilogue."""
    product = _native_product(problem)
    fused = fuses_bias(problem)
    m, n = problem.m, problem.n
    rows, cols, _ = _padding(problem)
    direct = not rows and not cols and problem.out == Layout.contiguous(problem.out.size, problem.out.dtype)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:  # noqa: ARG001
        a, b, scale_a, scale_b, *rest = tensors
        bias = rest[0] if fused else None
        if direct:
            product(a, b, scale_a, scale_b, bias, as_stated(out, problem.out))
        else:
            out.copy_(product(a, b, scale_a, scale_b, bias, None)[:m, :n])

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:  # noqa: ARG001
        a, b, scale_a, scale_b, *rest = tensors
        result = product(a, b, scale_a, scale_b, rest[0] if fused else None, None)
        return result[:m, :n].clone(memory_format=torch.contiguous_format) if rows or cols else result

    return with_epilogue(Kernel(run=run, run_new=run_new), problem, fused=fused)


def _native_product(problem: Problem) -> ScaledCall:
    """Return the product on copies of the operands that torch does not support unchanged."""
    mode = MODES[mode_of(problem)]
    rows, cols, along_k = _padding(problem)
    on_gpu = problem.device_type == "cuda"
    copy_a = bool(rows or along_k) or (on_gpu and not _rows_aligned(problem.a))
    copy_b = bool(cols or along_k) or (on_gpu and not _rows_aligned(problem.b.transposed))
    place = scale_placer(problem, rows, cols)
    plain = functools.partial(torch._scaled_mm, out_dtype=product_dtype(problem), use_fast_accum=problem.fast_accum)
    call: Callable[..., Tensor] = _blocks_call(problem, mode) if mode.blocks else plain

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        a = _copied(a, rows, along_k) if copy_a else as_stated(a, problem.a)
        b = _copied(b.t(), cols, along_k).t() if copy_b else as_stated(b, problem.b)
        scale_a, scale_b = place(scale_a, scale_b)
        if bias is not None:
            bias = pad(bias.reshape(-1), (0, cols)) if cols else bias.reshape(-1)
        return call(a, b, scale_a, scale_b, bias=bias, out=out)

    return product


def _blocks_call(problem: Problem, mode: Mode) -> ScaledCall:
    """Return the call that ``torch.nn.functional.scaled_mm`` makes, which names the kinds of scales.

    The older call deduces them from shapes, and supports square blocks only if K is a multiple of 512. This one refuses
    ``use_fast_accum`` with blocks, but that is a permission only.
    """
    (recipe_a, recipe_b), dtype = mode.recipes, problem.out.dtype
    function = torch.ops.aten._scaled_mm_v2

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        nothing: list[int] = []
        arguments = (a, b, [scale_a], [recipe_a], nothing, [scale_b], [recipe_b], nothing, bias, dtype, nothing, False)
        result: Tensor = function.default(*arguments) if out is None else function.out(*arguments, out=out)
        return result

    return call


def _padding(problem: Problem) -> tuple[int, int, int]:
    """Return the rows, columns and elements along K by which the operands are padded."""
    if problem.device_type != "cuda":
        return 0, 0, 0
    rows = -problem.m % BLOCK_ROWS_MULTIPLE if MODES[mode_of(problem)].blocks else 0
    return rows, -problem.n % MULTIPLE, -problem.k % MULTIPLE


def _rows_aligned(layout: Layout) -> bool:
    """Return True if each row lies without gaps and begins at an aligned address."""
    (_, cols), (step, along) = layout.size, layout.stride
    return along == 1 and step >= cols and step % ALIGNED_BYTES == 0 and layout.offset == 0


def _copied(x: Tensor, rows: int, cols: int) -> Tensor:
    """Return a row-major copy padded with zeros. It is copied as bytes, because torch cannot fill every 8-bit float."""
    bits = x.view(torch.int8)
    size = (x.shape[0] + rows, x.shape[1] + cols)
    copy = bits.new_zeros(size) if rows or cols else bits.new_empty(size)
    copy[: x.shape[0], : x.shape[1]].copy_(bits)
    return copy.view(x.dtype)
