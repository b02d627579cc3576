"""Horizontal fusion: weights of layers with the same input move together, and compiled graphs compute one product for them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_graphs import FixedPolicy, decided, outputs_and_gradients, rewriting_backend
from models import made, result, transformers
from rotation import rotated
from torch import nn

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.dispatch import wholes
from gemmtune.integration import compile as compile_pass
from gemmtune.integration.adjacent import lay_out, same_inputs
from gemmtune.integration.compile import backend, planned_horizontal, rewriting, store_policy
from gemmtune.integration.compile.horizontal import adjacent_inputs
from gemmtune.integration.compile.planned import problem_of_text
from gemmtune.integration.compile.report import Decision
from gemmtune.integration.compile.store_policy import StorePolicy, _parts
from gemmtune.integration.compile.stored_decisions import StoredDecisions
from gemmtune.problem import Layout, Problem
from gemmtune.problem.rows import row_classes
from gemmtune.problem.trace import trace
from gemmtune.timing.rounds import TIE

Tensor = torch.Tensor


class Heads(nn.Module):
    """Three layers that read one input."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=bias) for n in (64, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x).unflatten(-1, (2, 32)) * self.k(x)[..., None, :]).tanh().sum(-2) + self.v(x)


X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def joined():
    """Install a policy that fuses GEMMs horizontally, and rewrites every other GEMM alone. Yield the decisions."""
    backend.install(policy=FixedPolicy("alone"))
    with decided() as made:
        yield made
    compile_pass.uninstall()


def laid_out(model: nn.Module, inputs: Any) -> nn.Module:
    with torch.no_grad(), same_inputs(model) as groups:
        result(model, inputs)
    lay_out(model, groups)
    return model


def heads(kind: str = "float") -> nn.Module:
    torch.manual_seed(3)
    model = Heads()
    return model if kind == "float" else gemmtune.quantize_(model, kind, group=32)


def are_adjacent(model: nn.Module) -> bool:
    """Return True if the weight of k follows that of q in memory."""
    first, second = (getattr(x.weight, "tensor", x.weight) for x in (model.q, model.k))
    return second.data_ptr() == first.data_ptr() + first.nbytes


@pytest.mark.parametrize("kind", ["float", "int4", "int8"])
def test_moved_parameters_keep_identity_and_values(kind, tmp_path):
    model = heads(kind)
    model.tied, model.buffer = model.v, model.q.bias.data
    objects, plain = {name: id(x) for name, x in model.named_parameters()}, copy.deepcopy(model)
    assert not are_adjacent(model)
    laid_out(model, {"x": X})
    assert are_adjacent(model)
    assert {name: id(x) for name, x in model.named_parameters()} == objects
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        assert (type(x), x.shape, x.stride(), x.dtype, x.requires_grad) == (type(y), y.shape, y.stride(), y.dtype, y.requires_grad)
        assert torch.equal(x.dequantize() if kind != "float" else x, y.dequantize() if kind != "float" else y)
    assert torch.equal(model(X), plain(X))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for other in (copy.deepcopy(model), copy.deepcopy(model).double().float(), copy.deepcopy(plain)):
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(other(X), plain(X))
    if kind == "float":
        for each in (model, plain):
            optimizer = torch.optim.AdamW(each.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                each(X).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
        assert are_adjacent(model)


def test_a_model_with_moved_weights_saves_and_loads(tmp_path):
    model, inputs = made("llama")
    expected = result(model, inputs)
    laid_out(model, inputs).save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(result(again.eval(), inputs), expected)


def test_weights_of_a_compiled_model_move_too():
    model = heads()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = compiled(X)
        laid_out(compiled, {"x": X})
        assert are_adjacent(model)
        assert torch.equal(compiled(X), expected)


def test_shared_memory_does_not_move():
    model = heads()
    model.q.weight.data = torch.empty(2, 64, 64)[0]
    model.register_buffer("view", model.v.weight.data[:2])
    laid_out(model, {"x": X})
    assert not are_adjacent(model)
    assert model.view.data_ptr() == model.v.weight.data_ptr()


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize("kind", ["float", *rotated(["int4", "int8"], every=2, name="joined weights")])
def test_a_fused_product_equals_the_separate_ones(kind, joined):
    model = laid_out(heads(kind), {"x": X})
    lowering: Any = "inductor" if kind == "float" else rewriting_backend(FixedPolicy("alone"))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=lowering)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4)
    assert [(d.taken, d.problem.n, d.pick) for d in joined] == [("joined", 128, joined[0].pick)] * 3
    assert "joined to 128 columns" in str(gemmtune.explain(compiled))
    parts = planned_horizontal._parts(joined[0].joined.key, (64, 32, 32))
    assert [row_classes(problem_of_text(x)) for x in parts] == [row_classes(d.alone) for d in joined], "the tables of the weights"
    trained = [x for x in model.parameters() if x.requires_grad]
    got, expected = (outputs_and_gradients(f, trained, X) for f in (compiled, model))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.turn(5, 8)
