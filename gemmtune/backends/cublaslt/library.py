"""cuBLASLt through nvmath-python's bindings: handles, descriptors and the heuristic query."""

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import Problem
from ..scaling import MODES
from . import constants
from .constants import AlgorithmAttribute, DescAttribute, PreferenceAttribute, ReductionScheme, ScaleMode
from .gemm import Gemm, Matrix

WORKSPACE_BYTES = 32 * 2**20
"""Workspace size that NVIDIA recommends for Hopper (cuBLAS documentation, cublasSetWorkspace), and enough for older GPUs."""
MOST_SPLITS = 16
"""Assumed number of splits of an algorithm that reports a negative number, which means that it decides at run time."""
PLACEHOLDER = 2**32
"""Address of a bias or a scale in the heuristic query, which uses its alignment only."""
SCALE_MODES = {0: ScaleMode.SCALAR, 1: ScaleMode.OUTER_VECTOR, 4: ScaleMode.VECTOR_128, 5: ScaleMode.BLOCK_128X128}
"""Modes of scales by torch's recipe (``scaling.Mode``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Result of the heuristic query: the opaque algorithm, its attributes, and the workspace that it needs."""

    opaque: bytes
    attributes: tuple[tuple[AlgorithmAttribute, int], ...]
    workspace_bytes: int
    waves: float

    @property
    def splits(self) -> int:
        """Largest number of partial sums of K that are added in each element."""
        reported = dict(self.attributes)[AlgorithmAttribute.SPLITK]
        return MOST_SPLITS if reported < 0 else max(reported, 1)

    @property
    def reduction(self) -> ReductionScheme:
        """Scheme by which partial sums are added, NONE without a split."""
        return ReductionScheme(dict(self.attributes)[AlgorithmAttribute.REDUCTION])


def installed_version() -> str | None:
    """Return the version of nvmath-python, or None if it is not installed. Imports nothing."""
    if importlib.util.find_spec("nvmath") is None:
        return None
    return importlib.metadata.version("nvmath-python")


@functools.cache
def bindings() -> Any:
    """Return the module of bindings. It uses the libcublasLt that torch has loaded before it searches for another."""
    return importlib.import_module("nvmath.bindings.cublasLt")


def function_address(name: str) -> int | None:
    """Return the address of a cuBLASLt function that the bindings found, or None if they do not report it."""
    try:
        internal = importlib.import_module("nvmath.bindings._internal.cublasLt")
        return int(internal._inspect_function_pointer(f"__{name}")) or None
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None


@functools.cache
def handle(index: int) -> int:
    """Return this process's cuBLASLt handle on the CUDA device ``index``. Any thread may use it at any time."""
    with torch.cuda.device(index), named_errors("cublasLtCreate"):
        created: int = bindings().create()
    return created


@contextmanager
def named_errors(call: str) -> Iterator[None]:
    """Convert the bindings' exceptions, which name the status, to RuntimeErrors that also name the call."""
    try:
        yield
    except bindings().cuBLASLtError as error:
        raise RuntimeError(f"{call}: {error}") from error


