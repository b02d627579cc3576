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
MOE = "vllm.model_executor.layers.fused_moe"
SELECTS = {
    "dense": (f"{MOE}.oracle.unquantized", "select_unquantized_moe_backend", ("moe_config",)),
    "fp8": (f"{MOE}.oracle.fp8", "select_fp8_moe_backend", ("config", "weight_key", "activation_key")),
}
"""For each kind of experts the function that chooses a backend and a class, and parameters that the plugin reads."""
EXPERTS = {
    "base": (f"{MOE}.modular_kernel", "FusedMoEExpertsModular"),
    "format": (f"{MOE}.modular_kernel", "FusedMoEActivationFormat"),
    "reduced": (f"{MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP"),
    "rounded": (f"{MOE}.utils", "moe_kernel_quantize_input"),
}
"""Other names that layers of experts need."""
ROUNDED = ("A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape")
"""Parameters of vLLM's function that rounds rows, by which the plugin calls it."""
APPLY_EXPERTS = (
    "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "expert_map", "a1q_scale",
    "apply_router_weight_on_input",
)  # fmt: skip
"""Parameters of ``apply`` of experts that the plugin reads. vLLM gives all by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPoints:
    """The extension points for layers of experts."""

    selects: Mapping[str, Callable[..., Any]]
    """Function of each kind of weights that chooses a backend of vLLM and a class."""
    base: type
    by_token: Any
    """vLLM's name of the format in which a row of the inputs is a token."""
    reduced: Callable[[], Any]
    """Function that returns the step which adds nothing to a finished result."""
    rounded: Callable[..., Any]
    """Function that rounds rows to eight bits, and returns them and their scales."""


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
    experts: ExpertPoints | Missing

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
    return Points(
        methods=methods, bases=bases, lists=lists, platform=platform, envs=import_module("vllm.envs"), config=config,
        experts=_find_experts(),
    )  # fmt: skip


def _find_experts() -> ExpertPoints | Missing:
    """Return the extension points for layers of experts, or the names that this version lacks."""
    finder = Finder("vllm")
    selects = {kind: finder.get(module, name) for kind, (module, name, _) in SELECTS.items()}
    found = {role: finder.get(*place) for role, place in EXPERTS.items()}
    for kind, (module, name, expected) in SELECTS.items():
        finder.check_names(f"{module}.{name}", selects[kind], expected)
    finder.check_names(".".join(EXPERTS["rounded"]), found["rounded"], ROUNDED)
    finder.check_names(".".join((*EXPERTS["base"], "apply")), getattr(found["base"], "apply", None), APPLY_EXPERTS)
    by_token = getattr(found["format"], "Standard", None)
    if found["format"] is not None and by_token is None:
        finder.absent.append(".".join((*EXPERTS["format"], "Standard")))
    if finder.absent:
        return finder.missing()
    return ExpertPoints(selects=selects, base=found["base"], by_token=by_token, reduced=found["reduced"], rounded=found["rounded"])
