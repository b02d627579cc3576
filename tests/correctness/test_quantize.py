"""quantize_: models with quantized weights through changes, saving and loading, and conversions to other libraries."""

from __future__ import annotations

import collections
import copy
import gc
import io
import itertools
import pickle
import re
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from models import MODELS, SMALL, Needed, made, noise, result
from rotation import rotated
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.quantize import dequantize_, flatten_state_dict, unflatten_state_dict

pytestmark = pytest.mark.rotates(8)

transformers = Needed("transformers")
KINDS = ("int4", "int8", "float8")
WEIGHT = torch.randn(256, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def never(own_store):
    with settings.patch(tune="never"):
        yield


def dequantized(model: nn.Module) -> nn.Module:
    """Return a copy of the model with plain weights of the same values."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, QuantizedWeight):
                setattr(module, name, nn.Parameter(weight.dequantize()))
    return plain


def close(x: torch.Tensor, y: torch.Tensor, kind: str) -> bool:
    """Compare products of equal numbers. With 8-bit floats the other operand is also rounded, to three bits."""
    return (x - y).norm() <= (0.06 if kind == "float8" else 1e-5) * y.norm()


def through_file(model: nn.Module) -> nn.Module:
    """Save by safetensors, and load into a model that is not quantized."""
    safetensors = pytest.importorskip("safetensors.torch", reason="the extra 'models' installs it")
    tensors = safetensors.load(safetensors.save(flatten_state_dict(model.state_dict())))
    other = dequantized(model).requires_grad_(False)
    for x in other.parameters():
        x.data.zero_()
    other.load_state_dict(unflatten_state_dict(tensors), assign=True)
    return other


def through_checkpoint(model: nn.Module) -> nn.Module:
    """Save by torch.save, and load into another quantized model with weights_only."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    for x in other.parameters():
        (x.tensor.view(torch.uint8) if isinstance(x, QuantizedWeight) else x.data).zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "safetensors": through_file,
    "torch.save": through_checkpoint,
    "device": lambda model: copy.deepcopy(model).to("cpu"),
    "compiled": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "dynamic": lambda model: torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager"),
    "optimized": lambda model: gemmtune.optimize(copy.deepcopy(model)),
}


