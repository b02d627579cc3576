"""Batch-invariant layers of one input are one product in compiled graphs, with the bits of the separate products."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_graphs import FixedPolicy, rewriting_backend
from extras import needs
from models import made, result
from test_invariant import LENGTHS, Summing, SummingBackend, backend, summed  # noqa: F401 - the fixture
from torch import Tensor, nn

import gemmtune
from gemmtune import settings
from gemmtune.choice import Kernel
from gemmtune.integration import compile as compile_pass
from gemmtune.integration import invariant_joined
from gemmtune.integration.compile import rewriting

X = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """Three layers of one input with biases, and two without. Maxima round nothing, so that graphs have the bits of eager calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(32, n) for n in (32, 16, 16))
        self.gate, self.up = (nn.Linear(16, 24, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(torch.maximum(self.q(x)[..., 16:], self.k(x)), self.v(x))
        return torch.maximum(self.gate(x), self.up(x))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, backend: SummingBackend) -> Iterator[None]:  # noqa: F811
    """Make small tables of a fake backend, and let Inductor compile each graph here."""
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 2)
    monkeypatch.setattr(invariant_joined, "_equal", {})
    backend.kinds = ("torch", "run")
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    compile_pass.uninstall()


def optimized(model: nn.Module, inputs: Any = X) -> nn.Module:
    return gemmtune.optimize(model, tune=inputs, batch_invariant=True, progress=False)


def products(f: Callable[[], Any]) -> list[int]:
    """Return how many layers each product of a run has, in order."""
    with torch.profiler.profile(record_shapes=True) as profile:
        f()
    counts = {"gemmtune::invariant_joined": 0, "gemmtune::invariant_linear": 0, "gemmtune::invariant_quantized": 0}
    for event in profile.events():
        if event.name in counts:
            counts[event.name] += 1
    return list(counts.values())


def compiled_quickly(model: nn.Module) -> Any:
    """Return the model compiled with the pass, without Inductor's kernels."""
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=False, backend=rewriting_backend(FixedPolicy("")))


@pytest.mark.turn(6, 8)
@needs("models")
def test_a_step_of_a_llama_has_the_products_of_the_free_one(monkeypatch: pytest.MonkeyPatch):
    """Of seven layers of a block four products are left: q with k and v, o, gate with up, and down."""
    model, inputs = made("llama")
    model.config.use_cache, blocks = False, model.config.num_hidden_layers
    model.set_attn_implementation("eager")
    looks = [looks_of(model)]
    optimized(model, inputs)
    looks.append(looks_of(model))
    assert looks[0] == looks[1]
    with torch.no_grad():
        compiled = compiled_quickly(model)
        joined = result(compiled, inputs)
        assert products(lambda: compiled(**inputs)) == [2 * blocks, 2 * blocks + 1, 0]
        assert "joined, 128 columns by their table; batch_invariant: one product for 3 layers" in str(gemmtune.explain(compiled))
        assert torch.equal(result(compiled, {name: x[:1] for name, x in inputs.items()}), joined[:1])
        monkeypatch.setattr(rewriting, "join_invariant", lambda graph: [])
        apart = compiled_quickly(model)
        assert torch.equal(result(apart, inputs), joined), "joined products have the bits of the separate ones"
        assert products(lambda: apart(**inputs)) == [0, 7 * blocks + 1, 0]
    gemmtune.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch._inductor.config.post_grad_custom_post_pass is None


