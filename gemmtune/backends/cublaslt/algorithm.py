"""One algorithm of cuBLASLt as a choice."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ...choice import Choice, Claims, Kernel, Run, Scalars, Tensors
from ...device import DeviceInfo
from ...errors import InvalidProblemError
from ...problem import Problem
from ...problem.problem import ScalarClass
from ..scaling import scale_placer
from .constants import SCALARS, ReductionScheme, Scalar
from .gemm import Gemm, gemm_of
from .library import Algorithm, Descriptors, bindings, checked, handle, named_errors


@dataclass(frozen=True, kw_only=True)
class CublasLtChoice(Choice):
    """A problem and the algorithm that does it."""

    algorithm: Algorithm = field(repr=False)

    @property
    def content_hash(self) -> str:
        """Over the attributes: the opaque bytes and the rank in the query belong to one version and may change."""
        text = "cublaslt " + " ".join(f"{attribute.name}={value}" for attribute, value in self.algorithm.attributes)
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> CublasLtChoice | str:
        """The algorithm for the problem, where cuBLASLt's own check lets it pass."""
        try:
            gemm = gemm_of(problem)
            algorithm = checked(self.algorithm, gemm, problem, device.index)
        except (InvalidProblemError, RuntimeError) as error:
            return str(error)
        return why_not_rounded(algorithm, gemm, problem) or choice_of(problem, algorithm)

    def load(self) -> Any:
        """The bindings of the library. Raises UnavailableError where it is missing."""
        return bindings()

    def bind(self, loaded: Any) -> Kernel:
        """Make the descriptors. Raises RuntimeError with the status's name if cuBLASLt refuses."""
        return Kernel(run=_launcher(loaded, gemm_of(self.problem), self.problem, self.algorithm))


def why_not_rounded(algorithm: Algorithm, gemm: Gemm, problem: Problem) -> str | None:
    """Why the algorithm is not precise enough, or None.

    Seen of algorithm 24 with 3 to 29 parts, bfloat16, CUDA 13.0: errors of 15 to 22 times the bound.
    """
    rounds = gemm.bias and algorithm.splits > 1 and problem.out.dtype != problem.accumulator
    return "it divides K and rounds the sum to the result's dtype before it scales it and adds the bias" if rounds else None


def choice_of(problem: Problem, algorithm: Algorithm) -> CublasLtChoice:
    """The choice of an algorithm for a problem."""
    attributes = {attribute.name.lower(): value for attribute, value in algorithm.attributes}
    labels = [f"algo{attributes['id']}", *(f"{name}{value}" for name, value in attributes.items() if name != "id")]
    in_output_type = algorithm.splits > 1 and algorithm.reduction in (ReductionScheme.INPLACE, ReductionScheme.OUTPUT_TYPE)
    return CublasLtChoice(
        name="cublaslt:" + "_".join(labels),
        backend="cublaslt",
        problem=problem,
        claims=Claims(
            accumulate=problem.accumulator,
            partials=problem.out.dtype if in_output_type else problem.accumulator,
            epilogue_input=problem.accumulator,
            splits=algorithm.splits,
            input_mode=problem.precision.input_mode,
        ),
        info=attributes | {"workspace_bytes": algorithm.workspace_bytes, "waves": round(algorithm.waves, 3)},
        algorithm=algorithm,
    )


def _launcher(lt: Any, gemm: Gemm, problem: Problem, algorithm: Algorithm) -> Run:
    """The function that a call runs. What it needs lies in its locals: its own cost adds to every product."""
    descriptors = Descriptors(gemm, problem)
    matmul, failure, address = lt.matmul, lt.cuBLASLtError, ctypes.addressof
    raw_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    left, right, c, d = descriptors.left, descriptors.right, descriptors.c, descriptors.d
    opaque, need = ctypes.create_string_buffer(algorithm.opaque, len(algorithm.opaque)), algorithm.workspace_bytes
    scalar = SCALARS[problem.accumulator]
    fixed_alpha = _fixed(problem.alpha, scalar)
    # A bias goes through the epilogue, unscaled: the product itself then has beta 0.
    fixed_beta = _fixed(problem.beta if gemm.c is not None else "zero", scalar)
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


def workspace(index: int, stream: int, size_bytes: int) -> torch.Tensor:
    """Scratch memory of at least ``size_bytes`` for work on ``stream``, the current stream of the CUDA device ``index``.

    All kernels share one block for each device and stream, since the work of a stream never overlaps. A graph that is captured gets
    one of its own, from its own memory pool: it may be replayed on any stream, next to calls that use the shared one.
    """
    if torch.cuda.is_current_stream_capturing():
        return _allocate(index, size_bytes)
    block = _blocks.get((index, stream))
    if block is None or block.numel() < size_bytes:
        # The old block goes back to torch's allocator, which reuses it in the order of this stream only.
        block = _blocks[index, stream] = _allocate(index, size_bytes)
    return block


_blocks: dict[tuple[int, int], torch.Tensor] = {}


def _allocate(index: int, size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", index))


def _with_pointers(launch: Run, descriptors: Descriptors, gemm: Gemm, problem: Problem) -> Run:
    """The run with scales and a bias, whose addresses are part of the descriptor, which another thread may be about to use as well.

    Scales that lie otherwise than cuBLASLt wants them are laid out first.
    """
    lock, swapped, bias = threading.Lock(), gemm.swapped, gemm.bias
    place = scale_placer(problem) if gemm.scaling else None
    bias_at = 2 if place is None else 4

    def launch_with_pointers(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        scales = place(tensors[2], tensors[3]) if place is not None else None  # held until the product is launched
        with lock:
            if scales is not None:
                descriptors.set_scales(scales[swapped].data_ptr(), scales[not swapped].data_ptr())
            if bias:
                descriptors.set_bias(tensors[bias_at].data_ptr())
            launch(out, tensors, scalars)

    return launch_with_pointers


def _fixed(kind: ScalarClass, scalar: Scalar) -> ctypes.c_float | ctypes.c_double | ctypes.c_int32 | None:
    """The value of alpha or beta as cuBLASLt reads it, None if it is known at the call only."""
    return None if kind == "general" else scalar(1 if kind == "one" else 0)
