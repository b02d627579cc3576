"""Weights of public models by name: sizes from their public configurations, and the problems that calls of the models make."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import InvalidProblemError
from ..operand_kinds import ModelDtype
from ..problem import Problem

ROWS = 16
"""Rows of the product that represents a weight."""
GROUPS = (128, 64, 32)
"""Groups of ``quantize_`` along K, the default first. Only experts take the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight [N, K], with its layer's form. ``experts`` is their number, 0 for a Linear."""

    n: int
    k: int
    bias: bool = False
    experts: int = 0
    layout: str = "nt"
    keeps_floats: bool = False
    """True for a router and the layer over the vocabulary, which ``quantize_`` skips."""
    fused: bool = False
    """True for layers of one input, whose weights ``optimize`` moves next to each other."""

    def problem(self, dtype: ModelDtype, device_type: str) -> Problem | None:
        """Return the product of ROWS rows with the weight in a dtype, as a model calls it. None if it has no such form."""
        floats = {"fp16": torch.float16, "fp32": torch.float32}.get(dtype, torch.bfloat16)
        group = next((g for g in GROUPS[: None if self.experts else 1] if self.k % g == 0), None)
        if dtype in ("bf16", "fp16", "fp32") or self.keeps_floats or (dtype == "int4" and group is None):
            if self.experts:
                return self._made(Problem.grouped_mm, floats, device_type)
            return self._made(Problem.addmm if self.bias else Problem.mm, floats, device_type)
        if dtype == "fp8":
            if self.fused:  # horizontal fusion has no scaled_mm
                return None
            if self.experts:
                return self._made(Problem.scaled_grouped_mm, torch.float8_e4m3fn, device_type, out_dtype=floats)
            return self._made(Problem.scaled_mm, torch.float8_e4m3fn, device_type, out_dtype=floats, scales="row")
        scales = "column" if dtype == "int8" or group == self.k else f"group_{group}"
        make = Problem.mixed_grouped_mm if self.experts else Problem.mixed_mm
        return self._made(make, floats, device_type, scales=scales, encoding="int4" if dtype == "int4" else "")

    def _made(self, make: Callable[..., Problem], dtype: torch.dtype, device_type: str, **more: object) -> Problem:
        given: dict[str, object] = {"groups": self.experts, "layout": self.layout} if self.experts else {}
        return make(ROWS, self.n, self.k, dtype=dtype, device_type=device_type, **given, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a transformer.

    ``bias`` names the layers with one: ``qkv``, ``attention`` (with the output) or ``all``. ``stored_fused`` means that the model's
    own layers are q|k|v and gate|up. ``inner`` is the width of the queries, ``more`` are (N, K) of further layers.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    bias: Literal["", "qkv", "attention", "all", "all but k"] = ""
    stored_fused: bool = False
    experts: int = 0
    expert_intermediate: int = 0
    expert_layout: str = "nt"
    own_attention: bool = False
    """True if ``more`` has the layers of the attention."""
    more: tuple[tuple[int, int], ...] = ()
    keeps_floats: bool = False
    """True if ``quantize_`` skips the layers, which compute their products without nn.Linear's forward."""

    def weights(self) -> list[Weight]:
        """Return the distinct weights, those of fused layers too."""
        found = dict.fromkeys([*self._attention(), *self._feed_forward(), *self._others()])
        return [dataclasses.replace(x, keeps_floats=x.keeps_floats or self.keeps_floats) for x in found]

    def _attention(self) -> Iterator[Weight]:
        if self.own_attention:
            return
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        has, alike = bool(self.bias), self.bias != "all but k"
        if alike:
            yield Weight(n=q + 2 * kv, k=hidden, bias=has, fused=not self.stored_fused)
        if not self.stored_fused:
            yield Weight(n=q, k=hidden, bias=has)
            yield Weight(n=kv, k=hidden, bias=has and alike)
            yield Weight(n=kv, k=hidden, bias=has)
        yield Weight(n=hidden, k=q, bias=self.bias not in ("", "qkv"))

    def _feed_forward(self) -> Iterator[Weight]:
        has, hidden, wide = self.bias.startswith("all"), self.hidden, self.intermediate
        if wide and self.gated:
            yield Weight(n=2 * wide, k=hidden, bias=has, fused=not self.stored_fused)
        if wide and not (self.gated and self.stored_fused):
            yield Weight(n=wide, k=hidden, bias=has)
        if wide:
            yield Weight(n=hidden, k=wide, bias=has)
        if self.experts:
            wide, layout = self.expert_intermediate, self.expert_layout
            yield Weight(n=self.experts, k=hidden, bias=self.bias == "attention", keeps_floats=True)
            yield Weight(n=2 * wide, k=hidden, experts=self.experts, layout=layout)
            yield Weight(n=hidden, k=wide, experts=self.experts, layout=layout)

    def _others(self) -> Iterator[Weight]:
        yield from (Weight(n=n, k=k) for n, k in self.more)
        if self.vocab:
            yield Weight(n=self.vocab, k=self.hidden, bias=self.bias == "all", keeps_floats=True)


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int, **more: object) -> Model:
    """Return a decoder with gates and without biases."""
    return Model(hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, **more)  # type: ignore[arg-type] # the fields of Model


