"""The cublaslt backend: the algorithms that cuBLASLt's heuristic ranks first, each one a choice.

torch usually runs the first of them, and others are often faster. The heuristic query needs the device, so a machine without
it lists nothing.
"""

from dataclasses import dataclass

import torch

from ...choice import Availability, Offers, Refusal
from ...device import DeviceInfo, detect
from ...errors import InvalidProblemError
from ...problem import Problem
from ...settings import Settings
from .algorithm import choice_of, why_not_rounded
from .gemm import gemm_of
from .library import algorithms, bindings, installed_version

__all__ = ["BACKEND"]


@dataclass(frozen=True, slots=True)
class CublasLtBackend:
    """Backend of cuBLASLt's algorithms. See ``choice.Backend``."""

    name: str = "cublaslt"

    def available(self, device: DeviceInfo) -> Availability:
        """Return the availability: an NVIDIA GPU in this machine, and nvmath-python, are required."""
        if device.type != "cuda":
            return Availability(ok=False, detail=f"cuBLASLt serves NVIDIA GPUs, not {device.type}")
        version = installed_version()
        if version is None:
            return Availability(ok=False, detail="nvmath-python is not installed: pip install 'gemmtune[cublaslt]'")
        if not torch.cuda.is_available() or detect(device.torch_device) != device:
            return Availability(
                ok=False, detail=f"cuBLASLt's algorithms are queried on the device, and {device.name} is not present"
            )
        try:
            library = bindings().get_version()
        except (ImportError, RuntimeError) as error:
            return Availability(ok=False, detail=f"nvmath-python {version} does not load: {type(error).__name__}: {error}")
        return Availability(ok=True, detail=f"cuBLASLt {library} through nvmath-python {version}")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return device.type == "cuda"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the first ``cublaslt_top_k`` algorithms of the heuristic query for this problem on this device."""
        available = self.available(device)
        if not available.ok:
            return self._refused(available.detail)
        if problem.device_type != "cuda":
            return self._refused(f"cuBLASLt multiplies on a CUDA device, not on {problem.device_type}")
        if settings.cublaslt_top_k == 0:
            return self._refused("cublaslt_top_k is 0")
        try:
            gemm = gemm_of(problem)
            found = algorithms(gemm, problem, device.index, settings.cublaslt_top_k)
        except (InvalidProblemError, RuntimeError) as error:
            return self._refused(str(error))
        rounding = [reason for algorithm in found if (reason := why_not_rounded(algorithm, gemm, problem)) is not None]
        right = [algorithm for algorithm in found if why_not_rounded(algorithm, gemm, problem) is None]
        choices = {c.name: c for c in (choice_of(problem, algorithm) for algorithm in right)}
        refusals = (Refusal(name=self.name, reason=rounding[0], count=len(rounding)),) if rounding else ()
        return Offers(choices=tuple(choices.values()), refusals=refusals)

    def _refused(self, reason: str) -> Offers:
        return Offers(refusals=(Refusal(name=self.name, reason=reason),))


BACKEND = CublasLtBackend()