class Descriptors:
    """constants.Operation and matrix descriptors of one Gemm, freed with this object. Without an added matrix ``c`` is ``d``."""

    def __init__(self, gemm: Gemm, problem: Problem) -> None:
        lt = bindings()
        self._made: list[tuple[Any, int]] = []
        weakref.finalize(self, _destroy, self._made).atexit = False
        scale_type = constants.DATA_TYPES[problem.accumulator]
        tf32 = problem.precision.input_mode == "tf32"
        compute_type = constants.COMPUTE_TF32 if tf32 else constants.COMPUTE_TYPES[problem.accumulator]
        with named_errors("cublasLtMatmulDescCreate"):
            self.operation: int = lt.matmul_desc_create(compute_type, scale_type)
            self._made.append((lt.matmul_desc_destroy, self.operation))
            self._set = functools.partial(_set, lt.matmul_desc_set_attribute, self.operation)
            for attribute, x in ((DescAttribute.TRANSA, gemm.left), (DescAttribute.TRANSB, gemm.right)):
                self._set(attribute, ctypes.c_int32(constants.Operation.T if x.transposed else constants.Operation.N))
            if gemm.bias:
                self._set(DescAttribute.EPILOGUE, ctypes.c_uint32(constants.Epilogue.BIAS))
                self.set_bias(PLACEHOLDER + gemm.bias_alignment_bytes)
            if gemm.bias and gemm.batch > 1:
                self._set(DescAttribute.BIAS_BATCH_STRIDE, ctypes.c_int64(gemm.bias_batch_stride))
            if gemm.scaling:
                self._set_scaling(gemm, problem.fast_accum)
        self.left, self.right, self.d = (self._matrix(matrix, gemm.batch) for matrix in (gemm.left, gemm.right, gemm.d))
        self.c = self.d if gemm.c is None else self._matrix(gemm.c, gemm.batch)

    def _set_scaling(self, gemm: Gemm, fast_accum: bool) -> None:
        # A single scale is the descriptor's default, and older versions do not know the attribute.
        if gemm.scaling != "tensor":
            left, right = (SCALE_MODES[recipe] for recipe in MODES[gemm.scaling].recipes[:: -1 if gemm.swapped else 1])
            self._set(DescAttribute.A_SCALE_MODE, ctypes.c_int32(left))
            self._set(DescAttribute.B_SCALE_MODE, ctypes.c_int32(right))
        # Sums with block scales are promoted at each block anyway.
        self._set(DescAttribute.FAST_ACCUM, ctypes.c_int8(fast_accum and not MODES[gemm.scaling].blocks))
        self.set_scales(PLACEHOLDER, PLACEHOLDER)

    def _matrix(self, matrix: Matrix, batch: int) -> int:
        lt = bindings()
        with named_errors("cublasLtMatrixLayoutCreate"):
            descriptor: int = lt.matrix_layout_create(constants.DATA_TYPES[matrix.dtype], matrix.rows, matrix.cols, matrix.ld)
            self._made.append((lt.matrix_layout_destroy, descriptor))
            if batch > 1:
                _set(lt.matrix_layout_set_attribute, descriptor, constants.LayoutAttribute.BATCH_COUNT, ctypes.c_int32(batch))
                stride = ctypes.c_int64(matrix.batch_stride)
                _set(lt.matrix_layout_set_attribute, descriptor, constants.LayoutAttribute.STRIDED_BATCH_OFFSET, stride)
        return descriptor

    def set_bias(self, address: int) -> None:
        """Set the address of the bias, which is read when the product is launched."""
        self._set(DescAttribute.BIAS_POINTER, ctypes.c_uint64(address))

    def set_scales(self, left: int, right: int) -> None:
        """Set the addresses of the scales, which are read when the product is launched."""
        self._set(DescAttribute.A_SCALE_POINTER, ctypes.c_uint64(left))
        self._set(DescAttribute.B_SCALE_POINTER, ctypes.c_uint64(right))


def algorithms(gemm: Gemm, problem: Problem, index: int, count: int) -> list[Algorithm]:
    """Return the query's first ``count`` algorithms on device ``index``, best guess first. Raises RuntimeError for none."""
    lt = bindings()
    made = Descriptors(gemm, problem)
    results = (constants.HeuristicResult * count)()
    returned = ctypes.c_int(0)
    answers = (count, ctypes.addressof(results), ctypes.addressof(returned))
    with torch.cuda.device(index), _preference(gemm, problem) as preference, named_errors("cublasLtMatmulAlgoGetHeuristic"):
        lt.matmul_algo_get_heuristic(handle(index), made.operation, made.left, made.right, made.c, made.d, preference, *answers)
    return [_algorithm(result) for result in results[: returned.value] if result.status == 0]