def _encoder(hidden: int, intermediate: int, heads: int, vocab: int, **more: object) -> Model:
    """Return a transformer with biases and without gates."""
    given = {"gated": False, "bias": "all"} | more
    return _llama(hidden, intermediate, heads, heads, hidden // heads, vocab, **given)


# hidden, intermediate, heads, kv heads, head dim, vocabulary. Source: config.json of each model on the Hugging Face hub.
MODELS: dict[str, Model] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 128, 32000),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 128, 32000),
    "llama-3.2-1b": _llama(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": _llama(3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": _llama(4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": _llama(8192, 28672, 64, 8, 128, 128256),
    "qwen2.5-0.5b": _llama(896, 4864, 14, 2, 64, 151936, bias="qkv"),
    "qwen2.5-1.5b": _llama(1536, 8960, 12, 2, 128, 151936, bias="qkv"),
    "qwen2.5-3b": _llama(2048, 11008, 16, 2, 128, 151936, bias="qkv"),
    "qwen2.5-7b": _llama(3584, 18944, 28, 4, 128, 152064, bias="qkv"),
    "qwen2.5-14b": _llama(5120, 13824, 40, 8, 128, 152064, bias="qkv"),
    "qwen2.5-32b": _llama(5120, 27648, 40, 8, 128, 152064, bias="qkv"),
    "qwen2.5-72b": _llama(8192, 29568, 64, 8, 128, 152064, bias="qkv"),
    "qwen3-0.6b": _llama(1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": _llama(2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": _llama(2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": _llama(4096, 12288, 32, 8, 128, 151936),
    "qwen3-14b": _llama(5120, 17408, 40, 8, 128, 151936),
    "qwen3-32b": _llama(5120, 25600, 64, 8, 128, 151936),
    "qwen3-30b-a3b": _llama(2048, 0, 32, 4, 128, 151936, experts=128, expert_intermediate=768),
    "gemma-2-2b": _llama(2304, 9216, 8, 4, 256, 256000),
    "gemma-2-9b": _llama(3584, 14336, 16, 8, 256, 256000),
    "gemma-2-27b": _llama(4608, 36864, 32, 16, 128, 256000),
    "gemma-3-1b": _llama(1152, 6912, 4, 1, 256, 262144),
    "gemma-3-4b": _llama(2560, 10240, 8, 4, 256, 262208),
    "gemma-3-12b": _llama(3840, 15360, 16, 8, 256, 262208),
    "gemma-3-27b": _llama(5376, 21504, 32, 16, 128, 262208),
    "phi-3-mini": _llama(3072, 8192, 32, 32, 96, 32064, stored_fused=True),
    "phi-4-mini": _llama(3072, 8192, 24, 8, 128, 200064, stored_fused=True),
    "phi-4": _llama(5120, 17920, 40, 10, 128, 100352, stored_fused=True),
    "mistral-7b-v0.3": _llama(4096, 14336, 32, 8, 128, 32768),
    "mistral-nemo-12b": _llama(5120, 14336, 32, 8, 128, 131072),
    "mistral-small-24b": _llama(5120, 32768, 32, 8, 128, 131072),
    "mixtral-8x7b": _llama(4096, 0, 32, 8, 128, 32000, experts=8, expert_intermediate=14336),
    "olmo-2-1b": _llama(2048, 8192, 16, 16, 128, 100352),
    "olmo-2-7b": _llama(4096, 11008, 32, 32, 128, 100352),
    "olmo-2-13b": _llama(5120, 13824, 40, 40, 128, 100352),
    "olmo-2-32b": _llama(5120, 27648, 40, 8, 128, 100352),
    "granite-3.1-2b": _llama(2048, 8192, 32, 8, 64, 49155),
    "granite-3.1-8b": _llama(4096, 12800, 32, 8, 128, 49155),
    "falcon-7b": _llama(4544, 18176, 71, 1, 64, 65024, gated=False, stored_fused=True, keeps_floats=True),
    "falcon3-7b": _llama(3072, 23040, 12, 4, 256, 131072),
    # q, kv_a and kv_b with the ranks of multi-head latent attention, its output, and two shared experts as one layer.
    "deepseek-v2-lite": _llama(
        2048, 10944, 16, 16, 192, 102400, experts=64, expert_intermediate=1408, own_attention=True,
        more=((3072, 2048), (576, 2048), (4096, 512), (2048, 2048), (2816, 2048), (5632, 2048), (2048, 2816)),
    ),
    "gpt-oss-20b": _llama(2880, 0, 64, 8, 64, 201088, bias="attention", experts=32, expert_intermediate=2880, expert_layout="nn"),
    "gpt-oss-120b": _llama(2880, 0, 64, 8, 64, 201088, bias="attention", experts=128, expert_intermediate=2880, expert_layout="nn"),
    "bert-base": _encoder(768, 3072, 12, 30522),
    "bert-large": _encoder(1024, 4096, 16, 30522),
    "vit-base": _encoder(768, 3072, 12, 1000),
    "vit-large": _encoder(1024, 4096, 16, 1000),
    "whisper-base": _encoder(512, 2048, 8, 51865, bias="all but k"),
    "whisper-small": _encoder(768, 3072, 12, 51865, bias="all but k"),
    "whisper-large-v3": _encoder(1280, 5120, 20, 51866, bias="all but k"),
    "t5-small": _llama(512, 2048, 8, 8, 64, 32128, gated=False),
    "t5-base": _llama(768, 3072, 12, 12, 64, 32128, gated=False),
    "flan-t5-large": _llama(1024, 2816, 16, 16, 64, 32128),
    "flan-t5-xl": _llama(2048, 5120, 32, 32, 64, 32128),
}  # fmt: skip
"""Models by name, with the sizes of their weights."""


def models_of(words: Sequence[str]) -> dict[str, Model]:
    """Return the models that names, patterns such as ``qwen3-*`` or ``all`` name. Raises InvalidProblemError for none."""
    found: dict[str, Model] = {}
    for word in words:
        names = fnmatch.filter(MODELS, "*" if word == "all" else word.lower())
        if not names:
            known = ", ".join(MODELS)
            raise InvalidProblemError(f"models: got {word!r}, expected all, patterns such as qwen3-*, or some of {known}")
        found |= {name: MODELS[name] for name in names}
    return found


def problems_of(models: Sequence[Model], dtypes: Sequence[ModelDtype], device_type: str) -> list[Problem]:
    """Return the distinct problems of the weights of models in each dtype, each with ROWS rows."""
    made = (weight.problem(dtype, device_type) for dtype in dtypes for model in models for weight in model.weights())
    return list(dict.fromkeys(problem for problem in made if problem is not None))
