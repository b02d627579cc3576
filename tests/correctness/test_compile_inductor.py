"""Models compiled by Inductor with the pass: generated code, gradients, Inductor's cache, the backend's options, and explain."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import Block, FixedPolicy, Mlp, assert_as_good, decided, in_float64, outputs_and_gradients
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

import gemmtune
from gemmtune import settings
from gemmtune.backends.aten import BACKEND
from gemmtune.choice import Status
from gemmtune.device import PRESETS, detect
from gemmtune.integration.compile import backend, planned
from gemmtune.integration.compile.store_policy import StorePolicy
from gemmtune.integration.compile.stored_decisions import StoredDecisions
from gemmtune.integration.compile.variants import CompiledVariant
from gemmtune.integration.measured import in_models, inductor_overlaps
from gemmtune.problem.trace import trace
from gemmtune.selector.candidates import row_of
from gemmtune.selector.result import SETTLED, Outcome
from gemmtune.store.store import open_store

Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]


@pytest.fixture
def fused() -> Iterator[None]:
    """Install a policy that rewrites every GEMM with its epilogue."""
    backend.install(policy=FixedPolicy("fused"))
    with decided():
        yield
    backend.uninstall()
    assert inductor_config.post_grad_custom_post_pass is None


def rows(length: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(length)).to(dtype)


@pytest.mark.turn(4, 8)
def test_training_with_dynamic_sizes(fused):
    model = Mlp().bfloat16()
    exact, compiled = in_float64(model), torch.compile(model, fullgraph=True, dynamic=True)
    for length in (3, 8):
        x = rows(length, 24, torch.bfloat16)
        eager = outputs_and_gradients(model, list(model.parameters()), x)
        got = outputs_and_gradients(compiled, list(model.parameters()), x)
        assert_as_good(got, eager, outputs_and_gradients(exact, list(exact.parameters()), x.double()))
    decisions = gemmtune.explain(compiled)
    assert [len(graph.decisions) for graph in decisions.graphs] == [2, 4]
    assert all(d.taken for d in decisions.decisions)


@pytest.mark.turn(6, 8)
def test_the_backward_pass_copies_no_transpose_of_a_gradient(fused):
    def gated(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())

    gate, up = (rows(16, 24)[0].requires_grad_() for _ in range(2))
    _, (_, backward) = run_and_get_code(outputs_and_gradients, torch.compile(gated), [gate, up], rows(8, 24)[0])
    assert backward.count("gemmtune_extern_kernels_planned(") == 4
    assert not re.search(r"empty_strided_cpu\([^()]*\([^()]*\), \(1, ", backward)


@pytest.mark.turn(2, 8)
def test_a_transformer_block_calls_planned_products(fused):
    model = Block()
    x = rows(5, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
        got, [code] = run_and_get_code(compiled, x)
        assert_as_good([got], [model(x)], [in_float64(model)(x.double())])
    assert code.count("gemmtune_extern_kernels_planned(") == 5
    assert "extern_kernels.mm(" not in code
    assert "extern_kernels.addmm(" not in code
    text = str(gemmtune.explain(compiled))
    assert "5 of 5 GEMMs" in text
    assert "mm 10x64x32 float32 nt then mul(" in text


def test_branches_call_functions_that_their_module_imports(fused):
    def chosen(first: Tensor, x: Tensor) -> Tensor:
        return torch.cond(first, lambda x: x @ x.t(), lambda x: x.t() @ x, (x,))

    x = rows(16, 16)[0]
    with torch.no_grad():
        compiled = torch.compile(chosen, fullgraph=True)
        got, [code] = run_and_get_code(compiled, torch.tensor([False])[0], x)
    torch.testing.assert_close(got, x.t() @ x)
    assert code.count("gemmtune_extern_kernels_planned(") == 2
    assert code.count("gemmtune_extern_kernels = ") == 1
    assert code.count("gemmtune_extern_kernels.ready(") == 2


@pytest.mark.turn(6, 8)
def test_a_change_of_the_store_invalidates_cached_graphs(own_store):
    x = rows(3, 24)
    model = Mlp()

    def hits() -> int:
        torch._dynamo.reset()
        planned.forget_launches()
        before = counters["inductor"]["fxgraph_cache_hit"]
        with torch.no_grad(), inductor_config.patch(post_grad_custom_post_pass=backend.with_pass(None, StorePolicy())):
            torch.testing.assert_close(torch.compile(model)(x), model(x))
        return counters["inductor"]["fxgraph_cache_hit"] - before

    with fresh_cache(), settings.patch(backends=("aten",)), torch._functorch.config.patch(enable_autograd_cache=False):
        assert hits() == 0
        assert hits() == 1
        gemmtune.tune(gemmtune.Problem.mm(4, 4, 4, dtype=torch.float32, device_type="cpu"), progress=False)
        assert hits() == 0


def test_the_entry_point_compiles_by_inductor_with_the_pass(fused, own_store):
    [value] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"].values()
    module, name = value.split(":")
    chosen = getattr(import_module(module), name)
    options = {"epilogue_fusion": False}
    x = rows(3, 24)[0]
    with torch.no_grad():
        compiled = torch.compile(lambda x: x @ x.t(), backend=chosen, options=options)
        torch.testing.assert_close(compiled(x), x @ x.t())
    assert [d.taken for d in gemmtune.explain(compiled).decisions] == ["alone"]


@pytest.mark.turn(2, 8)
def test_a_computed_weight_serves_a_batch_of_matrices_with_gaps(fused):
    """A quantized weight that torch dequantizes, for example. One weight then serves each matrix of a batch."""
    x, weight = rows(5, 24), rows(24, 16)[0].t()
    compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w * 2), dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[:, :3], weight), x[:, :3] @ (2 * weight.t()))
    assert [(d.alone.op, d.taken) for d in gemmtune.explain(compiled).decisions] == [("bmm", "alone")]


class Square(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def square() -> Callable[[Tensor], Tensor]:
    return lambda x: x @ x.t()


def compiled_in_place() -> torch.nn.Module:
    model = Square()
    model.compile(backend=backend.gemmtune)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(Square(), backend=backend.gemmtune),
        lambda: torch.compile(square(), backend=backend.gemmtune),
        compiled_in_place,
    ],
    ids=["modules of one class", "functions of one statement", "in place"],
)
def test_explain_distinguishes_functions_and_modules_that_share_code(fused, make):
    made = [make() for _ in range(2)]
    for width, compiled in zip((24, 40), made, strict=True):
        compiled(rows(3, width)[0])
    decisions = [[d.alone.k for d in gemmtune.explain(compiled).decisions] for compiled in made]
    assert decisions == [[24], [40]]


@pytest.mark.turn(0, 8)
def test_the_fastest_measured_variant_of_a_gemm_runs(own_store):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(approximate="tanh")), rows(8, 64)[0]
    decisions = []
    # A graph out of the cache of an earlier run would decide nothing.
    no_cache = inductor_config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with (
        torch.no_grad(),
        settings.patch(backends=("aten", "cpp"), search="quick", max_profiling_configs=1),
        no_cache[0],
        no_cache[1],
    ):
        for tunes in (False, True, False):
            torch._dynamo.reset()
            with inductor_config.patch(post_grad_custom_post_pass=backend.with_pass(None, StorePolicy(tunes=tunes))):
                compiled = torch.compile(model)
                torch.testing.assert_close(compiled(x), model(x))
            decisions += gemmtune.explain(compiled).decisions
    assert [(decisions[0].taken, decisions[0].reason), decisions[1]] == [("", "not tuned"), decisions[2]]
    times = dict(decisions[1].times_us)
    if "torch alone" in times:  # the separate times decided
        assert decisions[1].taken == "fused"
        assert times["fused"] <= min(0.95 * times["torch alone"], 1.02 * times["alone"])
    elif times:  # ours was a pick, and the variants were compared
        best = min(times, key=times.__getitem__)
        assert "untouched" in times
        assert decisions[1].taken == ("" if times[best] > 0.98 * times["untouched"] else best)
    else:
        assert decisions[1].reason == "torch's own is as fast"


@pytest.mark.parametrize(
    ("torch_us", "alone_us", "fused_us", "taken"),
    [(10.0, 8.0, 8.1, "fused"), (10.0, 8.0, 8.3, "alone"), (8.4, 8.0, 8.1, "alone"), (8.0, 9.0, 7.0, "")],
)
def test_separate_times_decide_where_fusing_must_pay(own_store, torch_us, alone_us, fused_us, taken):
    """A fused choice that beats torch's GEMM without the epilogue is not compared with Inductor's kernel."""
    alone = gemmtune.Problem.addmm(6, 8, 5, dtype=torch.float32, device_type="cpu")
    fused = dataclasses.replace(alone, epilogue=trace(torch.relu, torch.float32, ()))
    with settings.patch(backends=("aten", "cpp"), max_profiling_configs=1) as chosen:
        known = StoredDecisions(device=detect("cpu"), settings=chosen, store=open_store(chosen))
        for problem, ours_us in ((alone, alone_us), (fused, fused_us)):
            candidates = known._candidates(problem)
            rows = [
                row_of(
                    Outcome(
                        name=choice.name, backend=choice.backend, content_hash=digest, baseline=choice.baseline, status=Status.OK,
                        time_us=torch_us if choice.baseline else ours_us, finalist=True, info={SETTLED: True},
                    ),
                    problem, candidates.fingerprint,
                )
                for digest, choice in candidates.choices.items()
            ]  # fmt: skip
            known.store.put(rows)
        known._found.clear()
        decision = known.decide(alone, fused)
    assert (decision.taken, "fused" in dict(decision.times_us)) == (taken, taken == "fused")


def test_explain_reports_an_uncompiled_function():
    assert "no graph was compiled" in str(gemmtune.explain(torch.compile(lambda x: x + 1)))
    with pytest.raises(gemmtune.InvalidProblemError, match="in addition to a compiled function"):
        gemmtune.explain(torch.compile(torch.mm), torch.ones(2, 2))


def test_the_planned_operator_passes_torchs_checks():
    a, b, c = torch.randn(3, 5), torch.randn(5, 4), torch.randn(3, 4)
    problem = gemmtune.Problem.addmm(3, 4, 5, dtype=torch.float32, bias="mn", layout="nn", device_type="cpu")
    with settings.patch(backends=("aten",), tune="never"):
        torch.library.opcheck(planned.OPERATOR, ([a, b, c], problem.key), {"alpha": 1.0, "beta": 1.0})
        torch.testing.assert_close(planned.OPERATOR([a, b, c], problem.key), torch.addmm(c, a, b))


def variant_of(alone: gemmtune.Problem, problem: gemmtune.Problem, **options: Any) -> CompiledVariant:
    [claims] = {choice.claims for choice in BACKEND.enumerate(alone, detect("cpu"), settings.current()).choices}
    return CompiledVariant(name="variant", backend="compiled", problem=problem, claims=claims, runs=(), alone=alone, **options)


@pytest.mark.turn(6, 8)
@pytest.mark.parametrize("variant", ["untouched", "alone"])
def test_timed_variants_write_into_out(variant):
    alone = gemmtune.Problem.addmm(6, 8, 5, dtype=torch.float32, device_type="cpu")
    a, b, c, out = torch.randn(6, 5), torch.randn(8, 5).t(), torch.randn(8), torch.empty(6, 8)
    epilogue = trace(torch.relu, torch.float32, ())
    chosen = variant_of(alone, dataclasses.replace(alone, epilogue=epilogue), variant=variant)
    with settings.patch(backends=("aten",), tune="never"):
        chosen._compiled(into_out=True)([out, a, b, c])
        torch.testing.assert_close(out, torch.relu(torch.addmm(c, a, b)))


@pytest.mark.turn(3, 8)
@pytest.mark.parametrize(("preset", "pdl", "overlapping"), [("sm90", True, True), ("sm90", False, False), ("sm80", True, False)])
def test_timing_overlaps_kernels_only_if_inductors_do(preset, pdl, overlapping):
    with inductor_config.patch({"triton.enable_pdl": pdl}):
        assert in_models(settings.current(), PRESETS[preset]).timing == ("graph" if overlapping else "spaced")
        assert in_models(settings.current(), detect("cpu")).timing == "graph"
        assert inductor_overlaps(PRESETS[preset]) == overlapping
    alone = gemmtune.Problem.mm(6, 8, 5, dtype=torch.float32, device_type="cpu")
    chosen = variant_of(alone, alone, variant="untouched", overlapping=overlapping)
    assert (chosen.content_hash != dataclasses.replace(chosen, overlapping=False).content_hash) == overlapping
    seen: list[bool] = []

    def note(graph: torch.fx.Graph) -> None:
        seen.append(inductor_config.triton.enable_pdl)

    with inductor_config.patch({"post_grad_custom_pre_pass": note}), fresh_cache():
        chosen._compiled(into_out=True)
    assert seen == [overlapping]