def checked(algorithm: Algorithm, gemm: Gemm, problem: Problem, index: int) -> Algorithm:
    """Return another problem's algorithm with its workspace for this one. Raises RuntimeError if cuBLASLt cannot use it."""
    lt = bindings()
    made = Descriptors(gemm, problem)
    opaque, result = ctypes.create_string_buffer(algorithm.opaque, len(algorithm.opaque)), constants.HeuristicResult()
    with torch.cuda.device(index), named_errors("cublasLtMatmulAlgoCheck"):
        lt.matmul_algo_check(
            handle(index), made.operation, made.left, made.right, made.c, made.d,
            ctypes.addressof(opaque), ctypes.addressof(result),
        )  # fmt: skip
    if result.workspace_bytes > WORKSPACE_BYTES:
        raise RuntimeError(f"it needs {result.workspace_bytes} bytes of workspace, expected at most {WORKSPACE_BYTES}")
    return dataclasses.replace(algorithm, workspace_bytes=int(result.workspace_bytes), waves=float(result.waves))


@contextmanager
def _preference(gemm: Gemm, problem: Problem) -> Iterator[int]:
    """Yield the constraints of the query: workspace, alignments, and the storage of partial sums."""
    lt = bindings()
    schemes = ReductionScheme.COMPUTE_TYPE
    if problem.precision.reduced_partials or problem.out.dtype == problem.accumulator:
        schemes |= ReductionScheme.INPLACE | ReductionScheme.OUTPUT_TYPE
    c_bytes = d_bytes = gemm.d.alignment_bytes
    if gemm.c is not None:
        # Some results read and write vectors of C and D at the better of both alignments, or at that of the first column
        # only. Misaligned addresses follow (CUDA 13.0, algorithm 21). The alignment of all columns of both is therefore used.
        c_bytes = d_bytes = min(gemm.c.column_alignment_bytes, gemm.d.column_alignment_bytes)
    elif gemm.bias:
        d_bytes = min(d_bytes, gemm.bias_alignment_bytes)
    values = {
        PreferenceAttribute.MAX_WORKSPACE_BYTES: ctypes.c_uint64(WORKSPACE_BYTES),
        PreferenceAttribute.REDUCTION_SCHEME_MASK: ctypes.c_uint32(schemes),
        PreferenceAttribute.MIN_ALIGNMENT_A_BYTES: ctypes.c_uint32(gemm.left.alignment_bytes),
        PreferenceAttribute.MIN_ALIGNMENT_B_BYTES: ctypes.c_uint32(gemm.right.alignment_bytes),
        PreferenceAttribute.MIN_ALIGNMENT_C_BYTES: ctypes.c_uint32(c_bytes),
        PreferenceAttribute.MIN_ALIGNMENT_D_BYTES: ctypes.c_uint32(d_bytes),
    }
    with named_errors("cublasLtMatmulPreferenceCreate"):
        preference: int = lt.matmul_preference_create()
    try:
        with named_errors("cublasLtMatmulPreferenceSetAttribute"):
            for attribute, value in values.items():
                _set(lt.matmul_preference_set_attribute, preference, attribute, value)
        yield preference
    finally:
        lt.matmul_preference_destroy(preference)


def _algorithm(result: Any) -> Algorithm:
    lt = bindings()
    attributes = []
    written = ctypes.c_size_t(0)
    with named_errors("cublasLtMatmulAlgoConfigGetAttribute"):
        for attribute in AlgorithmAttribute:
            value = constants.ATTRIBUTE_TYPES.get(attribute, ctypes.c_uint32)()
            lt.matmul_algo_config_get_attribute(
                ctypes.addressof(result), attribute, ctypes.addressof(value), ctypes.sizeof(value), ctypes.addressof(written)
            )
            attributes.append((attribute, int(value.value)))
    return Algorithm(
        opaque=bytes(result.algorithm),
        attributes=tuple(attributes),
        workspace_bytes=int(result.workspace_bytes),
        waves=float(result.waves),
    )


def _set(setter: Any, descriptor: int, attribute: int, value: Any) -> None:
    setter(descriptor, int(attribute), ctypes.addressof(value), ctypes.sizeof(value))


def _destroy(made: list[tuple[Any, int]]) -> None:
    for destroy, descriptor in made:
        destroy(descriptor)
