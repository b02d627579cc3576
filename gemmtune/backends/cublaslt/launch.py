"""Launch of one algorithm: by the bindings, and as plain data for the native look-up, which calls cublasLtMatmul directly."""

import ctypes
import dataclasses
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...choice import Kernel, Run, Scalars, Tensors
from ...errors import UnavailableError
from ...problem import Layout, Problem
from ...problem.problem import ScalarClass
from ...toolchain.driver import find_driver
from ...toolchain.kept import kept
from ...toolchain.prepared import LibraryProduct, Memory
from ..scaling import scale_placer
from .constants import SCALARS, DescAttribute
from .gemm import Gemm, Matrix
from .library import Algorithm, Descriptors, function_address, handle, named_errors

FIRST_SCALE = 2
"""Index of scale_a among the tensors of a call. scale_b follows it."""


def kernel_of(lt: Any, gemm: Gemm, problem: Problem, algorithm: Algorithm) -> Kernel:
    """Return the kernel of an algorithm. Raises RuntimeError with the status's name if cuBLASLt refuses."""
    launch = _launcher(lt, gemm, problem, algorithm)
    return Kernel(run=launch, prepared=_prepared(gemm, problem, algorithm))


def _launcher(lt: Any, gemm: Gemm, problem: Problem, algorithm: Algorithm) -> Run:
    """Return the function that a call runs. Its data lies in local variables, because its overhead adds to every product."""
    descriptors = Descriptors(gemm, problem)
    matmul, failure, address = lt.matmul, lt.cuBLASLtError, ctypes.addressof
    raw_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    left, right, c, d = descriptors.left, descriptors.right, descriptors.c, descriptors.d
    opaque, need = ctypes.create_string_buffer(algorithm.opaque, len(algorithm.opaque)), algorithm.workspace_bytes
    scalar, alpha, beta = SCALARS[problem.accumulator], *fixed_scalars(gemm, problem)
    fixed_alpha, fixed_beta = (None if x is None else scalar(x) for x in (alpha, beta))
    swapped, whole = gemm.swapped, gemm.c is not None

    def launch(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        index = out.get_device()
        if index != current_device():
            with torch.cuda.device(index):
                return launch(out, tensors, scalars)
        stream = raw_stream(index)
        scratch = workspace(index, stream, need) if need else None  # held until the launch is made
        alpha_value = scalar(scalars[0]) if fixed_alpha is None else fixed_alpha  # type: ignore[arg-type]
        beta_value = scalar(scalars[1]) if fixed_beta is None else fixed_beta  # type: ignore[arg-type]
        left_at, right_at, out_at = tensors[0].data_ptr(), tensors[1].data_ptr(), out.data_ptr()
        if swapped:
            left_at, right_at = right_at, left_at
        c_at = tensors[2].data_ptr() if whole else out_at
        try:
            matmul(
                handle(index), descriptors.operation, address(alpha_value), left_at, left, right_at, right,
                address(beta_value), c_at, c, out_at, d, address(opaque), scratch.data_ptr() if scratch is not None else 0,
                need, stream,
            )  # fmt: skip
        except failure:
            with named_errors("cublasLtMatmul"):
                raise
        return None

    return _with_pointers(launch, descriptors, gemm, problem) if gemm.scaling or gemm.bias else launch


def fixed_scalars(gemm: Gemm, problem: Problem) -> tuple[int | None, int | None]:
    """Return alpha and beta as cuBLASLt gets them, with None for a value that is known only at the call."""

    def fixed(kind: ScalarClass) -> int | None:
        return None if kind == "general" else int(kind == "one")

    # A bias goes through the epilogue, unscaled, and the product then has beta 0.
    return fixed(problem.alpha), fixed(problem.beta) if gemm.c is not None else 0


def workspace(index: int, stream: int, size_bytes: int) -> torch.Tensor:
    """Return scratch memory of at least ``size_bytes`` for ``stream``, the current stream of the CUDA device ``index``.

    All kernels share one block for each device and stream, whose work never overlaps. A captured graph gets its own from its memory
    pool, because it may be replayed on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return _allocate(index, size_bytes)
    block = _blocks.get((index, stream))
    if block is None or block.numel() < size_bytes:
        # torch's allocator gets the old block back and reuses it in the order of this stream only.
        block = _blocks[index, stream] = kept(lambda: _allocate(index, size_bytes), index, stream)
    return block


_blocks: dict[tuple[int, int], torch.Tensor] = {}


def _allocate(index: int, size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", index))


def _with_pointers(launch: Run, descriptors: Descriptors, gemm: Gemm, problem: Problem) -> Run:
    """Return the launch with scales and a bias, whose addresses are stored in the descriptor under a lock.

    Another thread may be about to use the same descriptor. Scales in another layout than cuBLASLt's are laid out first.
    """
    lock, swapped, bias, bias_at = threading.Lock(), gemm.swapped, gemm.bias, bias_place(gemm)
    place = scale_placer(problem) if gemm.scaling else None

    def launch_with_pointers(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        scales = (
            place(tensors[FIRST_SCALE], tensors[FIRST_SCALE + 1]) if place is not None else None
        )  # held until the launch is made
        with lock:
            if scales is not None:
                descriptors.set_scales(scales[swapped].data_ptr(), scales[not swapped].data_ptr())
            if bias:
                descriptors.set_bias(tensors[bias_at].data_ptr())
            launch(out, tensors, scalars)

    return launch_with_pointers


def bias_place(gemm: Gemm) -> int:
    """Return the index of a bias among the tensors of a call, after the scales if there are any."""
    return FIRST_SCALE + 2 if gemm.scaling else 2


def _prepared(gemm: Gemm, problem: Problem, algorithm: Algorithm) -> LibraryProduct | None:
    """Return the launch as plain data, or None if scales need a new layout or the functions' addresses are unknown."""
    matmul, set_attribute = (function_address(name) for name in ("cublasLtMatmul", "cublasLtMatmulDescSetAttribute"))
    if matmul is None or set_attribute is None or (gemm.scaling and not _lie_right(problem)):
        return None
    memory = None
    index, need = torch._C._cuda_getDevice(), algorithm.workspace_bytes
    if need:
        try:
            capture = find_driver().capture_info
        except UnavailableError:  # too old for its other functions that a record uses
            return None
        memory = Memory(tensors=lambda stream: (workspace(index, stream, need),), capture=capture, size_bytes=need)
    # The Python function's descriptors are not shared, because its lock protects the addresses in them.
    descriptors = Descriptors(gemm, problem)
    pointers: list[tuple[int, int]] = []
    if gemm.scaling:
        pointers.append((int(DescAttribute.A_SCALE_POINTER), FIRST_SCALE + gemm.swapped))
        pointers.append((int(DescAttribute.B_SCALE_POINTER), FIRST_SCALE + (not gemm.swapped)))
    if gemm.bias:
        pointers.append((int(DescAttribute.BIAS_POINTER), bias_place(gemm)))
    alpha, beta = fixed_scalars(gemm, problem)
    matrices = (gemm.left, gemm.right, gemm.d if gemm.c is None else gemm.c, gemm.d)
    return LibraryProduct(
        function=matmul,
        set_attribute=set_attribute,
        handle=handle(index),
        operation=descriptors.operation,
        layouts=(descriptors.left, descriptors.right, descriptors.c, descriptors.d),
        algorithm=algorithm.opaque,
        workspace_bytes=need,
        scalar=SCALARS[problem.accumulator]._type_,  # type: ignore[arg-type]
        alpha=alpha,
        beta=beta,
        left=int(gemm.swapped),
        right=int(not gemm.swapped),
        added=2 if gemm.c is not None else None,
        pointers=tuple(pointers),
        owner=descriptors,
        sizes=tuple(size for x in matrices for size in (x.rows, x.cols, x.ld, x.batch_stride)),
        look=_look(gemm, matrices),
        check=function_address("cublasLtMatmulAlgoCheck") or 0,
        set_size=function_address("cublasLtMatrixLayoutSetAttribute") or 0,
        memory=memory,
    )


def _look(gemm: Gemm, matrices: Sequence[Matrix]) -> Hashable:
    """Return everything in the descriptors except sizes and strides."""
    bias = (gemm.bias_alignment_bytes, gemm.bias_batch_stride) if gemm.bias else None
    return (*(dataclasses.replace(x, rows=0, cols=0, ld=0, batch_stride=0) for x in matrices), bias, gemm.batch, gemm.scaling)


def _lie_right(problem: Problem) -> bool:
    """Return True if cuBLASLt can read the scales of every call in place, which depends on their layouts alone."""

    def like(layout: Layout) -> torch.Tensor:
        memory = torch.empty(layout.offset + layout.span, dtype=layout.dtype)
        return memory.as_strided(layout.size, layout.stride, layout.offset)

    assert problem.scale_a is not None
    assert problem.scale_b is not None
    scales = [like(problem.scale_a), like(problem.scale_b)]
    placed: Sequence[torch.Tensor] = scale_placer(problem)(scales[0], scales[1])
    return all(before.data_ptr() == after.data_ptr() for before, after in zip(scales, placed, strict=True))
