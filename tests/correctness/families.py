"""Tiny models of every family that transformers has, quantized, saved and loaded again.

``python families.py [names]`` prints what becomes of each family, and the counts. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import io
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gemmtune import QuantizedWeight, settings
from gemmtune.integration.quantize import weights_by_name

RULES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size(_per_layer_input)?|codebook_size", 128),
    (r".*key_value_heads|.*kv_heads", 2),
    (r"(.*_)?(num|n)?_?(attention_|attn_)?heads?|.*_heads", 4),
    (r".*head_dim(_qk|_v)?|d_kv|(attention_)?head_size|rotary_dim", 16),
    (r"num_experts_per_(tok|token)|.*top_?k(_experts)?|num_selected_experts|moe_topk", 2),
    (r"n_group|topk_group|(n|num)_shared_experts|first_k_dense_replace|num_codebooks|.*_groups", 1),
    (r".*_experts", 4),
    (r".*layers?|.*depth|.*blocks|.*_(period|interval)", 2),
    (r".*max_.*position.*|n_positions|n_ctx|max_seq.*|.*max_length", 128),
    (r"(pretrain_)?(image|input|img|video)_size", 32),
    (r"patch_size", 8),
    (r".*_rank", 16),
    (r".*window|block_size|chunk_size|num_mel_bins|.*n_mels", 16),
    (r"num_(object_)?queries", 8),
    (r"max_source_positions", 64),
    (r"(.*_)?(hidden|intermediate|embeddings?|ffn_hidden|bottleneck|feature)_(size|dim|channels)(_per_layer_input)?", 64),
    (r"(.*_)?(d_model|n_embd|(embed|proj|projection|ffn|ff|mlp|inner|output)_dim|dim|width|d_ff|n_inner|dim_ff|units)", 64),
)
"""The size of a field with such a name, where the default is larger. The first rule counts."""

FIRST = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM", "PRETRAINING")
"""Tasks that name the class of a family before its plain model and the other tasks."""

MORE: Mapping[str, Mapping[str, Any]] = {
    **{family: {"prediction_length": 2} for family in ("autoformer", "informer", "time_series_transformer")},
    "esm": {"vocab_size": 33},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 0},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "rwkv": {"rescale_every": 0},  # otherwise its forward divides weights in place, which a QuantizedWeight refuses
}
"""Fields that a family needs besides."""

LARGEST = 40_000_000
"""Most parameters of a model that is made."""


class CannotMake(Exception):
    """The rules make no model of a family."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a family."""

    family: str
    status: str
    """``equal``, ``equal state`` without a forward, ``nothing quantized``, ``not made`` or ``FAILED``."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.family:40} {self.status:18} {self.reason}"


@functools.cache
def _classes() -> Mapping[str, str]:
    """Return the name of a model's class for each family."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    others = [name for name in vars(auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    found: dict[str, str] = {}
    for name in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in FIRST), "MODEL_MAPPING_NAMES", *others):
        for family, named in vars(auto).get(name, {}).items():
            found.setdefault(family, named if isinstance(named, str) else named[0])
    return found


def families() -> list[str]:
    """Return all families with a class."""
    return sorted(_classes())


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Call transformers, which may raise anything. Return the result, or None and the error as a line."""
    try:
        return call(*args), ""
    except Exception as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def small(kind: Any) -> Any:
    """Make a configuration of small sizes."""
    default, _ = attempt(kind)  # some need arguments
    subs = getattr(kind, "sub_configs", {})
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = field.name
        value = field.default if field.default is not dataclasses.MISSING else getattr(default, name, None)
        if name in subs:
            sub = getattr(default, name, None)
            if dataclasses.is_dataclass(sub):
                values[name] = small(type(sub))
        elif (size := _smaller(name, value)) is not None:
            values[name] = size
    _keep_relations(kind, default, values)
    return kind(**values | MORE.get(kind.model_type, {}))


def _smaller(name: str, value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if re.fullmatch(r".*(token|tok)_?(id|index|idx)", name):
        return value % 97 if value >= 97 else None
    size = next((size for pattern, size in RULES if re.fullmatch(pattern, name)), value)
    return size if value > size else None


def _keep_relations(kind: type, default: Any, values: dict[str, Any]) -> None:
    """Keep one layer of each type, and as many heads for keys as for queries where the default has so."""
    heads = {name: getattr(default, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    if len(set(heads.values())) == 1 and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    listed = {
        field.name: list(dict.fromkeys(value))
        for field in dataclasses.fields(kind)
        if field.name.endswith(("layer_types", "block_type"))
        and isinstance(value := getattr(default, field.name, None), list)
        and len(value) == getattr(default, "num_hidden_layers", 0)
    }
    count = max([2, *map(len, listed.values())])
    for name, types in listed.items():
        values[name] = (types * count)[:count]
        values["num_hidden_layers"] = count


def make(family: str) -> Any:
    """Make the model of a family with random weights: small, or with the sizes of the default if these are not large."""
    model, why = attempt(_made, family, small)
    if model is None:
        model, _ = attempt(_made, family, lambda kind: kind())
    if model is None:
        raise CannotMake(why)
    return model


def _made(family: str, config_of: Callable[[Any], Any]) -> nn.Module:
    transformers = importlib.import_module("transformers")
    kind, config = getattr(transformers, _classes()[family]), config_of(transformers.CONFIG_MAPPING[family])
    with torch.device("meta"):
        count = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise CannotMake(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(1)
    model: nn.Module = kind(config).eval()
    return model


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Return inputs by the names of the arguments of the model's forward."""
    config, names = model.config, inspect.signature(model.forward).parameters
    needed = {name for name, x in names.items() if x.default is inspect.Parameter.empty} | {model.main_input_name}
    generator = torch.Generator().manual_seed(3)
    noise = functools.partial(torch.randn, generator=generator)
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
    image = (2, channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
    patch, frames = getattr(config, "patch_size", 8), getattr(config, "temporal_patch_size", 1)
    made: dict[str, Any] = {}
    if "input_ids" in names:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 64
        made["input_ids"] = torch.randint(min(3, vocabulary - 1), min(vocabulary, 60), (2, 7), generator=generator)
    if "decoder_input_ids" in names and (config.is_encoder_decoder or "input_features" in needed):
        made["decoder_input_ids"] = made.get("input_ids", torch.arange(14).view(2, 7))
    if "grid_thw" in needed:
        made["grid_thw"] = torch.tensor([[1, 4, 4]])
        pixels = 3 * frames * patch**2 if isinstance(patch, int) else 1
        made |= {name: noise(16, pixels) for name in ("hidden_states", "pixel_values") if name in needed}
    elif needed & {"pixel_values"} or {"pixel_values", "return_loss"} <= names.keys():
        made["pixel_values"] = noise(image)
    if "pixel_values_videos" in needed:
        made["pixel_values_videos"] = noise(1, getattr(config, "frames_per_clip", 4), *image[1:])
    if "input_values" in needed:
        made["input_values"] = noise(2, 4000)
    if "input_features" in needed:
        bins = getattr(config, "num_mel_bins", 80)
        made["input_features"] = noise(2, bins, 2 * getattr(config, "max_source_positions", 32))
    return made


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)) or hasattr(found, "values"):
        for x in found if isinstance(found, (list, tuple)) else found.values():
            yield from _tensors(x)


