"""optimize, restore and use: picks run where they are faster, otherwise torch, and nothing else of a model changes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from models import MODELS, made, result
from rotation import rotated
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import InvalidProblemError
from gemmtune.integration import compile as compile_pass
from gemmtune.integration import eager, modules
from gemmtune.integration.modules import is_optimized
from gemmtune.quantized.parts import STATIC
from gemmtune.quantized.weight import QuantizedWeight
from gemmtune.settings import current
from gemmtune.store.store import open_store


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(backends=("aten", "cpp"), search="quick"):
        yield
    compile_pass.uninstall()


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """Return the list of operations that picks ran, which fills up."""
    names: list[str] = []
    run = eager.Bound.run

    def noted(self, op, tensors):
        found = run(self, op, tensors)
        names.extend([op] if found is not None else [])
        return found

    monkeypatch.setattr(eager.Bound, "run", noted)
    return names


def torch_is_slow() -> None:
    """Stored times say that torch is slower than everything else, so that picks are ours whatever this machine measures.

    The composition of a grouped product, which nobody else has on a CPU, counts as another one.
    """
    store = open_store(current())
    slow = [row for row in store.every_row() if row.backend == "aten" and row.name != "aten:grouped_composed"]
    store.put([dataclasses.replace(row, time_us=row.time_us + 1e6) for row in slow if row.time_us is not None])
    forget_plans()


def tuned(model: nn.Module, inputs) -> None:
    with torch.enable_grad(), gemmtune.record() as recording:
        result(model, inputs).float().square().sum().backward()
    gemmtune.tune(recording.problems(), progress=False)
    torch_is_slow()


def layers(model: nn.Module) -> int:
    return sum(type(m).__name__ in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear") for m in model.modules())


@pytest.mark.parametrize("name", ["mlp", *rotated([name for name in MODELS if name != "mlp"], 3, "optimize")])
def test_an_optimized_model_keeps_values_and_gradients(name, done):
    model, inputs = made(name)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    names = {key: (id(x), type(x)) for key, x in model.named_parameters()}
    plain = copy.deepcopy(model)
    if name == "mlp":
        tuned(copy.deepcopy(model), inputs)
    assert gemmtune.optimize(gemmtune.optimize(model)) is model
    assert sum(map(is_optimized, model.modules())) == layers(model) > 0
    assert {key: (id(x), type(x)) for key, x in model.named_parameters()} == names
    for x, y in ((model, plain), (model, plain)):
        found, expected = result(x, inputs), result(y, inputs)
        assert torch.allclose(found, expected, atol=1e-4)
    found.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None)
        assert x.grad is None or torch.allclose(x.grad, y.grad, atol=1e-3)
    assert ("mm" in done and "addmm" in done) == (name == "mlp"), "only what is tuned runs by a pick"
    gemmtune.restore(model)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@pytest.mark.turn(6, 8)
def test_copies_hooks_compilation_and_new_picks(done):
    model, inputs = made("mlp")
    expected = result(model, inputs)
    gemmtune.optimize(model)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert torch.equal(result(model, inputs), expected)
        assert not done
        tuned(copy.deepcopy(model), inputs)
        calls.clear()
        loaded = pickle.loads(pickle.dumps(gemmtune.optimize(made("mlp")[0])))
        assert torch.allclose(result(loaded, inputs), expected, atol=1e-5)
        assert not done, "a pickle has torch's forwards"
        for again in (model, copy.deepcopy(model), gemmtune.optimize(loaded)):
            done.clear()
            assert torch.allclose(result(again, inputs), expected, atol=1e-5)
            assert done == ["addmm", "mm"]
            assert again[0].forward.__self__ is again[0]
        assert len(calls) == 2
        done.clear()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.allclose(result(compiled, inputs), expected, atol=1e-5)
        model.bfloat16()
        assert model(inputs["input"].bfloat16()).dtype == torch.bfloat16
        assert not done, "another dtype was never tuned, and in a graph torch's operations stay"


def test_one_token_of_a_sequence_runs_the_pick_of_a_row(done):
    model, sequence = nn.Linear(32, 24), torch.randn(1, 5, 32)
    tuned(model, {"input": torch.randn(1, 32)})
    for place in ((slice(None), 2), (0, slice(2, 3)), (slice(None), slice(2, 3))):
        done.clear()
        optimized = gemmtune.optimize(copy.deepcopy(model))
        with torch.no_grad():
            expected = functional.linear(sequence[place], model.weight, model.bias)
            assert torch.allclose(optimized(sequence[place]), expected, atol=1e-5)
        assert done == ["addmm"], place


@pytest.mark.rotates(8)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "listener",
    [
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,))[0],
        lambda f, x: torch.func.functionalize(f)(x),
        lambda f, x: torch.jit.trace(f, (x,))(x),
        lambda f, x: torch.jit.script(f)(x),
        lambda f, x: f(x.transpose(0, 1).contiguous().transpose(0, 1)),
    ],
    ids=["vmap", "jvp", "functionalize", "trace", "script", "strided"],
)
def test_torch_runs_under_modes_and_transforms(listener):
    model, inputs = made("mlp")
    with torch.no_grad():
        expected = result(model, inputs)
        tuned(copy.deepcopy(model), inputs)
        gemmtune.optimize(model)
        assert torch.allclose(model(inputs["input"]), expected, atol=1e-5)
        assert torch.allclose(listener(model, inputs["input"]), expected, atol=1e-5)


def test_optimize_with_tune_records_tunes_and_uses_picks(done):
    model, inputs = made("mlp")
    expected = result(model, inputs)
    for example in (inputs, inputs["input"], (inputs["input"],)):
        assert gemmtune.optimize(model, tune=example, progress=False) is model
    torch_is_slow()
    with torch.no_grad():
        assert torch.allclose(result(model, inputs), expected, atol=1e-5)
    assert done == ["addmm", "mm"]
    for call, message in (
        (lambda: gemmtune.optimize(len), "optimize: got builtin_function_or_method, expected an nn.Module; for functions there is"),
        (lambda: gemmtune.optimize(model, tune=3), "optimize: tune: got int, expected a tensor, a tuple of arguments, a mapping"),
        (lambda: gemmtune.restore(len), "restore: got builtin_function_or_method, expected an nn.Module"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            call()
    with pytest.raises(TypeError, match=r"argument 'input' .* must be Tensor, not NoneType"):
        model[0](None)


def test_tuning_restores_statistics_and_random_numbers(monkeypatch):
    monkeypatch.setattr("gemmtune.integration.optimize.tune_products", lambda *_: None)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    gemmtune.optimize(model, tune=torch.ones(4, 8), progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_shallow_copy_of_a_layer_is_optimized_and_restored_separately():
    layer = gemmtune.optimize(nn.Linear(8, 4))
    for of_copy in (gemmtune.optimize, gemmtune.restore):
        other = copy.copy(layer)
        other._parameters = {"weight": nn.Parameter(torch.zeros(4, 8)), "bias": None}
        assert not is_optimized(other)
        assert not of_copy(other)(torch.ones(2, 8)).any()
        assert is_optimized(other) == (of_copy is gemmtune.optimize)
    assert is_optimized(layer)


@pytest.mark.turn(2, 8)
def test_quantized_weights_run_their_own_picks(done):
    model, inputs = made("mlp")
    gemmtune.optimize(gemmtune.quantize_(model, "int4", group=32))
    with torch.no_grad():
        expected = result(model, inputs)
        assert not done
        gemmtune.optimize(model, tune=inputs, progress=False)
        torch_is_slow()
        for _ in range(2):
            assert torch.allclose(result(model, inputs), expected, atol=1e-5)
    assert done == ["mixed_mm"] * 4
    x = inputs["input"].clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad.isfinite().all()
    assert model[0].bias.grad is not None


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_graphs_for_inference_read_the_parts_of_narrow_weights(kind, own_store, monkeypatch):
    monkeypatch.setattr(modules, "BY_PARTS", True)
    torch._dynamo.reset()
    taken = []

    def backend(graph, inputs):
        taken.append({type(x) for x in inputs})
        return graph.forward

    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
    gemmtune.optimize(gemmtune.quantize_(model, kind))
    compiled, x = torch.compile(model, fullgraph=True, backend=backend), torch.randn(2, 5, 64)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
            assert QuantizedWeight not in taken[-1]
            model[0].weight = copy.deepcopy(model[0].weight)
            model[0].weight.scales.mul_(3)  # another weight, with other numbers: the graph reads those
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(x).dtype == model(x).dtype == torch.bfloat16
            assert QuantizedWeight in taken[-1]
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert QuantizedWeight in taken[-1], "torch's rules of gradients need the weight"
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)
    assert vars(marked) == {STATIC: getattr(model[0].weight.tensor, STATIC)}, "CUDA graphs do not copy the parts"


@pytest.mark.turn(1, 8)
@pytest.mark.parametrize("kind", ["", "int4", "sparse"])
def test_eager_calls_with_new_sizes_compile_nothing_again(kind, own_store):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if kind == "sparse":
        gemmtune.sparsify_(model, block=16)
    elif kind:
        gemmtune.quantize_(model, kind)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(gemmtune.optimize(model), backend=counter)
    with torch.no_grad():
        compiled(torch.randn(1, 64))
        before = counter.frame_count
        for rows in (37, 190):
            model(torch.randn(rows, 64))
            compiled(torch.randn(1, 64))
    assert counter.frame_count == before


def test_quantized_layers_without_a_pick_compute_what_the_operator_does(own_store):
    for kind, bias in (("int4", True), ("int8", False), ("float8", True)):
        layer = nn.Linear(64, 40, bias=bias)
        gemmtune.quantize_(nn.Sequential(layer), kind)
        x = torch.randn(3, 5, 64)
        with torch.no_grad():
            expected = layer(x)
            gemmtune.optimize(layer)
            for _ in range(2):
                assert torch.equal(layer(x), expected), kind
        wanted = x.clone().requires_grad_()
        layer(wanted).sum().backward()
        assert torch.allclose(wanted.grad, layer.weight.dequantize().sum(0).expand_as(x), atol=1e-4)


def test_the_compile_pass_is_installed_while_a_model_is_optimized(monkeypatch: pytest.MonkeyPatch):
    # Models of other tests may still be alive in reference cycles.
    monkeypatch.setattr("gemmtune.integration.optimize._models", weakref.WeakSet())

    def installed() -> bool:
        return type(torch._inductor.config.post_grad_custom_post_pass).__name__ == "RewriteProducts"

    first, second = (gemmtune.optimize(made("mlp")[0]) for _ in range(2))
    assert installed()
    gemmtune.restore(first)
    assert installed()
    gemmtune.restore(second)
    assert not installed()
    for around in (nn.Sequential, torch.compile):  # peft and Lightning wrap a model too
        whole = around(gemmtune.optimize(made("mlp")[0]))
        assert installed()
        gemmtune.restore(whole)
        assert not installed()


def test_a_call_that_fails_leaves_the_forwards_of_before():
    model, inputs = made("mlp")
    gemmtune.optimize(model)
    before = [layer.__dict__.get("forward") for layer in model]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gemmtune.optimize(model, tune=torch.zeros(2, 3), batch_invariant=True, progress=False)
    assert [layer.__dict__.get("forward") for layer in model] == before
    assert torch.isfinite(result(model, inputs)).all(), "batch-invariant layers without a table would raise"


def test_layers_stay_batch_invariant_until_they_are_restored(own_store):
    model, inputs = made("mlp")
    gemmtune.optimize(gemmtune.optimize(model, batch_invariant=True))
    with pytest.raises(gemmtune.NoValidChoicesError, match="batch"):
        result(model, inputs)
    gemmtune.optimize(gemmtune.restore(model))
    assert torch.isfinite(result(model, inputs)).all()


A, B, C = (torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((6, 4, 32), (6, 32, 16), (16,)))
ENDS, COLUMN_ENDS = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 1, 1, 2, 4, 4], [0, 3, 3, 4, 9, 16]))
FUNCTIONS = {
    "mm": (lambda: torch.mm(A[0], B[0]), "mm"),
    "method": (lambda: A[0].mm(B[0]), "mm"),
    "matmul": (lambda: torch.matmul(A[0], B[0]), "mm"),
    "rows": (lambda: A @ B[0], "mm"),
    "@": (lambda: A @ B, "bmm"),
    "bmm": (lambda: torch.bmm(A, B), "bmm"),
    "addmm": (lambda: torch.addmm(C, A[0], B[0]), "addmm"),
    "baddbmm": (lambda: torch.baddbmm(C, A, B), "baddbmm"),
    "linear": (lambda: functional.linear(A, B[0].t(), C), "addmm"),
    "no bias": (lambda: functional.linear(input=A, weight=B[0].t()), "mm"),
    "a bias of None": (lambda: functional.linear(A, B[0].t(), None), "mm"),
    "keywords": (lambda: torch.addmm(C, mat1=A[0], mat2=B[0], beta=1), "addmm"),
    "groups of rows": (lambda: functional.grouped_mm(A[0], B, offs=ENDS), "grouped_mm"),
    "groups of terms": (lambda: torch._grouped_mm(A[0].t(), A[0], ENDS), "grouped_k_mm"),
    "groups of columns": (lambda: torch._grouped_mm(A, B[0], offs=COLUMN_ENDS), None),
    "out": (lambda: torch.mm(A[0], B[0], out=torch.empty(4, 16)), None),
    "factors": (lambda: torch.addmm(C, A[0], B[0], alpha=2), None),
    "vector": (lambda: A[0] @ B[0][:, 0], None),
    "broadcast": (lambda: A[0] @ B, None),
    "integers": (lambda: torch.mm(A[0].long(), B[0].long()), None),
}


@pytest.mark.turn(3, 8)
def test_use_runs_picks_for_torchs_products_only(done):
    with gemmtune.record() as recording:
        expected = {name: call() for name, (call, _) in FUNCTIONS.items()}
    gemmtune.tune(recording.problems(), progress=False)
    torch_is_slow()
    with gemmtune.use():
        for name, (call, op) in FUNCTIONS.items():
            done.clear()
            for _ in range(2):
                assert torch.allclose(call(), expected[name], atol=1e-4), name
            assert done == ([op] * 2 if op else []), name
        weight = B[0].clone().requires_grad_()
        torch.mm(A[0], weight).sum().backward()
    assert torch.allclose(weight.grad, A[0].sum(0)[:, None].expand(32, 16), atol=1e-4)
    done.clear()
    torch.mm(A[0], B[0])
    assert not done


def test_optimized_models_and_use_never_tune(monkeypatch):
    monkeypatch.setattr("gemmtune.dispatch.strategies.select", None)
    model, inputs = made("mlp")
    gemmtune.optimize(model)
    with torch.no_grad(), gemmtune.use():
        result(model, inputs)
    assert not open_store(current()).every_row()


def test_lazy_layers_are_optimized_before_their_first_call(own_store):
    for words in ({}, {"m": range(1, 3)}, {"batch_invariant": True}):
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        with settings.patch(backends=("aten",), search="quick", rows="shared"):
            gemmtune.optimize(model, progress=False, **words)
            assert is_optimized(model[0])
            if "batch_invariant" not in words:
                assert model(torch.randn(3, 5)).shape == (3, 2)
        assert is_optimized(model[0])


def counted(graphs):
    """Return a backend of torch.compile that keeps each graph."""
    torch._dynamo.reset()

    def kept(graph, _):
        graphs.append(graph)
        return graph

    return kept


def test_graphs_compile_again_once_the_model_is_tuned(own_store):
    graphs = []
    layer, x = gemmtune.optimize(torch.nn.Sequential(torch.nn.Linear(24, 16))), torch.randn(5, 24)
    compiled = torch.compile(layer, backend=counted(graphs))
    with torch.no_grad(), settings.patch(backends=("aten",), tune_in_subprocess=False, rows="shared"):
        for tuning, count in ({}, 1), ({"tune": x}, 2), ({}, 2), ({"m": range(1, 9)}, 3):
            gemmtune.optimize(layer, progress=False, **tuning)
            for _ in range(2):
                compiled(x)
            assert len(graphs) == count, tuning


def test_graphs_stay_when_another_model_is_tuned_and_follow_each_change_of_their_own(own_store):
    graphs = []
    (layer, other), x = (nn.Sequential(nn.Linear(24, 16)) for _ in range(2)), torch.randn(5, 24)
    compiled, words = torch.compile(layer, backend=counted(graphs)), {"progress": False, "m": range(1, 9)}
    with torch.no_grad(), settings.patch(backends=("aten",), tune_in_subprocess=False, rows="shared"):
        changes = (
            (lambda: None, 1),
            (lambda: gemmtune.optimize(layer, **words), 2),
            (lambda: gemmtune.optimize(other, **words), 2),
            (lambda: gemmtune.restore(layer), 2),
            (lambda: gemmtune.optimize(layer, **words), 3),
        )
        for place, (change, count) in enumerate(changes):
            change()
            compiled(x)
            assert len(graphs) == count, place


def test_without_a_temporary_folder_layers_are_optimized_all_the_same(own_store, monkeypatch):
    def fails(**_: bool) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(compile_pass, "install", fails)
    with pytest.warns(RuntimeWarning, match="No usable temporary directory found.*set TMPDIR"):
        layer = gemmtune.optimize(nn.Linear(8, 8))
    assert is_optimized(layer)
    gemmtune.restore(layer)


@pytest.mark.parametrize(
    ("in_graph_only", "prepared", "hip", "kept"),
    [
        (False, None, None, ("the plan", 0)), (True, None, None, (None, 77)), (True, "launched natively", None, ("the plan", 0)),
        (True, None, "6.3", ("the plan", 0)), (False, None, "6.3", ("the plan", 0)),
    ],
)  # fmt: skip
def test_a_pick_for_graphs_only_is_kept_with_the_function_that_sees_captures(in_graph_only, prepared, hip, kept, monkeypatch):
    """A pick that the native look-up launches itself, and one for HIP, run outside of graphs too."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(modules, "find_driver", lambda: SimpleNamespace(capture_info=77))
    plan = SimpleNamespace(kernel=SimpleNamespace(prepared=prepared))
    bound = eager.Bound(SimpleNamespace(plan=plan, in_graph_only=in_graph_only), (torch.ones(2, 2),))
    found = modules._native_of(bound)
    assert ("the plan" if found[0] is plan else found[0], found[1]) == kept
    assert modules._native_of(None) == (None, 0)
