"""Attention of one query in compiled graphs: what is replaced, and its numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import FixedPolicy
from processes import Run
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError

from gemmtune import settings
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.errors import InvalidProblemError
from gemmtune.integration.compile import attention_times
from gemmtune.integration.compile.attention import MOST_GROUP, MOST_WIDTH, Attention, Config, _is_served, attention_of
from gemmtune.integration.compile.planned_attention import OPERATOR, composition
from gemmtune.integration.compile.report import CompiledExplanation, Taken, _graphs
from gemmtune.integration.compile.rewriting import RewriteProducts
from gemmtune.integration.compile.store_policy import StorePolicy
from gemmtune.passes import load
from gemmtune.store.key import fingerprint_text
from gemmtune.store.row import Row
from gemmtune.store.store import Store, open_store
from gemmtune.timing.contenders import CpuContender

Tensor = torch.Tensor

MASKS = ("none", "causal", "all masked", "heads")
CASES = [
    (heads, group, keys, width, mask)
    for (heads, group, keys, width), mask in itertools.product([(8, 4, 96, 64), (3, 1, 70, 80), (6, 6, 33, 16)], MASKS)
]
"""Query heads, those that share a head of the keys, keys, width of a head, mask."""


def operands(case: tuple[int, int, int, int, str], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return query, keys, values and bias. The query is a transposed view, and the cache is longer than its keys."""
    heads, group, keys, width, mask = case
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn((2, 1, heads, width), generator=generator).transpose(1, 2)
    k, v = (torch.randn((2, heads // group, keys + 5, width), generator=generator)[:, :, :keys] for _ in "kv")
    bias = torch.zeros(2, 1, 1, keys)
    if mask == "causal":
        bias[..., keys // 2 :] = float("-inf")
    elif mask == "all masked":
        bias[0] = float("-inf")
    elif mask == "heads":
        bias = torch.randn((1, heads, 1, keys), generator=generator)
    found = [q, k, v] if mask == "none" else [q, k, v, bias]
    return [x.to(device, dtype) for x in found]


def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the attention in float64. A query whose keys are all masked has the result 0."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    found = F.scaled_dot_product_attention(q.double(), k, v, attn_mask=None if bias is None else bias.double())
    masked = torch.zeros((), dtype=torch.bool, device=q.device) if bias is None else bias.isneginf().all(-1, keepdim=True)
    return torch.where(masked, 0.0, found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_composition_is_attention(case: tuple[int, int, int, int, str]) -> None:
    given = operands(case)
    torch.testing.assert_close(composition(*given, scale=case[3] ** -0.5).double(), exact(*given), atol=1e-5, rtol=1e-5)


def wrong_by_the_kernels() -> list[object]:
    """Return the cases whose error is not of rounding alone. Runs where Triton interprets."""
    from gemmtune.passes.attention import attend

    wrong: list[object] = []
    with mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        for case, (splits, block) in itertools.product(CASES, [(1, 32), (4, 16), (3, 64)]):
            q, k, v, bias = (*operands(case), None)[:4]
            out = torch.full((*q.shape,), float("nan"))
            attend(q, k, v, bias, out, scale=case[3] ** -0.5, splits=splits, block=block, warps=4)
            error = float((out.double() - exact(*operands(case))).abs().max())
            wrong += [] if error < 1e-5 else [(case, splits, block, error)]
    return wrong


@pytest.mark.turn(0, 8)
def test_the_kernels_are_attention(interpreted: Run) -> None:
    assert interpreted(wrong_by_the_kernels) == []


class Watching(RewriteProducts):
    """The pass, which keeps the targets of the rewritten graph."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        self.targets = [node.target for node in graph.nodes]

    def uuid(self) -> None:
        """Return no key, so that Inductor's cache keeps no graph."""


def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    """Return what a model of transformers computes: repeated heads, attention, heads side by side."""
    group = q.shape[1] // k.shape[1]
    batch, heads, keys, width = k.shape
    dim = how.pop("dim", 2)
    if group > 1 and dim == 2:
        k, v = (x[:, :, None].expand(batch, heads, group, keys, width).reshape(batch, heads * group, keys, width) for x in (k, v))
    elif group > 1:  # another order of the heads
        k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how).transpose(1, 2).reshape(batch, q.shape[2], -1)


def compiled(*given: Tensor, policy: Any = None, **how: Any) -> tuple[Tensor, Watching]:
    watching = Watching(policy or FixedPolicy("alone"))
    with torch.no_grad():
        chosen = torch.compile(step, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": watching})
        return chosen(*given, **how), watching


@pytest.mark.turn(4, 8)
def test_a_graph_runs_ours_without_repeating_heads() -> None:
    q, k, v, bias = operands((8, 4, 96, 64, "causal"))
    got, watching = compiled(q, k, v, bias)
    assert OPERATOR in watching.targets
    assert torch.ops.aten.expand.default not in watching.targets
    text = str(CompiledExplanation(graphs=(_graphs[-1],)))
    assert text.startswith("graph 0: 1 of 1 attentions\n   attention 2x8x1x64 float32 over 96 keys of 2 heads: attend_")
    torch.testing.assert_close(got.double(), exact(q, k, v, bias).transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)


def found_in(*given: Tensor, **how: Any) -> list[Attention]:
    """Return the attention that is found in a graph of ``step``, for which Inductor then generates no code."""
    graphs: list[fx.Graph] = []

    class Finding(Watching):
        def __call__(self, graph: fx.Graph) -> None:
            graphs.append(graph)
            raise NotImplementedError("only its graph is wanted")

    options = {"post_grad_custom_post_pass": Finding(FixedPolicy(""))}
    with torch.no_grad(), pytest.raises(InductorError, match="only its graph is wanted"):
        torch.compile(step, fullgraph=True, dynamic=False, options=options)(*given, **how)
    return [x for graph in graphs for x in attention_of(graph.nodes)]


@pytest.mark.turn(5, 8)
def test_what_is_found_and_what_stays_torchs() -> None:
    q, k, v, bias = operands((8, 4, 96, 64, "causal"))
    (found,) = found_in(q, k, v, bias)
    assert str(found) == "attention 2x8x1x64 float32 over 96 keys of 2 heads"
    assert [tuple(x.shape) for x in found.values] == [(2, 8, 1, 64), (2, 2, 96, 64), (2, 2, 96, 64), (2, 1, 1, 96)]
    (found,) = found_in(q, k, v, scale=2.0)
    assert (len(found.tensors), found.scale) == (3, 2.0)
    (found,) = found_in(q, k, v, bias, dim=1)  # heads that are repeated in another order are read as they are
    assert found.values[1].shape == (2, 8, 96, 64)
    assert found_in(torch.cat([q, q], 2), k, v, bias) == []
    assert found_in(q, k, v, is_causal=True) == []


@pytest.mark.turn(0, 8)
def test_a_graph_for_any_number_of_keys_runs_ours() -> None:
    given = operands((8, 4, 96, 64, "causal"))
    q, k, v, bias = given
    for x, dim in ((k, 2), (v, 2), (bias, 3)):
        torch._dynamo.mark_dynamic(x, dim)
    watching = Watching(FixedPolicy("alone"))
    with torch.no_grad():
        chosen = torch.compile(step, fullgraph=True, options={"post_grad_custom_post_pass": watching})
        for keys in (96, 40):
            got = chosen(q, k[:, :, :keys], v[:, :, :keys], bias[..., :keys])
            expected = exact(q, k[:, :, :keys], v[:, :, :keys], bias[..., :keys])
            torch.testing.assert_close(got.double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
    assert OPERATOR in watching.targets
    assert torch.ops.aten.expand.default not in watching.targets
    with pytest.raises(InvalidProblemError, match="expected equal shapes"):
        OPERATOR([q, k, v[:, :, :-1], bias], scale=1.0, splits=1, block=64, warps=4)
    # Where heads are dynamic too, torch's operator stays.
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(step, dynamic=True, options={"post_grad_custom_post_pass": watching})(*given)
    torch.testing.assert_close(got.double(), exact(*given).transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
    assert OPERATOR not in watching.targets


def attention(batch: int = 1, heads: int = 8, keys: int = 96, group: int = 4) -> Attention:
    """Return attention that no graph computes, with ``group`` query heads for a head of the keys."""
    node = fx.Graph().call_function(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    tensors = []
    for size in ((batch, group * heads, 1, 64), (batch, heads, keys, 64), (batch, heads, keys, 64)):
        tensors.append(node.graph.placeholder("x"))
        tensors[-1].meta["val"] = torch.empty(size)
    node.args = tuple(tensors)
    return Attention(node=node, tensors=tuple(tensors), scale=1.0)


def test_the_configs_fill_a_gpu() -> None:
    def splits(*sizes: int) -> set[int]:
        return {config.splits for config in attention(*sizes).configs(mock.Mock(sm_count=132))}

    assert splits(1, 8, 4096) == {8, 16, 32}
    assert max(splits(1, 1, 100)) == 4  # no part of the keys is empty
    assert splits(64, 32, 512) == {1}


@pytest.mark.parametrize(
    ("times", "taken", "reason"),
    [
        ({}, "", "not tuned"),
        ({"torch": 10.0}, "", "no kernel of ours ran"),
        ({"torch": 10.0, "ours": 9.9}, "", "torch's own is as fast"),
        ({"torch": 10.0, "another version's": 1.0}, "", "no kernel of ours ran"),
        ({"torch": 10.0, "ours": 5.0}, "alone", "faster than torch's own"),
    ],
    ids=str,
)
def test_the_stored_times_decide(times: dict[str, float], taken: Taken, reason: str) -> None:
    device, store, asked = detect("cpu"), Store(), attention()
    name = str(asked.configs(device)[-1])
    common: Any = {"key": asked.key, "fingerprint": fingerprint_text(device, "graph"), "backend": "attention", "status": Status.OK}
    names = {given: name if given == "ours" else given for given in times}
    store.put(Row(name=names[x], content_hash=names[x], time_us=time_us, **common) for x, time_us in times.items())
    decision = attention_times.decide(asked, device, "graph", store, by_rule=False)
    assert (decision.taken, decision.reason.partition(",")[0]) == (taken, reason)
    assert str(decision.config) == (name if taken else "None")


@pytest.fixture
def gpu_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let a CPU serve, as if it had streams and graphs of calls."""
    pytest.importorskip("triton", reason="the kernels' module is loaded")
    monkeypatch.setattr(attention_times, "serves", lambda device: True)
    monkeypatch.setattr(attention_times, "GraphContender", lambda calls, stream, sample_us: CpuContender(calls))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return monkeypatch


@pytest.mark.turn(7, 8)
def test_a_tuned_graph_has_verified_and_timed_configs(gpu_on_a_cpu: pytest.MonkeyPatch) -> None:
    """Tune on a CPU. One config is wrong, and one does not fit."""
    monkeypatch = gpu_on_a_cpu
    monkeypatch.setattr(Attention, "configs", lambda self, device: [Config(splits=x, block=64, warps=4) for x in (1, 2, 3)])
    right = attention_times._Operands.error_over_bound

    def error_over_bound(self: Any, config: Config) -> float:
        if config.splits == 2:
            raise load("attention").OutOfResources(300_000, 200_000, "shared memory")
        return right(self, config) if config.splits == 1 else float("nan")

    monkeypatch.setattr(attention_times._Operands, "error_over_bound", error_over_bound)
    given = operands((8, 4, 96, 64, "causal"))
    compiled(*given, policy=StorePolicy(tunes=True))
    rows = {row.name: row for row in open_store(settings.current()).every_row() if row.backend == attention_times.BACKEND_NAME}
    assert {name: row.status for name, row in rows.items()} == {
        "torch": Status.OK,
        "attend_s1_b64_w4": Status.OK,
        "attend_s2_b64_w4": Status.OUT_OF_RESOURCES,
        "attend_s3_b64_w4": Status.WRONG_RESULT,
    }
    assert "got an error of nan bounds" in rows["attend_s3_b64_w4"].reason
    assert "shared memory" in rows["attend_s2_b64_w4"].reason


@pytest.mark.parametrize(("graphs", "group", "ratio"), [(True, 4, 0.5), (True, 1, 0.5), (False, 4, 0.5), (True, 4, 2.0)], ids=str)
def test_shared_heads_run_ours_by_rule(
    graphs: bool, group: int, ratio: float, gpu_on_a_cpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu_on_a_cpu.setattr(attention_times, "_verified_configs", {})
    gpu_on_a_cpu.setattr(attention_times._Operands, "error_over_bound", lambda self, config: ratio)
    asked = attention(group=group)
    with settings.patch(store_path=tmp_path / "store.sqlite"), inductor_config.patch({"triton.cudagraphs": graphs}):
        decision = StorePolicy().decide_attention(asked)
        tuned = StorePolicy(tunes=True).decide_attention(asked)
    assert decision is not None
    taken = graphs and group > 1 and ratio <= 1
    assert (decision.taken, decision.reason.rpartition(": ")[2]) == (
        ("alone", "by rule, verified here, not measured") if taken else ("", "not tuned")
    )
    assert decision.config == (asked.configs(detect("cpu"))[0] if taken else None)
    assert tuned is not None
    assert dict(tuned.times_us)["torch"] > 0, "times replace the rule"


def test_a_cpu_and_a_disabled_library_keep_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StorePolicy().decide_attention(attention()) is None
    monkeypatch.setattr(attention_times, "serves", lambda device: True)
    decision = StorePolicy().decide_attention(attention())
    assert decision is not None
    assert decision.reason == "not tuned"
    with settings.patch(disable=True):
        assert StorePolicy().decide_attention(attention()) is None


@pytest.mark.parametrize(
    ("policy", "setting", "layer", "ratio", "taken"),
    [
        (StorePolicy(tunes=True), True, False, 0.5, True),
        (StorePolicy(tunes=True), False, True, 0.5, True),
        (FixedPolicy(""), False, True, 0.5, True),
        (FixedPolicy(""), False, True, 2.0, False),
        (FixedPolicy(""), False, False, 0.5, False),
    ],
    ids=["setting", "layer", "joins", "wrong", "ordinary"],
)
def test_the_batch_does_not_decide_how_keys_are_divided(
    policy: Any, setting: bool, layer: bool, ratio: float, taken: bool, gpu_on_a_cpu: pytest.MonkeyPatch
) -> None:
    """The setting asks for it, and so does a layer of ``optimize(batch_invariant=True)`` in the graph, which needs no setting."""
    gpu_on_a_cpu.setattr(attention_times, "_verified_configs", {})
    gpu_on_a_cpu.setattr(attention_times._Operands, "error_over_bound", lambda self, config: ratio)
    found: list[Config | None] = []

    class Finding(Watching):
        def __call__(self, graph: fx.Graph) -> None:
            found.extend(attention.config_for_any_batch for attention in attention_of(graph.nodes))
            super().__call__(graph)
            raise NotImplementedError("only its graph is wanted")

    def layers(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.ops.gemmtune.invariant_linear(x, weight, None, True) if layer else x * 2
        return step(y.reshape(2, -1, 1, 64), k, v)

    given = torch.ones(2, 512), torch.ones(512, 512), torch.ones(2, 2, 700, 64), torch.ones(2, 2, 700, 64)
    with settings.patch(batch_invariant=setting), torch.no_grad(), pytest.raises(InductorError, match="only its graph"):
        torch.compile(layers, fullgraph=True, options={"post_grad_custom_post_pass": Finding(policy)})(*given)
    (decision,) = (x for x in _graphs[-1].decisions if x.attention)
    assert found == [Config(splits=8, block=64, warps=4)]
    assert (decision.taken, decision.pick, decision.times_us) == (*(("alone", str(found[0])) if taken else ("", None)), ())
    assert ("batch_invariant" in decision.reason) == (setting or layer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_sequence_has_its_bits_in_any_batch_on_a_gpu(dtype: torch.dtype) -> None:
    for heads, group, keys, width in ((32, 4, 2048, 128), (16, 2, 700, 256), (8, 8, 90, 64)):
        q, k, v, bias = operands((heads, group, keys, width, "heads"), "cuda", dtype)
        q, k, v = (torch.cat([x, x.flip(-1), x.roll(1, -1), -x] * 3) for x in (q, k, v))
        numbers = {"scale": width**-0.5, "splits": min(8, -(-keys // 64)), "block": 64, "warps": 4}
        whole = OPERATOR([q, k, v, bias], **numbers)
        for begin, end in ((0, 1), (5, 6), (3, 10), (len(q) - 1, len(q))):
            part = OPERATOR([*(x[begin:end] for x in (q, k, v)), bias], **numbers)
            assert torch.equal(part, whole[begin:end]), (heads, keys, begin)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_are_attention_on_a_gpu(dtype: torch.dtype) -> None:
    for case in [*CASES, (16, 2, 512, 256, "causal"), (64, 64, 300, 128, "heads"), (32, 4, 512, 128, "none")]:
        given = operands(case, "cuda", dtype)
        bound = attention_times.BOUND * torch.finfo(dtype).eps * float(given[2].abs().max())
        for splits, block, warps in ((1, 32, 4), (3, 64, 8), (16, 16, 2)):
            got = OPERATOR(given, scale=case[3] ** -0.5, splits=splits, block=block, warps=warps)
            assert float((got.double() - exact(*given)).abs().max()) <= bound, (case, splits, block)


@pytest.mark.gpu
def test_a_tuned_graph_runs_the_fastest_correct_config_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands((32, 4, 512, 128, "causal"), "cuda", torch.bfloat16)
    right = attention_times._Operands.error_over_bound
    monkeypatch.setattr(  # some configs are wrong
        attention_times._Operands, "error_over_bound", lambda self, config: right(self, config) + 2 * (config.block == 32)
    )
    got, watching = compiled(*given, policy=StorePolicy(tunes=True))
    torch.testing.assert_close(got.double(), exact(*given).transpose(1, 2).flatten(2), atol=2e-2, rtol=2e-2)
    assert OPERATOR in watching.targets
    rows = [row for row in open_store(settings.current()).every_row() if row.backend == attention_times.BACKEND_NAME]
    statuses = {row.name: row.status for row in rows if row.name != attention_times.TORCH}
    assert {status for name, status in statuses.items() if "_b32_" in name} == {Status.WRONG_RESULT}
    assert {status for name, status in statuses.items() if "_b64_" in name} == {Status.OK}
    again, stored = compiled(*given, policy=StorePolicy())
    assert OPERATOR in stored.targets
    assert torch.equal(got, again)


@pytest.mark.gpu
def test_a_captured_graph_runs_ours_on_a_gpu() -> None:
    given = operands((32, 4, 512, 128, "causal"), "cuda", torch.bfloat16)
    with torch.no_grad():
        chosen = torch.compile(step, dynamic=False, options={"post_grad_custom_post_pass": Watching(FixedPolicy("alone"))})
        expected = chosen(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chosen(*given)
    got.zero_()
    graph.replay()
    assert torch.equal(got, expected)


@pytest.mark.gpu
def test_an_untuned_captured_graph_runs_ours_by_rule_on_a_gpu() -> None:
    q, k, v, bias = operands((32, 4, 512, 128, "causal"), "cuda", torch.bfloat16)
    watching = Watching(StorePolicy())
    options = {"post_grad_custom_post_pass": watching, "triton.cudagraphs": True}
    for x, dim in ((k, 2), (v, 2), (bias, 3)):
        torch._dynamo.mark_dynamic(x, dim)
    with torch.no_grad():
        chosen = torch.compile(step, fullgraph=True, options=options)
        for keys in (512, 200):
            given = (q, k, v, bias) if keys == 512 else (q, k[:, :, :keys], v[:, :, :keys], bias[..., :keys])
            got = chosen(*given).clone()
            torch.testing.assert_close(got.double(), exact(*given).transpose(1, 2).flatten(2), atol=2e-2, rtol=2e-2)
    assert OPERATOR in watching.targets


def test_kernels_serve_one_query_of_each_sequence() -> None:
    def served(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], change: Callable[..., Any] = lambda *x: x) -> bool:
        return _is_served(list(change(*(torch.empty(size) for size in (q, k, v)))))

    q, k, of_one, wide = (2, 8, 1, 64), (2, 2, 16, 64), (2, 1, 16, 64), MOST_WIDTH + 1
    assert served(q, k, k)
    assert served((2, MOST_GROUP, 1, 64), of_one, of_one)
    assert served((2, 8, 1, MOST_WIDTH), *[(2, 2, 1, MOST_WIDTH)] * 2)
    assert served(q, k, k, lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v))
    refused = {
        "no sequence": ((0, 8, 1, 64), (0, 2, 16, 64), (0, 2, 16, 64)), "no key": (q, (2, 2, 0, 64), (2, 2, 0, 64)),
        "no head": (q, (2, 0, 16, 64), (2, 0, 16, 64)), "two queries": ((2, 8, 2, 64), k, k), "other keys": (q, k, (2, 2, 17, 64)),
        "wide": ((2, 8, 1, wide), *[(2, 2, 16, wide)] * 2), "three heads of eight": (q, *[(2, 3, 16, 64)] * 2),
        "many of one": ((2, MOST_GROUP + 1, 1, 64), of_one, of_one), "other width": (q, k, (2, 2, 16, 32)),
        "no batch": (q[1:], k[1:], k[1:]),
    }  # fmt: skip
    assert {name: served(*sizes) for name, sizes in refused.items()} == dict.fromkeys(refused, False)
    assert not served(q, k, k, lambda q, k, v: (q, k.bfloat16(), v))
    assert not served(q, k, k, lambda q, k, v: (q, k, torch.empty(2, 2, 64, 16).mT))
