"""Families of transformers: each is quantized, saved and loaded with equal weights and results, and mixtures keep their routing.

``python tests/correctness/families.py`` prints what becomes of each family.
"""

from __future__ import annotations

import copy

import pytest
import torch
from families import families, make, outcome_of
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.integration.quantize import weights_by_name

PARTS = 60


@pytest.fixture(autouse=True)
def never(own_store):
    pytest.importorskip("transformers", reason="the extra 'models' installs it")
    with settings.patch(tune="never"):
        yield


@pytest.mark.turn(1, 8)
@pytest.mark.slow
@pytest.mark.rotates(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_saved_family_is_loaded_with_equal_weights_and_results(part):
    found = [outcome_of(family) for family in families()[part::PARTS]]
    text = "\n".join(map(str, found))
    assert not [x for x in found if x.status == "FAILED"], text
    assert sum(x.status.startswith("equal") for x in found) >= len(found) // 2, text


ROUTED = {
    "jamba": "router",
    "jetmoe": "router.layer",
    "switch_transformers": "router.classifier",
    "qwen2_moe": "shared_expert_gate",
}


def test_routers_keep_their_floats():
    for family, router in ROUTED.items():
        model = make(family)
        routers = {name: module for name, (module, _) in weights_by_name(model).items() if name.endswith(router)}
        assert routers, family
        gemmtune.quantize_(model, "int8")
        assert all(type(module.weight) is nn.Parameter for module in routers.values()), family
        assert any(isinstance(x, QuantizedWeight) for x in model.parameters()), family


def routed(model: nn.Module, ids: torch.Tensor, choices: dict[str, object] | None = None) -> tuple[torch.Tensor, dict[str, object]]:
    """Return logits and what each router returns. With ``choices`` each router returns these."""
    found: dict[str, object] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):

            def note(_, __, result, name=name):
                found[name] = result
                return None if choices is None else choices[name]

            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits, found


DENSE_ERROR = 0.1
"""Most that rounding to 8-bit floats changes a logit of a dense model, as a fraction of the range."""


def test_rounded_experts_are_as_near_as_dense_layers_with_the_same_routing():
    """Without it a token whose experts are nearly tied may go to others, which changes its logits by half of their range."""
    ids = torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(1))
    for family in ("llama", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text"):
        model = make(family)
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(4 if x.dim() > 1 else 1)
        wanted, choices = routed(model, ids)
        assert bool(choices) == (family != "llama"), family
        # Linear attention adds up its rounding over the tokens, also in torch's float product of the dequantized weights.
        few = gemmtune.quantize_(copy.deepcopy(model), "float8", filter_fn=lambda _, name: "linear_attn" not in name)
        got, _ = routed(few, ids, choices)
        assert (got - wanted).abs().max() <= DENSE_ERROR * (wanted.max() - wanted.min()), family
        for name, x in few.named_parameters():
            if isinstance(x, QuantizedWeight):
                before, after = model.get_parameter(name), x.dequantize()
                largest = before.abs().amax(tuple(range(before.dim() - 2, before.dim())), keepdim=True)
                assert ((after - before).abs() <= before.abs() / 16 + largest / 2**14).all(), (family, name)