@pytest.mark.parametrize("name", rotated(["llama", "bert"], every=2, name="joined models"))
def test_models(name, joined):
    model, inputs = made(name)
    laid_out(model, inputs)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=rewriting_backend(FixedPolicy("alone")))
    with torch.no_grad():
        torch.testing.assert_close(result(compiled, inputs), result(model, inputs), rtol=1e-4, atol=1e-4)
    widths = [d.problem.n for d in joined if d.taken == "joined"]
    assert widths == {"llama": [128] * 3 + [256] * 2, "bert": [192] * 3}[name] * 2
    assert all(d.taken or d.reason.startswith("K is 1") for d in joined)  # angles are a product in graphs of torch 2.11


def cloned(model: nn.Module) -> None:
    for layer in (model.q, model.k):
        layer.weight.data = layer.weight.data.clone()


def converted(model: nn.Module) -> None:
    model.double().float()


def test_only_several_rows_of_scales_are_copied_together():
    found = {}
    for scales in ("group_32", "group_64", "column", "tensor"):
        for zeros in (False, True):
            problem = Problem.mixed_mm(4, 48, 64, dtype=torch.float32, scales=scales, zeros=zeros, device_type="cpu")
            found[scales, zeros] = planned_horizontal.gathered_roles(problem)
    copied = {("group_32", False): ("scale_b",), ("group_32", True): ("scale_b", "zero_b")}
    assert found == dict.fromkeys(found, ()) | copied


@pytest.mark.rotates(8)
@pytest.mark.parametrize("kind", ["float", "int4", "int8"])
@pytest.mark.parametrize("move", [cloned, converted])
def test_weights_that_are_no_longer_adjacent_are_multiplied_separately(kind, move, joined, monkeypatch):
    model = laid_out(heads(kind), {"x": X})
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    runs: list[int] = []
    for name in ("run_planned", "run_as_laid_out"):
        run = getattr(planned_horizontal, name)

        def noted(*tensors, out, problem, run=run, **more):
            runs.append(out.shape[1])
            run(*tensors, out=out, problem=problem, **more)

        monkeypatch.setattr(planned_horizontal, name, noted)
    with torch.no_grad():
        expected = model(X)
        torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-4)
        move(model)
        torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-4)
    assert runs == [128, 64, 32, 32]
    assert len(joined) == 3