def results(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return all floats that the model returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [x for x in _tensors(model(**copy.deepcopy(dict(inputs)))) if x.is_floating_point()]


def _parts(x: Tensor) -> list[Tensor]:
    """Return the bits of a tensor, or of each part of a weight."""
    own = [x.tensor, x.scales, x.zero_points] if isinstance(x, QuantizedWeight) else [x]
    return [y.detach().reshape(-1).contiguous().view(torch.uint8) for y in own if y is not None]


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """Return names of Parameters and buffers that are not the same bits."""
    states = [dict((*x.named_parameters(remove_duplicate=False), *x.named_buffers(remove_duplicate=False))) for x in (one, other)]
    names = states[0].keys() ^ states[1].keys()
    for name, x in states[0].items():
        y = states[1].get(name)
        alike = y is not None and (type(x.data), x.dtype, x.shape) == (type(y.data), y.dtype, y.shape)
        if not alike or not all(map(torch.equal, _parts(x), _parts(y))):
            names |= {name}
    return sorted(names)


def _close(x: Tensor, y: Tensor) -> bool:
    """Compare results of equal weights at other addresses, which some kernels add up in another order."""
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)


def saved_and_loaded(family: str, kind: str = "int4") -> Outcome:
    """Quantize a family's model while it is loaded, save it, load it, and compare weights and results."""
    outcome = functools.partial(Outcome, family=family)
    huggingface = importlib.import_module("gemmtune.integration.huggingface")
    model, why = attempt(make, family)
    if model is None:
        return outcome(status="not made", reason=why)
    inputs, why = attempt(inputs_of, model)
    if inputs is not None:
        _, why = attempt(results, model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        load = type(model).from_pretrained
        _, why_not = attempt(lambda: (model.save_pretrained(f"{folder}/plain"), load(f"{folder}/plain")))
        if why_not:
            return outcome(status="not made", reason=f"transformers cannot save and load it: {why_not}")
        skip = ("lm_head", *[*weights_by_name(model)][2::3])  # so that floats are loaded too, some of which transformers converts
        few = load(f"{folder}/plain", quantization_config=huggingface.GemmtuneConfig(kind, group=32, skip=skip))
        few.save_pretrained(f"{folder}/few")
        again = load(f"{folder}/few")
    if names := differences(few, again):
        return outcome(status="FAILED", reason=f"{len(names)} tensors differ, such as {names[0]}")
    if not any(isinstance(x, QuantizedWeight) for x in again.parameters()):
        return outcome(status="nothing quantized")
    if why:
        return outcome(status="equal state", reason=why)
    if not all(map(_close, results(few, inputs), results(again, inputs))):
        return outcome(status="FAILED", reason="the results differ")
    return outcome(status="equal")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars and reports of transformers from the terminal, and transformers from the network."""
    offline = mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with offline, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def outcome_of(family: str, kind: str = "int4") -> Outcome:
    """Return what became of a family. An exception where the float model has none is a failure."""
    with _quiet(), settings.patch(tune="never"):
        found, why = attempt(saved_and_loaded, family, kind)
    return found or Outcome(family=family, status="FAILED", reason=why)


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for family in sys.argv[1:] or families():
        found = outcome_of(family)
        counts[found.status] += 1
        print(found, flush=True)
    print(dict(counts))
