"""What ``register`` does in a vLLM that has every extension point."""

from ... import settings
from ..serving.start import logger
from . import experts
from .linear import take_over
from .mixed import MixedKernel
from .points import Points
from .scaled import BlockKernel, Float8Kernel, Int8Kernel

KERNELS: dict[str, tuple[str, type]] = {
    "mixed": ("GemmtuneMixedLinearKernel", MixedKernel),
    "int8": ("GemmtuneInt8LinearKernel", Int8Kernel),
    "fp8": ("GemmtuneFP8LinearKernel", Float8Kernel),
    "fp8_block": ("GemmtuneFP8BlockLinearKernel", BlockKernel),
}
"""Name in vLLM and class of each kind of quantized kernel. ``VLLM_DISABLED_KERNELS`` takes such a name."""
PLATFORMS = ("CUDA", "CPU")
"""Platforms of vLLM that the plugin serves."""


def install(points: Points) -> None:
    """Give vLLM our linear methods and kernels, once. Ours stand before vLLM's, and refuse layers without a table."""
    log = logger(points.name)
    if getattr(points.platform, "_enum", None) is None or points.platform._enum.name not in PLATFORMS:
        log.info("gemmtune leaves vLLM as it is on %s, expected one of %s", points.device_type, ", ".join(PLATFORMS))
        return
    for method in points.methods:
        take_over(method, points)
    for kind, (name, kernel) in KERNELS.items():
        kernels = points.lists[kind].setdefault(points.platform._enum, [])
        if all(x.__name__ != name for x in kernels):
            kernels.insert(0, type(name, (kernel, points.bases[kind]), {"points": points, "__module__": kernel.__module__}))
    experts.take_over(points)
    log.info("gemmtune runs layers that have tables in %s", settings.current().store_file)