def doubled(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.map_parts(lambda part: part.clone() if part is weight.tensor else part * 2)


SCALE_CHANGES = {
    "a counted write": lambda w: w.scales.mul_(2),
    "a write that nothing counts": lambda w: w.scales.data.mul_(2),
    "a copy of a weight": lambda w: w.data.copy_(doubled(w)),
    "new scales": lambda w: setattr(w, "scales", w.scales * 2),
    "a new weight": lambda w: setattr(w, "data", doubled(w)),
}


def test_joined_scales_are_copied_once_and_after_changes(joined, monkeypatch):
    """A step without a change concatenates no scales. The copy goes with its pieces."""
    before, concatenated, cat = len(wholes._gathered), list[int](), torch.cat
    scales = [2, 64], [2, 32], [2, 32]

    def counted(pieces, *args, **kwargs):
        concatenated.extend([1] if [list(x.shape) for x in pieces] == [*scales] else [])
        return cat(pieces, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", counted)
    model = laid_out(heads("int4"), {"x": X})
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        compiled(X)
        for name, change in {"none": lambda _: None, **SCALE_CHANGES}.items():
            change(model.k.weight)
            torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4, msg=name)
            once = len(concatenated)
            compiled(X)
            assert len(concatenated) == once, name
    assert len(concatenated) == len(SCALE_CHANGES), "the first call, and each change but the last: a new weight is not adjacent"
    assert [d.taken for d in joined] == ["joined"] * 3
    assert len(wholes._gathered) > before
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(wholes._gathered) == before


def test_a_copy_that_graphs_read_follows_its_weights(monkeypatch):
    """A replayed CUDA graph runs no Python. Weights that are overwritten, or made at the same address, change its memory."""
    monkeypatch.setattr(wholes, "_gathered", {})
    monkeypatch.setattr(wholes, "_containing", {})
    weights = [QuantizedWeight.quantize(torch.randn(64, n), "int4", scales="group_32") for n in (16, 32)]
    columns = wholes.gathered([w.scales for w in weights])
    (copy_,) = wholes._gathered.values()
    copy_.captured = True
    weights[1].copy_(doubled(weights[1]))
    assert torch.equal(columns, torch.cat([w.scales for w in weights], -1))
    memory = weights[1].scales.numpy() * 2
    again = torch.from_numpy(memory)
    monkeypatch.setitem(wholes._containing, again.data_ptr(), wholes._containing[weights[1].scales.data_ptr()])
    QuantizedWeight(weights[1].tensor, again, encoding="int4")
    assert torch.equal(columns, torch.cat([weights[0].scales, again], -1))
    copy_.stays = True
    wholes.forget_gathered()
    assert wholes._gathered, "a graph that is not Inductor's may be replayed later"
    copy_.stays = False
    wholes.forget_gathered()
    weights[1].copy_(doubled(weights[1]))
    assert not wholes._gathered


@pytest.mark.turn(1, 8)
def test_graphs_of_adjacent_and_separate_weights_have_different_keys(monkeypatch):
    found: list[Any] = []
    monkeypatch.setattr(rewriting.RewriteProducts, "__call__", lambda self, graph: found.append(adjacent_inputs()))
    with torch.no_grad():
        backend.install(policy=FixedPolicy(""))
        try:
            for model in (heads(), laid_out(heads(), {"x": X})):
                torch._dynamo.reset()
                with torch._inductor.config.patch(fx_graph_cache=False):
                    torch.compile(model, fullgraph=True, dynamic=False)(X)
        finally:
            compile_pass.uninstall()
    assert adjacent_inputs() == ()
    apart, joined = found
    assert apart == ()
    assert len(joined) == 4  # of three weights and of three biases


def test_separate_weights_are_not_fused(joined):
    model = heads()
    compiled = torch.compile(model, dynamic=False, backend=rewriting_backend(FixedPolicy("alone")))
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
    assert [d.taken for d in joined] == ["alone"] * 3


@pytest.mark.turn(6, 8)
@pytest.mark.parametrize("kind", ["float", "int4"])
def test_a_fused_product_serves_any_number_of_rows(kind, joined):
    model = laid_out(heads(kind), {"x": X})
    lowering: Any = "inductor" if kind == "float" else rewriting_backend(FixedPolicy("alone"))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=lowering)
    with torch.no_grad():
        for x in (X, torch.randn(3, 7, 64), torch.randn(2, 40, 64)):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        cloned(model)
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4)
    assert [(d.taken, d.problem.n) for d in joined] == [("joined", 128)] * 3, "one graph for all"


def test_the_fused_operator_passes_torchs_checks(own_store):
    a, whole = torch.randn(3, 8), torch.randn(12, 8).t()
    problem = gemmtune.Problem.mm(3, 12, 8, dtype=torch.float32, device_type="cpu")
    with settings.patch(backends=("aten",), tune="never"):
        for pieces in (whole.split((4, 8), 1), [x.clone() for x in whole.split((4, 8), 1)]):
            arguments = ([a, *pieces], problem.key, [4, 8])
            for words in ({}, {"dynamic": True}):
                torch.library.opcheck(planned_horizontal.OPERATOR, arguments, words)
            torch.testing.assert_close(planned_horizontal.OPERATOR(*arguments), a @ whole)