@pytest.mark.parametrize(("kind", "way"), rotated([*itertools.product(KINDS, WAYS)], 2, "survives"))
def test_a_quantized_model_keeps_its_results(kind, way):
    model, inputs = made("mlp")
    gemmtune.quantize_(model, kind, group=32)
    expected = result(model, inputs)
    assert close(expected, result(dequantized(model), inputs), kind)
    torch._dynamo.reset()
    again = WAYS[way](model)
    found = [x for x in again.parameters() if isinstance(x, QuantizedWeight)]
    assert len(found) == 2
    assert all(isinstance(x, nn.Parameter) and not x.requires_grad for x in found)
    assert torch.allclose(result(again, inputs), expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_other_dtypes(kind):
    model, inputs = made("mlp")
    gemmtune.quantize_(model, kind, group=64)
    grads = []
    for m in (model, dequantized(model)):
        x = inputs["input"].clone().requires_grad_()
        m(x).square().sum().backward()
        grads += [x.grad, m[0].bias.grad]
    assert close(grads[0], grads[2], kind)
    assert close(grads[1], grads[3], kind)
    with torch.inference_mode():
        assert torch.equal(model(x), model(x))
        assert close(model(x.flatten(0, -2)[0]), model(x).flatten(0, -2)[0], kind)
        assert model(x[:0]).shape == (0, *model(x).shape[1:])
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert (half[0].weight.dtype, half[0].weight.tensor.dtype) == (torch.bfloat16, model[0].weight.tensor.dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast = model(x)
    assert half(x.bfloat16()).dtype == cast.dtype == torch.bfloat16
    assert (half(x.bfloat16()).float() - model(x)).norm() <= 0.05 * model(x).norm()
    assert copy.deepcopy(model).to("meta")[0].weight.scales.is_meta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moved_after", [False, True])
def test_float64(kind, moved_after):
    """Only torch has float64 kernels. Products dequantize the weights, which stay quantized."""
    model = nn.Linear(64, 32)
    model = gemmtune.quantize_(model, kind).double() if moved_after else gemmtune.quantize_(model.double(), kind)
    x = torch.randn(3, 64, dtype=torch.float64)
    assert all(isinstance(w, QuantizedWeight) and w.dtype == torch.float64 for w in (model.weight, model.weight.double()))
    assert close(model(x), dequantized(model)(x), "int8")
    assert torch.equal(through_file(model)(x), model(x))


MOVES = {
    "half": lambda model: model.half(),
    "nowhere": lambda model: model.to("cpu"),
    "twice": lambda model: model.double().bfloat16(),
    "meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", MOVES)
def test_a_model_moves_between_forward_and_backward(kind, way):
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)), kind, group=32)
    weight, dense = model[0].weight, model[0].weight.dequantize()
    x = noise(3, 64).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    waiting, view = model(x).sum(), weight.t()
    MOVES[way](model)
    assert model[0].weight is weight
    assert weight.dtype == {"half": torch.float16, "twice": torch.bfloat16}.get(way, torch.float32)
    assert weight.is_meta == (way == "meta")
    gc.collect()
    assert torch.equal(view.dequantize(), dense.t())
    assert torch.equal(view._base.dequantize(), dense)
    assert torch.equal(torch.autograd.grad(waiting, x)[0], expected)
    with torch.inference_mode():
        assert isinstance(copy.deepcopy(model).half()[0].weight, QuantizedWeight)
    if way != "meta":
        assert model(x.to(weight.dtype)).dtype == weight.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_views_have_the_dequantized_values(kind):
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), kind, group=32)
    weight, dense = model[0].weight, model[0].weight.dequantize()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            vector = nn.utils.parameters_to_vector(model.parameters())
            assert torch.equal(vector, torch.cat([x.flatten() for x in dequantized(model).parameters()]))
            assert torch.equal(weight.view(-1), dense.reshape(-1))
            assert torch.equal(weight.flatten(), dense.flatten())
            assert torch.equal(weight.view_as(torch.empty(64, 32)), dense.reshape(64, 32))
            assert torch.equal(weight.t().reshape(16, -1), dense.t().reshape(16, -1))
            assert torch.equal(weight[3:5], dense[3:5])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda: weight.view(-1) * 2, backend="aot_eager", fullgraph=True)(), dense.reshape(-1) * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_a_quantized_weight(kind):
    model = gemmtune.quantize_(nn.Sequential(nn.Linear(64, 32)), kind, group=32)
    other = gemmtune.quantize_(nn.Linear(64, 32), "int8").weight
    weight, dense = model[0].weight, model[0].weight.dequantize()
    for x in model.parameters():
        x.data = x.data.to(torch.bfloat16)
    assert model(noise(2, 64).bfloat16()).dtype == weight.dequantize().dtype == torch.bfloat16
    vector = torch.zeros(sum(x.numel() for x in model.parameters()))
    with pytest.raises(InvalidProblemError, match=r"data: got a tensor of torch.float32 for .*, expected a QuantizedWeight"):
        nn.utils.vector_to_parameters(vector, model.parameters())
    assert torch.equal(weight.dequantize(), dense.bfloat16())
    weight.data = other.data
    assert torch.equal(weight.dequantize(), other.dequantize())
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_without_rows(kind):
    model = gemmtune.quantize_(nn.Linear(256, 32), kind)
    assert model(torch.randn(2, 0, 256)).shape == (2, 0, 32)


def test_loading_floats_into_a_quantized_model_raises():
    model = gemmtune.quantize_(nn.Linear(64, 32), "int8")
    with pytest.raises(RuntimeError, match=r"copy_: got a tensor of torch.float32 for .*; load floats before quantize_"):
        model.load_state_dict(nn.Linear(64, 32).state_dict())


