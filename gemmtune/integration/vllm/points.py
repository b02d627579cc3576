"""Extension points of vLLM that the plugin needs, looked up by name, since another version may lack some."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

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
class Missing:
    """Names that the installed vLLM lacks."""

    version: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The extension points of one vLLM."""

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


def find_points() -> Points | Missing:
    """Return the extension points of the installed vLLM, or the names that it lacks."""
    missing: list[str] = []

    def get(module: str, name: str) -> Any:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
            return None

    methods = (get(LINEAR, "UnquantizedLinearMethod"), get(EMBEDDING, "UnquantizedEmbeddingMethod"))
    missing += [gap for method in methods if method is not None for gap in _unlike(method)]
    bases = {kind: get(KERNELS, base) for kind, (base, _) in KINDS.items()}
    lists = {kind: get(KERNELS, found) for kind, (_, found) in KINDS.items()}
    platform, config = get("vllm.platforms", "current_platform"), get("vllm.config", "get_current_vllm_config_or_none")
    get("vllm.envs", "VLLM_BATCH_INVARIANT")
    if missing:
        return Missing(version=_version(), names=tuple(missing))
    return Points(methods=methods, bases=bases, lists=lists, platform=platform, envs=import_module("vllm.envs"), config=config)


def _unlike(method: type) -> list[str]:
    """Return the functions of a linear method that are absent or take other arguments."""
    whole, found = f"{method.__module__}.{method.__name__}", []
    for name, expected in (("apply", APPLY), ("process_weights_after_loading", ("self", "layer"))):
        function = getattr(method, name, None)
        if function is None or tuple(inspect.signature(function).parameters) != expected:
            found.append(f"{whole}.{name}({', '.join(expected[1:])})")
    return found


def _version() -> str:
    try:
        return str(import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return "(unknown version)"
