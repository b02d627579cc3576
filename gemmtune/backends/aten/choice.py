"""One operation of torch as a choice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...choice import Choice, Kernel
from . import dense, int8, mixed, scaled, sums

__all__ = ["COMPOSED_SCALED", "NAME", "AtenChoice"]

NAME = "aten"
COMPOSED_SCALED = "dequantized_mm"
"""The name of scaled_mm by a product in wider floats."""


@dataclass(frozen=True, kw_only=True)
class AtenChoice(Choice):
    """An operation of torch, or a few, named as in ATen, with the arguments that are bound to it. All can write into ``out``."""

    aten_name: str
    kwargs: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Bound keywords: ``bias`` (``vector`` or ``matrix``) for addmm; ``gemm_dtype`` where the product is wider than the inputs."""

    @property
    def content_hash(self) -> str:
        """A hash over the choice's name, the ATen name and the sorted keywords."""
        text = json.dumps([self.name, self.aten_name, sorted(self.kwargs.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def bind(self, loaded: None) -> Kernel:  # noqa: ARG002
        """The calls; nothing has to be loaded. ``run_new`` is there where torch's own result has the layout that is asked for."""
        problem = self.problem
        if problem.c is not None:
            return sums.kernel_of(problem)
        if problem.integers:
            return int8.kernel_of(problem, self.aten_name)
        if problem.widens_b:
            return mixed.kernel_of(problem)
        if problem.float8:
            return scaled.composed_kernel(problem) if self.aten_name == COMPOSED_SCALED else scaled.kernel_of(problem)
        return dense.kernel_of(self.problem, self.aten_name, self.kwargs)
