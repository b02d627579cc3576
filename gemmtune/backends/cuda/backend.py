"""CUDA backend: our own CUDA C++ kernels for problems where libraries and Triton leave time on the table."""

from typing import Any

from ...choice import Availability, Offers
from ...device import DeviceInfo
from ...errors import ONLY_COMPILED, UnavailableError
from ...problem import Problem
from ...settings import Settings
from ...toolchain.cubin import find_cubin_compiler
from .bsr.family import Bsr
from .bsr_skinny.family import BsrSkinny
from .choice import CudaChoice, offers
from .cluster.family import Cluster
from .family import Family
from .gemv.family import Gemv
from .grouped.family import Grouped
from .hopper import CAPABILITY
from .narrow.family import Narrow
from .parts.family import Parts
from .skinny.family import Skinny
from .stream.family import Stream
from .wgmma.family import Wgmma
from .wgmma_stream.family import WgmmaStream

BSR, BSR_SKINNY = Bsr(), BsrSkinny()
CLUSTER, GEMV, GROUPED, PARTS, SKINNY, WGMMA = Cluster(), Gemv(), Grouped(), Parts(), Skinny(), Wgmma()
NARROW, STREAM, WGMMA_STREAM = Narrow(), Stream(), WgmmaStream()
FAMILIES: tuple[Family[Any], ...] = (BSR, BSR_SKINNY, CLUSTER, GEMV, GROUPED, NARROW, PARTS, SKINNY, STREAM, WGMMA, WGMMA_STREAM)
"""Kernel families. The docstring of each one's module says which problems it serves."""


class CudaBackend:
    """Choices for problems on GPUs of compute capability 9.0."""

    name = "cuda"

    def available(self, device: DeviceInfo) -> Availability:
        """Return ok on a CUDA device. Without a compiler, only cubins compiled before can run."""
        if device.type != "cuda":
            return Availability(ok=False, detail=f"works on CUDA devices, not on {device.type}")
        try:
            return Availability(ok=True, detail=f"compiles with {find_cubin_compiler().name}")
        except UnavailableError as error:
            return Availability(ok=True, detail=f"{ONLY_COMPILED}: {error}")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return device.type == "cuda" and device.capability == CAPABILITY

    def named(self, name: str, problem: Problem, device: DeviceInfo) -> CudaChoice | None:
        for family in FAMILIES:
            prefix = f"{self.name}:{family.name}_"
            config = family.named(problem, device, name.removeprefix(prefix)) if name.startswith(prefix) else None
            if config is not None:
                return CudaChoice.of(family, config, problem, device)
        return None

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the likeliest kernels of each family. Needs neither a compiler nor a GPU."""
        families = [family for family in FAMILIES if settings.float32_by_parts or family is not PARTS]
        offered = [offers(family, problem, device, settings) for family in families]
        return Offers(
            choices=tuple(choice for one in offered for choice in one.choices),
            refusals=tuple(refusal for one in offered for refusal in one.refusals),
        )
