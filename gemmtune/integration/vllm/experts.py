"""Layers of experts of vLLM. vLLM routes the tokens, exchanges them between devices, rounds inputs and applies activations."""

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...operators import library as library  # defines torch.ops.gemmtune
from ..serving.experts import Routed, Sizes, dense_layer, summed, why_not
from ..serving.start import Missing, logger
from ..serving.tables import INVARIANT, invariant, log_once
from .notes import note
from .points import SELECTS, ExpertPoints, Points
from .scaled import block_scales, row_scales

Tensor = torch.Tensor
_OURS = "gemmtune_original"
"""Attribute of a function that stands in modules of vLLM, with vLLM's own."""
_BACKEND = "TRITON"
"""The backend of vLLM for which weights stay as they were loaded: [G, N, K], with the gates first."""
_LEFT = ("MOONEP", "OOT", "TPU", "NONE")
"""Backends that need weights of their own, or methods of another platform."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Experts(ABC):
    """Experts by our tables. vLLM's ``FusedMoEExpertsModular`` stands beside it.

    vLLM asks the functions with ``supports`` in their names before it chooses a class. We choose by tables instead.
    """

    points: ClassVar[Points]
    parts: ClassVar[ExpertPoints]
    moe_config: Any

    @classmethod
    def activation_format(cls) -> Any:
        """Return vLLM's name of the format in which a row is a token."""
        return cls.parts.by_token

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:  # noqa: ARG004
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:  # noqa: ARG004
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:  # noqa: ARG004
        return True

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes of two workspaces, of which we need none, and of the result."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return vLLM's step after us, which has nothing left to do."""
        return self.parts.reduced()

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: Any, expert_map: Tensor | None, a1q_scale: Tensor | None, apply_router_weight_on_input: bool, **_: Any,
    ) -> None:  # fmt: skip
        """Write the weighted sum of the experts' results for each token to ``output``.

        ``expert_map`` has the number here of every expert, or -1 for experts elsewhere.
        """

        def activate(h: Tensor) -> Tensor:
            result = h.new_empty((h.shape[0], w2_columns))
            self.activation(activation, result, h)  # type: ignore[attr-defined]
            return result

        count, w2_columns = w1.shape[0], w2.shape[2]
        ids = topk_ids if expert_map is None else _here(topk_ids, expert_map, count)
        weights = None if apply_router_weight_on_input else topk_weights
        layer = self._layer(hidden_states, a1q_scale, w1, w2, activate, output.dtype)
        output.copy_(summed(ids, weights, count, layer, all_here=expert_map is None))

    @abstractmethod
    def _layer(
        self, x: Tensor, scale: Tensor | None, w1: Tensor, w2: Tensor, activate: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Callable[[Routed], Tensor]:
        """Return the function that multiplies the rows of experts by both weights."""


class DenseExperts(Experts):
    """Experts that are not quantized."""

    w1_bias: Tensor | None
    w2_bias: Tensor | None

    @classmethod
    def unlike(cls) -> str:
        """Return the reason why we have no such weights, in vLLM's descriptions of them, or an empty text."""
        return ""

    @classmethod
    def unserved(cls, sizes: Sizes, dtype: torch.dtype) -> str:
        """Return the reason why no tables serve a layer, or an empty text."""
        return why_not("grouped_mm", sizes, {"dtype": dtype}, cls.points)

    def _layer(self, x: Tensor, scale: Any, w1: Tensor, w2: Tensor, activate: Any, dtype: Any) -> Callable[[Routed], Tensor]:  # noqa: ARG002
        return dense_layer(x, w1, w2, activate, (self.w1_bias, self.w2_bias))


class Float8Experts(Experts):
    """Experts of float8, with scales of rows and columns or of blocks. vLLM rounds the inputs of both products."""

    quant_config: Any

    @classmethod
    def unlike(cls, weight_key: Any, activation_key: Any) -> str:
        """Return the reason why we have no such scales, or an empty text."""
        known = weight_key is not None and activation_key is not None and _scales(weight_key, activation_key)
        text = f"scales: got {activation_key} inputs and {weight_key} weights, expected rows and columns, or blocks of 128"
        return "" if known else text

    @classmethod
    def unserved(cls, sizes: Sizes, dtype: torch.dtype, weight_key: Any, activation_key: Any) -> str:
        """Return the reason why no tables serve a layer, or an empty text."""
        words = {"dtype": weight_key.dtype, "out_dtype": dtype, "scales": _scales(weight_key, activation_key)}
        return why_not("scaled_grouped_mm", sizes, words, cls.points)

    def _layer(
        self, x: Tensor, scale: Tensor | None, w1: Tensor, w2: Tensor, activate: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Callable[[Routed], Tensor]:
        config = self.quant_config
        assert scale is not None

        def product(a: Tensor, scale_a: Tensor, w: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
            by_squares = config.block_shape is not None
            s = scale_b.mT.clone(memory_format=torch.contiguous_format) if by_squares else scale_b.reshape(len(scale_b), 1, -1)
            grouped = torch.ops.gemmtune.scaled_grouped_mm
            return grouped(a, w.mT, scale_a, s, offs, out_dtype=dtype, may_tune=False)  # type: ignore[no-any-return]

        def layer(routed: Routed) -> Tensor:
            rows, scale_a = (part.index_select(0, routed.tokens) for part in (x, scale))
            h = activate(routed.biased(product(rows, scale_a, w1, config.w1_scale, routed.offs), config.w1_bias))
            rows, scale_a = self.parts.rounded(
                A=h, A_scale=None, quant_dtype=config.quant_dtype, per_act_token_quant=config.per_act_token_quant,
                block_shape=config.block_shape,
            )  # fmt: skip
            return routed.biased(product(rows, scale_a, w2, config.w2_scale, routed.offs), config.w2_bias)

        return layer


def _scales(weight_key: Any, activation_key: Any) -> str:
    """Return our name of the scales of a layer, or an empty text."""
    if row_scales(activation_key.scale, weight_key.scale):
        return "row"
    return "block_128x128" if block_scales(activation_key.scale, weight_key.scale) else ""


def _here(ids: Tensor, expert_map: Tensor, count: int) -> Tensor:
    """Return the number here of each expert, and ``count`` for experts elsewhere and unused slots."""
    local = torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1)
    return torch.where(local >= 0, local, count)


KINDS: dict[str, tuple[str, type[DenseExperts | Float8Experts]]] = {
    "dense": ("GemmtuneExperts", DenseExperts),
    "fp8": ("GemmtuneFP8Experts", Float8Experts),
}
"""Name in vLLM and class of each kind of experts."""


def take_over(points: Points) -> None:
    """Let vLLM choose our experts for layers that have tables, and its own for all others. A second call changes nothing."""
    parts = points.experts
    if isinstance(parts, Missing):
        lacks = ", ".join(parts.names)
        logger(points.name).info("gemmtune leaves experts of vLLM %s as they are, because it lacks %s", parts.version, lacks)
        return
    for kind, (name, kernel) in KINDS.items():
        select = parts.selects[kind]
        if hasattr(select, _OURS):
            continue
        words = {"points": points, "parts": parts, "__module__": kernel.__module__}
        _replace(select, _selecting(select, SELECTS[kind][2], type(name, (kernel, parts.base), words), points))


def _selecting(select: Callable[..., Any], names: Sequence[str], ours: Any, points: Points) -> Callable[..., Any]:
    """Return a function that chooses as vLLM's ``select`` does, but ``ours`` for layers that have tables.

    ``names`` are parameters of ``select``: the description of a layer, then those of its scales.
    """
    signature = inspect.signature(select)

    @functools.wraps(select)
    def chosen(*arguments: Any, **keywords: Any) -> Any:
        backend, theirs = select(*arguments, **keywords)
        given = signature.bind(*arguments, **keywords).arguments
        config, *keys = (given[name] for name in names)
        reason = _stays(config, backend, theirs, ours, points) or ours.unlike(*keys)
        if reason:
            log_once(points.name, f"{points.name} runs experts of {config.num_local_experts}x{config.hidden_dim}: {reason}")
        elif not ours.unserved(_sizes(config), config.in_dtype, *keys) and note(points, f"{ours.__name__} {_sizes(config)}"):
            return type(backend)[_BACKEND], ours
        return backend, theirs

    setattr(chosen, _OURS, select)
    return chosen


def _stays(config: Any, backend: Any, theirs: Any, ours: Any, points: Points) -> str:
    """Return the reason why a layer stays vLLM's whatever the tables are, or an empty text."""
    checks = (
        (theirs is None or backend.name in _LEFT, f"its backend is {backend.name}, which has a layout of its own"),
        (config.moe_backend != "auto", f"its backend {config.moe_backend} is asked for"),
        (config.is_lora_enabled, "adapters (LoRA) are enabled"),
        (theirs is not None and theirs.activation_format() != ours.activation_format(), "tokens come in batches of experts"),
        (invariant(points), INVARIANT),
        (config.in_dtype not in _FLOATS, f"inputs: got {config.in_dtype}, expected one of {', '.join(map(str, _FLOATS))}"),
    )
    return next((text for applies, text in checks if applies), "")


def _sizes(config: Any) -> Sizes:
    return Sizes(
        experts=config.num_local_experts, hidden=config.hidden_dim, inner=config.intermediate_size_per_partition,
        halves=2 if config.is_act_and_mul else 1, copies=config.experts_per_token,
    )  # fmt: skip


def _replace(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Give a function's name to ours in the module that has it, and in those that imported it."""
    name = theirs.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get(name) is theirs:
            setattr(module, name, ours)