class Gated(nn.Module):
    """SwiGLU of two layers, whose GEMMs share an epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


def compiled_decisions(model: nn.Module) -> tuple[Any, ...]:
    """Compile a model again, check its result, and return the decisions on its GEMMs."""
    torch._dynamo.reset()
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(model)
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-4)
    return gemmtune.explain(compiled).decisions


@pytest.mark.turn(2, 8)
def test_measured_times_decide_on_fusion(own_store, monkeypatch):
    model = Heads()
    with torch.no_grad(), settings.patch(backends=("aten",), search="quick"):
        gemmtune.optimize(model, tune={"x": X}, progress=False)
        [*first] = compiled_decisions(model)
        join = tuple((d.alone, None) for d in first)
        whole = dataclasses.replace(first[0].alone, **widened(first))
        times = dict(StoredDecisions.here(torch.device("cpu")).decide_horizontal(whole, join).times_us)
        assert times.keys() == {"apart", "joined"}
        better = times["joined"] < (1 - TIE) * times["apart"]
        assert [d.taken for d in first] == ["joined" if better else ""] * 3
        for times, saved, taken in (
            ({"apart": 50.0, "joined": 40.0}, 0.0, "joined"),
            ({"apart": 50.0, "joined": 49.9}, 0.0, ""),
            ({"apart": 50.0, "joined": 40.0}, 9.5, ""),
        ):
            monkeypatch.setattr(StoredDecisions, "_times", lambda *_, times=times: times)
            monkeypatch.setattr(StoredDecisions, "_saved_by_epilogue", lambda self, _, fused, saved=saved: saved if fused else 0.0)
            assert [d.taken for d in compiled_decisions(model)] == [taken] * 3
    gemmtune.restore(model)


def widened(decisions: Any) -> dict[str, Any]:
    """Return the fields of the Problem of all columns."""
    alone, n = decisions[0].alone, sum(d.alone.n for d in decisions)
    wide = {role: x for role in ("b", "inp", "out") if (x := getattr(alone, role)) is not None}
    wide["out"] = Layout.contiguous((alone.m, n), alone.out.dtype)
    return {role: x if role == "out" else dataclasses.replace(x, size=(*x.size[:-1], n)) for role, x in wide.items()}


@pytest.mark.turn(7, 8)
def test_a_shared_epilogue_counts_for_the_first_product(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(
        StorePolicy, "decide_horizontal", lambda _, join: seen.append(_parts(join)) or Decision(taken="", reason="seen")
    )
    with torch.no_grad(), settings.patch(backends=("aten",), tune="never"):
        backend.install()
        compiled_decisions(laid_out(Gated(), {"x": X}))
        compile_pass.uninstall()
    [(whole, pairs)] = seen
    assert (whole.n, [fused is None for _, fused in pairs]) == (128, [False, True])


@pytest.mark.turn(4, 8)
def test_fused_epilogues_are_timed_against_inductors_kernels(own_store, monkeypatch):
    alone = gemmtune.Problem.mm(10, 64, 64, dtype=torch.float32, device_type="cpu")
    fused = dataclasses.replace(alone, epilogue=trace(torch.relu, torch.float32, ()))
    with settings.patch(backends=("aten",), search="quick"):
        known = StoredDecisions.here(torch.device("cpu"))
        gemmtune.tune([alone, fused], progress=False)
        assert known._saved_by_epilogue(alone, None) == 0
        monkeypatch.setattr(StoredDecisions, "decide", lambda *_: Decision(taken="fused", reason="by its parts"))
        assert known._saved_by_epilogue(alone, fused) == math.inf
        variants = known._variants(alone, fused)
        known._rank_epilogues([(alone, fused), (alone, None)])
        assert known._times(fused, variants).keys() == {variant.variant for variant in variants}
        monkeypatch.setattr(StoredDecisions, "_times", lambda *_: {"untouched": 9.0, "alone": 8.0, "fused": 5.0})
        assert known._saved_by_epilogue(alone, fused) == 3.0


def test_problems_are_tuned_for_graphs_with_and_without_their_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, list[Any]]] = []

    def here(device: torch.device) -> Any:
        return SimpleNamespace(measure=lambda compared: measured.append((device.type, compared)))

    monkeypatch.setattr(store_policy.StoredDecisions, "here", here)
    plain = Problem.mm(4, 5, 6, dtype=torch.float32, device_type="cpu")
    fused = dataclasses.replace(plain, epilogue=trace(torch.relu, torch.float32, []))
    store_policy.tune_for_compile([plain, fused])
    assert measured == [("cpu", [(plain, None), (plain, fused)])]
