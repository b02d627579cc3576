"""The models of ``model.py``, with random weights, and the steps that are timed: decoding, a prompt, training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from model_configs import MODELS
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedModel,
    StaticCache,
)

__all__ = ["MODELS", "Scenario", "body_of", "build_model", "scenarios"]

POSITIONS, BEGIN = 512, 256
"""Positions of the static cache, and those that are filled before the steps that are timed."""
STD = 0.02
"""Standard deviation of the random weights, as the models are initialized."""


def _made(config: Mapping[str, Any], words: Mapping[str, Any]) -> PreTrainedModel:
    """The model of transformers that ``config`` names."""
    chosen = AutoConfig.for_model(**{**config, **words})
    classes = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if "image_size" in config else MODEL_FOR_CAUSAL_LM_MAPPING
    model: PreTrainedModel = classes[type(chosen)](chosen)
    return model


def build_model(config: Mapping[str, Any], layers: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in ``dtype`` with random weights."""
    torch.manual_seed(0)
    words = {"num_hidden_layers": layers, "attn_implementation": "sdpa"}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = _made(config, words)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD)
    return model.eval()


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head."""
    body: torch.nn.Module = getattr(model, model.base_model_prefix)
    return body


@dataclass(kw_only=True)
class Scenario:
    """One size of one kind of step. Every way has a cache of its own; ``rewind`` puts all of them back to their beginning."""

    kind: str
    batch: int
    length: int
    config: Mapping[str, Any]
    compiled: Callable[..., Any] | None = None
    """What the last step that was made calls."""
    _caches: list[StaticCache] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``decode-16``, ``images-8``: sequences or images of a step; ``prefill-512``, ``train-4096``: tokens of a sequence."""
        return f"{self.kind}-{self.batch if self.kind in ('decode', 'images') else self.length}"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def most_steps(self) -> int:
        """Steps until the cache is full."""
        return POSITIONS - BEGIN - 1 if self.kind == "decode" else 1000

    def rewind(self) -> None:
        """Put all caches back to where the first step began."""
        for cache in self._caches:
            _set_positions(cache)
            for layer in cache.layers:
                layer.cumulative_length.fill_(BEGIN)

    def step(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """The logits of one step of a copy of ``model`` in ``dtype``; None where a step has none."""
        if self.kind == "train":
            return None
        found = self.runnable(copy.deepcopy(model).to(dtype), device, None)()
        self.compiled = None  # it keeps the copy
        self._caches.pop() if self.kind == "decode" else None
        return None if found is None else found.detach().float().clone()

    def arguments(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        """What a step gives to the model's forward."""
        torch.manual_seed(1)
        if self.kind == "images":
            side, dtype = self.config["image_size"], next(model.parameters()).dtype
            return {"pixel_values": torch.randn(self.batch, 3, side, side, device=device).to(dtype)}
        ids = torch.randint(0, self.config["vocab_size"], (self.batch, self.length), device=device)
        if self.kind != "decode":
            return {"input_ids": ids, "use_cache": False}
        return {"input_ids": ids, "past_key_values": self._cache(model, device), "use_cache": True}

    def runnable(
        self, model: PreTrainedModel, device: torch.device, compiler: Mapping[str, Any] | None
    ) -> Callable[[], torch.Tensor | None]:
        """A step of ``model``, compiled by ``torch.compile(**compiler)`` unless that is None."""
        if self.kind == "train":
            return self._training(model, device, compiler)
        given = self.arguments(model, device)
        forward = model.forward if compiler is None else torch.compile(model.forward, **compiler)
        self.compiled = forward
        keep = {"logits_to_keep": 1} if self.kind == "prefill" else {}

        cache = given.get("past_key_values")

        def step() -> torch.Tensor:
            if cache is not None:
                _set_positions(cache)
            with torch.no_grad():
                return forward(**given, **keep).logits

        return step

    def _training(
        self, model: PreTrainedModel, device: torch.device, compiler: Mapping[str, Any] | None
    ) -> Callable[[], torch.Tensor | None]:
        torch.manual_seed(1)
        hidden = torch.randn(self.batch, self.length, self.config["hidden_size"], device=device, dtype=model.dtype)
        block = model.model.train()
        forward = block.forward if compiler is None else torch.compile(block.forward, **compiler)
        self.compiled = forward

        def step() -> None:
            found = forward(inputs_embeds=hidden, use_cache=False).last_hidden_state
            found.backward(hidden)
            block.zero_grad(set_to_none=True)

        return step

    def _cache(self, model: PreTrainedModel, device: torch.device) -> StaticCache:
        config = model.config
        cache = StaticCache(config=config, max_cache_len=POSITIONS)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache.early_initialization(self.batch, config.num_key_value_heads, head, next(model.parameters()).dtype, device)
        torch.manual_seed(2)
        for layer in cache.layers:
            for values in (layer.keys, layer.values):
                values.copy_(torch.randn(values.shape, device=device))
        self._caches.append(cache)
        self.rewind()
        return cache


def _set_positions(cache: StaticCache) -> None:
    """Set the number by which a layer with a sliding window sees that it is not full, for which Dynamo would compile each step.

    A tensor of the layer has the position itself. No window is shorter than the cache.
    """
    for layer in cache.layers:
        if layer.is_sliding:
            layer.cumulative_length_int = BEGIN


def scenarios(
    config: Mapping[str, Any], batches: Sequence[int], prompts: Sequence[int], trained: Sequence[int]
) -> Iterable[Scenario]:
    """Decoding steps, prompts and training steps, in this order; of a vision transformer batches of images."""
    for batch in batches:
        if "image_size" in config:
            positions = (config["image_size"] // config["patch_size"]) ** 2 + 1
            yield Scenario(kind="images", batch=batch, length=positions, config=config)
            continue
        yield Scenario(kind="decode", batch=batch, length=1, config=config)
    for kind, lengths in (("prefill", prompts), ("train", trained)) if "image_size" not in config else ():
        for length in lengths:
            yield Scenario(kind=kind, batch=1, length=length, config=config)
