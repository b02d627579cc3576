"""Extension points of vLLM that the plugin needs, looked up by name, since another version may lack some."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from ..serving.start import Finder, Missing

LINEAR = "vllm.model_executor.layers.linear"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
KERNELS = "vllm.model_executor.kernels.linear"
APPLY = ("self", "layer", "x", "bias")
"""Parameters of ``apply`` of a linear method, which the plugin passes on by place."""
KINDS: Mapping[str, tuple[str, str]] = {
    "mixed": ("MPLinearKernel", "_POSSIBLE_KERNELS"),
    "int8": ("Int8ScaledMMLinearKernel", "_POSSIBLE_INT8_KERNELS"),
    "fp8": ("FP8ScaledMMLinearKernel", "_POSSIBLE_FP8_KERNELS"),
    "fp8_block": ("Fp8BlockScaledMMLinearKernel", "_POSSIBLE_FP8_BLOCK_KERNELS"),
}
"""For each kind of quantized kernel its base class and the lists, one for each platform, in which vLLM looks in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The extension points of one vLLM."""

    name: ClassVar[str] = "vLLM"
    methods: tuple[type, ...]
    """Linear methods of weights that are not quantized."""
    bases: Mapping[str, type]
    """Base class of each kind of quantized kernel."""
    lists: Mapping[str, dict[Any, list[type]]]
    """Kernels of each kind by platform, the preferred first."""
    platform: Any
    """The platform of this process, which names its device type."""
    envs: Any
    """The module with vLLM's environment variables."""
    config: Callable[[], Any]
    """Function that returns the configuration of the model that is being made or run, or None."""

    @property
    def device_type(self) -> str:
        """The device type in torch's words, such as ``cuda``."""
        return str(self.platform.device_type)

    @property
    def batch_invariant(self) -> bool:
        """True if the user asks vLLM for rows whose bits do not depend on their batch."""
        return bool(self.envs.VLLM_BATCH_INVARIANT)

    @property
    def most_rows(self) -> int | None:
        """The most rows of a batch, if the configuration names them."""
        return getattr(getattr(self.config(), "scheduler_config", None), "max_num_batched_tokens", None)


def find_points() -> Points | Missing:
    """Return the extension points of the installed vLLM, or the names that it lacks."""
    finder = Finder("vllm")
    get = finder.get
    methods = (get(LINEAR, "UnquantizedLinearMethod"), get(EMBEDDING, "UnquantizedEmbeddingMethod"))
    for method in methods:
        finder.check(method, {"apply": APPLY, "process_weights_after_loading": ("self", "layer")})
    bases = {kind: get(KERNELS, base) for kind, (base, _) in KINDS.items()}
    lists = {kind: get(KERNELS, found) for kind, (_, found) in KINDS.items()}
    platform, config = get("vllm.platforms", "current_platform"), get("vllm.config", "get_current_vllm_config_or_none")
    get("vllm.envs", "VLLM_BATCH_INVARIANT")
    if finder.absent:
        return finder.missing()
    return Points(methods=methods, bases=bases, lists=lists, platform=platform, envs=import_module("vllm.envs"), config=config)