@pytest.mark.parametrize("name", rotated([name for name in MODELS if name != "mlp"], 2, "quantize"))
def test_models(name):
    model, inputs = made(name)
    linears = {n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D") and not n.endswith("lm_head")}
    wanted = {f"{n}.weight" for n in linears} | {n for n, x in model.named_parameters() if ".experts." in n and x.dim() == 3}
    gemmtune.quantize_(model, "int4", group=32)
    assert {n for n, x in model.named_parameters() if isinstance(x, QuantizedWeight)} == wanted
    with torch.no_grad():
        assert close(result(model, inputs), result(dequantized(model), inputs), "int4")


@pytest.mark.turn(3, 8)
@pytest.mark.parametrize(("name", "kind"), rotated([*itertools.product(["mixtral", "gpt_oss"], KINDS)], 3, "experts"))
def test_experts(name, kind):
    model, inputs = made(name)
    gemmtune.quantize_(model, kind)
    plain = dequantized(model)
    with torch.no_grad():
        for way in ("eager", "batched_mm", "grouped_mm"):
            for m in (model, plain):
                m.set_experts_implementation(way)
            expected = result(plain, inputs)
            assert close(result(model, inputs), expected, kind)
        torch._dynamo.reset()
        products = collections.Counter()

        def count(graph, _):
            products.update(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=count))
        assert close(result(compiled, inputs), expected, kind)
        assert products[f"gemmtune.{'scaled' if kind == 'float8' else 'mixed'}_grouped_mm.default"] == 4
        assert torch.equal(result(through_checkpoint(model), inputs), result(model, inputs))
    grads = []
    for m in (model, plain):
        x = noise(2, 7, 64).requires_grad_()
        m(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert (grads[0] - grads[1]).norm() <= (0.2 if kind == "float8" else 1e-4) * grads[1].norm()


def test_parts_of_experts():
    weight = torch.randn(3, 128, 40, generator=torch.Generator().manual_seed(4))
    few = QuantizedWeight.quantize(weight.mT.contiguous().mT, "int4", scales="group_64")
    assert (few.shape, few.stride(), few.tensor.shape, few.scales.shape) == (
        (3, 128, 40),
        weight.mT.contiguous().mT.stride(),
        (3, 64, 40),
        (3, 2, 40),
    )
    assert torch.equal(few[1].dequantize(), QuantizedWeight.quantize(weight[1], "int4", scales="group_64").dequantize())
    assert torch.equal(few.mT[torch.tensor([2, 0])].dequantize(), few.dequantize().mT[[2, 0]])
    x, offs = torch.randn(9, 128, generator=torch.Generator().manual_seed(5)), torch.tensor([4, 4, 9], dtype=torch.int32)
    product = gemmtune.mixed_grouped_mm(x, few.tensor, few.scales, offs, encoding="int4")
    assert torch.equal(gemmtune.grouped_mm(x, few, offs), product)
    picked = torch.tensor([8, 0, 3, 1, 4, 4, 2, 7, 6])
    for more in (
        {"rows": picked, "gated": "silu"},
        {"scatter": (picked[:8].argsort(), torch.rand(4, 2))},
        {"epilogue": torch.relu},
    ):
        rows, ends = (x[:8], offs.clamp(max=8)) if "scatter" in more else (x, offs)
        got, want = (gemmtune.grouped_mm(rows, w, ends, **more) for w in (few, few.dequantize()))
        assert torch.allclose(got, want, atol=2e-4), more.keys()
    parts = (few.tensor, few.scales)
    for call, message in (
        (lambda: QuantizedWeight(few.tensor, encoding="int4"), "scales: got None for experts, expected a tensor"),
        (lambda: QuantizedWeight(*parts, few.scales, "int4"), "zero_points: got some for experts, expected None"),
        (
            lambda: QuantizedWeight(few.tensor, few.scales[:, :, 1:], None, "int4"),
            r"got shape \[3, 2, 39\] for experts \[3, 128, 40\]",
        ),
        (lambda: QuantizedWeight.quantize(weight, "uint4"), "got uint4 with scales 'column' for experts"),
        (
            lambda: QuantizedWeight.quantize(weight[:, :96], "int4", scales="group_64"),
            "got 96 rows for each expert, expected a multiple",
        ),
        (lambda: gemmtune.mixed_mm(torch.ones(2, 128), few), r"mixed_mm: b: got experts \[3, 128, 40\], expected one weight"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            call()


def with_nan(name: str) -> nn.Sequential:
    """Three layers, of which one has a weight that cannot be quantized."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        layers.get_submodule(name).weight[3, 5] = torch.nan
    return layers


def test_skipped_filtered_and_rejected_layers():
    model, _ = made("llama")
    gemmtune.quantize_(model, "int8", skip=("lm_head", "down_proj"), filter_fn=lambda _, name: "layers.1" in name)
    found = {n.rpartition(".")[2] for n, x in model.named_modules() if isinstance(x._parameters.get("weight"), QuantizedWeight)}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    weight = model.model.layers[1].self_attn.q_proj.weight
    for call, message in (
        (lambda: gemmtune.quantize_(model, "int3"), "quantize_: kind: got 'int3', expected one of int4, int8, float8"),
        (lambda: gemmtune.quantize_(model, group=16), "quantize_: group: got 16, expected one of 32, 64, 128"),
        (lambda: gemmtune.quantize_(with_nan("0"), "int4"), "quantize_: 0: quantize: weight: got infinity or NaN.*; name it"),
        (lambda: gemmtune.quantize_(with_nan("0")[0], "int4"), "quantize_: quantize: weight: got infinity or NaN.*numbers$"),
        (lambda: gemmtune.quantize_(len), "quantize_: got builtin_function_or_method, expected an nn.Module"),
        (lambda: weight.data.mul_(2), "aten.mul_.Tensor: got a QuantizedWeight, expected a tensor that can be changed in place"),
        (lambda: weight.data.copy_(weight.t().clone().data), "copy_: got QuantizedWeight.*, expected one of the same kind"),
        (lambda: gemmtune.mixed_mm(torch.ones(2, 64), weight), r"b: got a QuantizedWeight \[64, 64\], expected one \[K, N\]; give"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            call()
    assert torch.equal(weight[:3].sum(), weight.dequantize()[:3].sum()), "what has no rule gets the dequantized weight"
    plain = torch.zeros(64, 64)
    assert torch.equal(plain.copy_(weight), weight.dequantize()), "a tensor that is no weight may be written into"
    other, _ = made("llama")
    gemmtune.quantize_(other, "int8", skip="down_proj")
    assert not isinstance(other.model.layers[0].mlp.down_proj.weight, QuantizedWeight), "one name stands for itself"
    assert isinstance(other.lm_head.weight, QuantizedWeight)
    with pytest.raises(InvalidProblemError, match=r"got 'int4', but .*q_proj is already int8, expected .*; load the model again"):
        gemmtune.quantize_(other, "int4")


def test_layers_that_share_a_parameter_share_the_quantized_one(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    alone = gemmtune.quantize_(copy.deepcopy(model[0]), "int8").weight.nbytes
    caplog.set_level("INFO", "gemmtune")
    gemmtune.quantize_(model, "int8")
    assert model[0].weight is model[2].weight is not model[1].weight
    told = f"3 layers and 0 experts are int8 now: {2 * alone / 1e6:.1f} MB instead of {2 * 64 * 64 * 4 / 1e6:.1f};"
    assert told in caplog.text
    again = copy.deepcopy(model).half()
    assert again[0].weight is again[2].weight
    assert again[0].weight.dtype == torch.float16


def test_dequantize_gives_floats_that_can_be_changed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    gemmtune.quantize_(model[:2], "int4", group=32)
    model[2].weight = model[0].weight
    x = torch.randn(3, 64)
    expected = model(x)
    assert dequantize_(model) is model
    assert model[0].weight is model[2].weight is not model[1].weight
    assert torch.allclose(model(x), expected, atol=1e-5)
    for layer in model:
        assert (type(layer.weight), layer.weight.requires_grad, layer.weight.is_contiguous()) == (nn.Parameter, False, True)
        layer.weight.data += 1
    assert not torch.allclose(model(x), expected, atol=1e-1)
    with pytest.raises(InvalidProblemError, match=r"dequantize_: got int, expected an nn\.Module"):
        dequantize_(3)


class Tied(nn.Module):
    """A head that shares its weight with an embedding, and two layers that share another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 64), nn.Linear(64, 96)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head.weight, self.other.weight = self.embedding.weight, self.one.weight


def test_weights_tied_to_floats_are_skipped_with_a_warning():
    model = Tied()
    with pytest.warns(RuntimeWarning, match="quantize_: head stays as it is: its weight is also embedding.weight, which keeps"):
        gemmtune.quantize_(model, "int8", skip=())
    assert type(model.head.weight) is nn.Parameter
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.one.weight, QuantizedWeight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemmtune.quantize_(model, "int8", skip=("head", "other"))  # already quantized, and so not tied to floats
    with pytest.warns(RuntimeWarning) as told:
        gemmtune.quantize_(model := Tied(), "int8", skip=("head", "other"))
    assert [str(x.message)[:70] for x in told] == [
        "quantize_: one stays as it is: its weight is also other.weight, which ",
        "quantize_: nothing is quantized: of nn.Linear, Conv1D and the experts ",
    ]
    assert model.one.weight is model.other.weight
    assert type(model.one.weight) is nn.Parameter


@pytest.mark.parametrize(("name", "count"), [("llama", "14 layers and 0"), ("mixtral", "8 layers and 8")])
def test_the_log_counts_quantized_weights(name, count, caplog):
    model, _ = made(name)
    caplog.set_level("INFO", "gemmtune")
    gemmtune.quantize_(model, "int8")
    gemmtune.quantize_(model, "int8")
    first, second = (told.getMessage() for told in caplog.records if told.name == "gemmtune")
    assert first.startswith(f"quantize_: {count} experts are int8 now: ")
    assert first.endswith("0 weights were quantized before, 1 keep their floats")
    assert second.startswith("quantize_: 0 layers and 0 experts")


@pytest.mark.parametrize(
    ("model", "skip", "message"),
    [
        (nn.ReLU(), (), "nothing is quantized: .* the model has none"),
        (nn.Linear(2, 2), "lm_head", None),
        (nn.Sequential(nn.Linear(2, 2)), ("0",), "nothing is quantized: .* each is skipped, filtered out, tied, .*"),
        (nn.Sequential(nn.Linear(2, 2)), ("lm_hed",), "skip: got 'lm_hed', which skips nothing; expected .*, such as '0'"),
    ],
)
def test_useless_arguments_warn(model, skip, message):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gemmtune.quantize_(model, "int8", skip=skip)
    assert [w.filename for w in told] == [__file__] * (message is not None)
    assert all(re.fullmatch(f"quantize_: {message}", str(w.message)) for w in told)


UNFIT = (
    ("int4", "odd", r"odd stays as it is: got 5 inputs in a weight \[2, 5\], expected a multiple of 2 for int4"),
    ("int4", "one", r"one stays as it is: got 1 inputs in a weight \[4, 1\], expected a multiple of 2 for int4"),
    ("int8", "one", None),
    ("float8", "odd", None),
    *((kind, name, rf"{name} stays as it is: got a weight {size}, expected one with elements")
      for kind in KINDS for name, size in (("empty", r"\[0, 8\]"), ("no_inputs", r"\[8, 0\]"))),
    ("int8", "lazy", "lazy stays as it is: got a weight of a lazy layer, whose size the first call sets; call the model before"),
    *((kind, "sparse", "sparse stays as it is: got a weight of torch.sparse_bsr, expected a dense one") for kind in KINDS),
)  # fmt: skip
"""Layers that have no such kind, with the warning, and layers that do."""


def test_weights_without_such_a_kind_are_skipped_with_a_warning():
    sizes = {"odd": (5, 2), "one": (1, 4), "empty": (8, 0), "no_inputs": (0, 8), "sparse": (32, 32)}
    for kind, name, message in UNFIT:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = nn.ModuleDict({"good": nn.Linear(64, 32), name: nn.Linear(*sizes[name]) if name in sizes else nn.LazyLinear(2)})
            if name == "sparse":
                gemmtune.sparsify_(model[name], block=16)
            told.clear()
            gemmtune.quantize_(model, kind)
        assert [w.filename for w in told] == [__file__] * (message is not None), (kind, name)
        assert all(re.fullmatch(f"quantize_: {message}; name it in skip=", str(w.message)) for w in told), (kind, name)
        assert isinstance(model["good"].weight, QuantizedWeight)
        assert isinstance(model[name].weight, QuantizedWeight) == (message is None), (kind, name)
    with pytest.warns(RuntimeWarning, match="0 and 2 more stay as they are: got 5 inputs"):
        gemmtune.quantize_(nn.Sequential(*(nn.Linear(5, 2) for _ in range(3)), nn.Linear(64, 2)), "int4")


def test_conv1d_of_transformers_has_a_transposed_weight():
    layer = transformers.pytorch_utils.Conv1D(96, 64)
    x = torch.randn(2, 3, 64)
    gemmtune.quantize_(layer, "int8")
    assert layer.weight.shape == (64, 96) == (SMALL["hidden_size"], 96)
    assert torch.allclose(layer(x), x @ layer.weight.dequantize() + layer.bias, atol=1e-5)
