"""One algorithm of cuBLASLt as a choice."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from ...choice import Choice, Claims, Kernel
from ...device import DeviceInfo
from ...errors import InvalidProblemError
from ...problem import Problem
from .constants import ReductionScheme
from .gemm import Gemm, gemm_of
from .launch import kernel_of
from .library import Algorithm, bindings, checked


@dataclass(frozen=True, kw_only=True)
class CublasLtChoice(Choice):
    """Choice of one algorithm for a problem."""

    algorithm: Algorithm = field(repr=False)

    @property
    def content_hash(self) -> str:
        """Hash of the attributes. The opaque bytes and the rank in the query may change with the version."""
        text = "cublaslt " + " ".join(f"{attribute.name}={value}" for attribute, value in self.algorithm.attributes)
        return hashlib.sha256(text.encode()).hexdigest()

    def at(self, problem: Problem, device: DeviceInfo) -> "CublasLtChoice | str":
        try:
            gemm = gemm_of(problem)
            algorithm = checked(self.algorithm, gemm, problem, device.index)
        except (InvalidProblemError, RuntimeError) as error:
            return str(error)
        return why_not_rounded(algorithm, gemm, problem) or choice_of(problem, algorithm)

    def load(self) -> Any:
        return bindings()

    def bind(self, loaded: Any) -> Kernel:
        """Make the descriptors and return the kernel. Raises RuntimeError with the status's name if cuBLASLt refuses."""
        return kernel_of(loaded, gemm_of(self.problem), self.problem, self.algorithm)


def why_not_rounded(algorithm: Algorithm, gemm: Gemm, problem: Problem) -> str | None:
    """Return why errors exceed the bound, or None: 15 to 22 times for algorithm 24, 3 to 29 parts, bfloat16, CUDA 13.0."""
    rounds = gemm.bias and algorithm.splits > 1 and problem.out.dtype != problem.accumulator
    return "it splits K and rounds the sum to the result's dtype before scaling it and adding the bias" if rounds else None


def choice_of(problem: Problem, algorithm: Algorithm) -> CublasLtChoice:
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
            splits=algorithm.splits,
            input_mode=problem.precision.input_mode,
        ),
        info=attributes | {"workspace_bytes": algorithm.workspace_bytes, "waves": round(algorithm.waves, 3)},
        algorithm=algorithm,
    )