def looks_of(model: nn.Module) -> dict[str, Any]:
    """Return what files of a state see: names, strides, bytes of the storages, values after a save and a load."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    values = {name: x.tolist() for name, x in torch.load(file, weights_only=True).items()}
    return {name: (x.stride(), x.untyped_storage().nbytes(), values[name]) for name, x in model.state_dict().items()}


@pytest.mark.turn(3, 8)
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_eager_and_compiled_rows_have_equal_bits(kind: str, monkeypatch: pytest.MonkeyPatch):
    """So do the separate products of weights that were moved, and those of a graph with dynamic sizes."""
    model = optimized(Block() if kind == "float" else gemmtune.quantize_(Block(), kind))
    with torch.no_grad():
        whole = model(X)
        for compiled in (torch.compile(model, fullgraph=True, dynamic=True), compiled_quickly(model)):
            for batches, rows in ((3, 5), (2, 3), (3, 2)):
                assert torch.equal(compiled(X[:batches, :rows].contiguous()), whole[:batches, :rows]), (batches, rows)
            assert products(lambda f=compiled: f(X)) == [2, 0, 0]
        runs = count(monkeypatch)
        model.k.weight.data = model.k.weight.data.clone()
        assert torch.equal(compiled(X), whole)
        assert runs == [32, 16, 16, 48], "not adjacent: q, k and v run apart"
    assert not invariant_joined.joined_problems([(model.q, model.k, model.v)])


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each product of a joined operator adds its number of columns."""
    runs: list[int] = []
    multiplied = invariant_joined.multiplied

    def counted(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        runs.append(weight.shape[0])
        return multiplied(x, weight, *more)

    monkeypatch.setattr(invariant_joined, "multiplied", counted)
    return runs


@pytest.mark.turn(7, 8)
def test_bits_are_compared_for_each_precision_and_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    """A table is of one precision of torch, and so is what was compared. It does not matter how rows are batched."""
    model = optimized(Block())
    layers = (model.q, model.k, model.v)
    weights, biases = ([getattr(layer, name).detach() for layer in layers] for name in ("weight", "bias"))
    columns = invariant_joined.Columns(weights=weights, scales=[], zeros=[], biases=biases, encoding="")
    runs, counts = count(monkeypatch), []
    for precision, x in (("ieee", X), ("ieee", X.flatten(0, 1)), ("ieee", X[:, :2]), ("tf32", X)):
        monkeypatch.setattr(invariant_joined, "flags_token", lambda _dtype, flags=precision: flags)
        assert invariant_joined.can_join(x, columns)
        counts.append(len(runs))
    assert counts == [4, 4, 8, 12]


@pytest.mark.turn(2, 8)
def test_training_steps_follow_changed_weights():
    """Weights that an optimizer changes stay adjacent, and no product reads a copy of them."""
    models = [optimized(Block()), Block()]
    trained = [compiled_quickly(models[0]), models[1]]
    steps = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for _ in range(2):
        for model, optimizer in zip(trained, steps, strict=True):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        assert torch.equal(trained[0](X), models[0](X))
        assert products(lambda: trained[0](X)) == [2, 0, 0]


@pytest.mark.turn(6, 8)
def test_layers_take_the_class_of_stored_tables_or_stay_apart(backend: SummingBackend, caplog: pytest.LogCaptureFixture):  # noqa: F811
    """Tables of q that another model made decide for all of them. Tables of several classes keep the layers apart."""
    caplog.set_level("INFO", logger="gemmtune")
    backend.kinds = ("torch", "halves")
    optimized(nn.Sequential(nn.Linear(32, 32)))
    backend.kinds = ("torch", "run", "halves")
    model = optimized(Block())
    compiled = compiled_quickly(model)
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
        assert products(lambda: compiled(X)) == [2, 0, 0]
        assert model.k(X[0, :1]).equal(halved(X[0, :1], model.k))
    assert "stay apart" not in caplog.text
    backend.kinds = ("torch", "run")
    optimized(nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 8)))
    optimized(Pair(16, 40))
    assert "stay apart: their stored tables have several reduction classes" in caplog.text


class Pair(nn.Module):
    """Two layers of one input."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, first), nn.Linear(32, second)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x), self.second(x)), -1)


@pytest.mark.turn(4, 8)
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_the_pass_joins_under_the_setting(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Layers without our forwards are torch's products in a graph. Moved weights run apart, with the same bits."""
    model = gemmtune.restore(optimized(Block() if kind == "float" else gemmtune.quantize_(Block(), kind)))
    torch._dynamo.reset()
    compile_pass.install()
    with torch.no_grad(), settings.patch(batch_invariant=True, tune="never"):
        whole = torch.cat([optimized_forward(model, x) for x in X.flatten(0, 1)]).unflatten(0, (3, 5))
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(X), whole)
        assert [d.taken for d in gemmtune.explain(compiled).decisions] == ["joined"] * 5
        if kind == "float":
            model.k.weight.data = model.k.weight.data.clone()
            assert torch.equal(compiled(X), whole)


def optimized_forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the result for one row by eager calls."""
    gemmtune.optimize(model, batch_invariant=True)
    y = model(x[None])
    gemmtune.restore(model)
    compile_pass.install()
    return y


def halved(x: Tensor, layer: nn.Linear) -> Tensor:
    return summed(x, layer.weight.t(), LENGTHS["halves"](1)) + layer.bias


@pytest.mark.turn(5, 8)
def test_products_whose_bits_differ_stay_apart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A kernel may declare a class and sum otherwise for many columns. Nobody saw that by its rows."""

    def bind(self: Summing, loaded: object) -> Kernel:
        length = 4 if self.problem.n in (64, 48) else 32
        return Kernel(run=lambda out, x, scalars: out.copy_(sum(x[2:], summed(x[0], x[1], length))))

    monkeypatch.setattr(Summing, "bind", bind)
    model = optimized(Block())
    compiled = compiled_quickly(model)
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
        assert products(lambda: compiled(X)) == [0, 5, 0]


@pytest.mark.turn(2, 8)
def test_the_joined_operator_passes_torchs_checks():
    model = optimized(Block())
    layers = (model.q, model.k, model.v)
    arguments = (X, [layer.weight.detach() for layer in layers], [], [], [layer.bias.detach() for layer in layers], "")
    torch.library.opcheck(invariant_joined.OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))
