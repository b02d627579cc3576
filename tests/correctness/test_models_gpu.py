"""Models on a GPU: operators, compiled graphs and quantized layers, as far as a GPU makes a difference."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from compiled_graphs import Block, FixedPolicy, Mlp, assert_as_good, in_float64, outputs_and_gradients
from rotation import rotated
from test_operators import DIFFERENTIABLE, arguments
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.library import opcheck

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.integration.adjacent import alike_siblings, lay_out
from gemmtune.integration.compile import backend, install, planned, uninstall
from gemmtune.integration.defaults import joinable
from gemmtune.operators.library import OPERATORS
from gemmtune.passes.float8_rows import LEAST_CAPABILITY, serves
from gemmtune.quantized.products import rows_in_float8
from gemmtune.toolchain.kept import kept

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def quick(own_store):
    torch._dynamo.reset()
    with settings.patch(search="quick", backends=("aten", "triton")):
        yield
    torch._dynamo.reset()


NARROW = {"int_mm", "int_mm_mul", "scaled_mm", "scaled_grouped_mm"}
"""torch refuses the few rows of the arguments for these on a GPU; the CPU's tests have them."""


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in NARROW])
def test_torch_accepts_the_operator(name):
    tensors, words = arguments(name, grad=name in DIFFERENTIABLE)
    on_gpu = tuple(x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors)
    with settings.patch(tune="never"):
        opcheck(getattr(torch.ops.gemmtune, name).default, on_gpu, words)


@pytest.mark.slow
def test_calls_under_transforms_are_torchs():
    a, b = torch.randn(32, 64, device="cuda"), torch.randn(64, 48, device="cuda")
    gemmtune.mm(a, b)
    want = a @ b
    assert torch.allclose(torch.func.functionalize(gemmtune.mm)(a, b), want, atol=1e-3)
    assert torch.allclose(torch.func.vmap(gemmtune.mm, in_dims=(0, None))(a[None], b)[0], want, atol=1e-3)
    assert torch.allclose(torch.func.grad(lambda x: gemmtune.mm(x, b).sum())(a), b.sum(1).expand_as(a), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", rotated([None, "reduce-overhead"], 2, "training"))
def test_a_block_trains_as_compiled(mode):
    """Every GEMM is tuned while the graph compiles, forward and backward."""
    model = Block(width=128).cuda().to(BF16)
    x = torch.randn(2, 64, 128, device="cuda", dtype=BF16)
    install(tune=True)
    try:
        compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        for _ in range(3):  # a graph of CUDA is captured by the second call
            got = [y.clone() for y in outputs_and_gradients(compiled, list(model.parameters()), x)]
    finally:
        uninstall()
    eager = outputs_and_gradients(model, list(model.parameters()), x)
    truth_model = in_float64(model)
    exact = outputs_and_gradients(truth_model, list(truth_model.parameters()), x.double())
    assert_as_good(got, eager, exact)
    graphs = gemmtune.explain(compiled).graphs
    assert sum(len(graph.decisions) for graph in graphs) == 5 + 2 * 5


def test_an_optimized_model_is_captured():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda().to(BF16)
    x = torch.randn(16, 256, device="cuda", dtype=BF16)
    with torch.no_grad():
        want = model(x)
        gemmtune.optimize(model, tune=x, progress=False)
        try:
            model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = model(x)
            graph.replay()
            torch.cuda.synchronize()
        finally:
            gemmtune.restore(model)
    assert torch.allclose(got, want, atol=2e-2, rtol=2e-2)


class Heads(nn.Module):
    """Three layers that read one input, and what reads their results."""

    def __init__(self, inputs: int = 256, widths: tuple[int, ...] = (256, 64, 64)) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, n, bias=False) for n in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k(x)
        return (self.q(x).unflatten(-1, (-1, k.shape[-1])) * k[..., None, :]).tanh().sum(-2) * self.v(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "mode", "kind"),
    rotated([*itertools.product([1, 16], [None, "reduce-overhead"], ["float", "int4"])], 3, "joined layers"),
)
def test_layers_of_one_input_are_one_product(kind, mode, rows):
    model, x = Heads().to("cuda", BF16), torch.randn(rows, 256, device="cuda", dtype=BF16)
    if kind == "int4":
        gemmtune.quantize_(model, kind, group=64)
    with torch.no_grad():
        gemmtune.optimize(model, tune=x, progress=False)
        expected = model(x)
        measured = torch.compile(model)
        torch.testing.assert_close(measured(x), expected, rtol=3e-2, atol=3e-2)
        assert all(
            {"apart", "joined"} <= dict(d.times_us).keys() for d in gemmtune.explain(measured).decisions if d.taken == "joined"
        )
        gemmtune.restore(model)
        torch._dynamo.reset()
        backend.install(policy=FixedPolicy("alone"))
        with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
            compiled = torch.compile(model, mode=mode)
            for _ in range(4):
                torch.testing.assert_close(compiled(x).clone(), expected, rtol=3e-2, atol=3e-2)
        uninstall()
        assert [d.taken for d in gemmtune.explain(compiled).decisions] == ["joined"] * 3
        if kind == "float":
            model.k.weight.data = model.k.weight.data.clone() * 2
            for _ in range(4):
                torch.testing.assert_close(compiled(x).clone(), model(x), rtol=3e-2, atol=3e-2)


def places(model: nn.Module) -> list[int]:
    return [getattr(x, "tensor", x).data_ptr() for x in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "mode", "kind"),
    rotated([*itertools.product([1, 16], [None, "reduce-overhead"], ["float", "int4", "int8"])], 3, "layers joined unmeasured"),
)
def test_layers_of_one_input_are_one_product_without_inputs(kind, mode, rows):
    """The model is not run, and nothing is timed. Where floats have no default tables, their weights stay where they are."""
    torch.manual_seed(0)
    model, x = Heads(4096, (4096, 1024, 1024)).to("cuda", BF16), torch.randn(rows, 4096, device="cuda", dtype=BF16)
    model.out = nn.Linear(4096, 1024, bias=False, device="cuda", dtype=BF16)
    if kind != "float":
        gemmtune.quantize_(model, kind)
    before, weights = places(model), [x.dequantize() if kind != "float" else x.detach().clone() for x in model.parameters()]
    no_cache = inductor_config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with torch.no_grad(), settings.patch(backends=("aten", "triton", "cuda"), rows="shared"), no_cache[0], no_cache[1]:
        moves = bool(joinable(model))
        assert moves or kind == "float"
        gemmtune.optimize(model, progress=False)
        moved = places(model)
        assert (moved != before) is moves
        assert joinable(model) == []
        for x_now, y in zip(model.parameters(), weights, strict=True):
            assert torch.equal(x_now.dequantize() if kind != "float" else x_now, y)
        expected = model(x)
        compiled = torch.compile(model, mode=mode)
        for _ in range(4):
            torch.testing.assert_close(compiled(x).clone(), expected, rtol=5e-2, atol=5e-2)
        decisions = gemmtune.explain(compiled).decisions
        assert [d.taken == "joined" for d in decisions] == [moves] * 3, "\n".join(map(str, decisions))
        assert all("not measured" in d.reason for d in decisions if moves)
        gemmtune.optimize(model, progress=False)
        assert places(model) == moved, "a second time nothing moves"
        if kind == "float":
            model.k.weight.data = model.k.weight.data.clone()
            for _ in range(4):
                torch.testing.assert_close(compiled(x).clone(), expected, rtol=5e-2, atol=5e-2)
        gemmtune.restore(model)


@pytest.mark.slow
def test_graphs_with_joined_layers_are_found_by_the_next_program():
    """The compilation of a graph stores tables for its joined layers, and these do not change the key of the graph."""
    model, x = Heads(4096, (4096, 1024, 1024)).to("cuda", BF16), torch.randn(1, 4096, device="cuda", dtype=BF16)
    gemmtune.quantize_(model, "int8")
    found = []
    with torch.no_grad(), settings.patch(backends=("aten", "triton", "cuda"), rows="shared"), fresh_cache():
        gemmtune.optimize(model, progress=False)
        for _ in range(2):
            torch._dynamo.reset()
            before = counters["inductor"]["fxgraph_cache_hit"]
            torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=5e-2, atol=5e-2)
            found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
        gemmtune.restore(model)
    assert found == [0, 1]


def test_moves_leave_half_of_the_free_memory(monkeypatch, caplog):
    """Nothing moves where memory is short. Afterwards the old weights' memory is free for other programs."""
    model = nn.ModuleList([Heads(4096, (4096, 4096, 4096)) for _ in range(4)])
    for layer in reversed(list(model.modules())):  # in the other order the allocator may lay them out as one group already
        layer.to("cuda", BF16)
    torch.cuda.empty_cache()
    reserved, before = torch.cuda.memory_reserved(), places(model)
    groups = alike_siblings(model)
    with monkeypatch.context() as patched, caplog.at_level("INFO", "gemmtune"):
        patched.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 1))
        assert not lay_out(model, groups)
    assert "4 groups of weights stay apart" in caplog.text
    assert places(model) == before
    assert lay_out(model, groups)
    assert places(model) != before
    assert torch.cuda.memory_reserved() - reserved <= 3 * 4096 * 4096 * 2, "no more than the memory of one group"


class Columns(Heads):
    """The same layers, whose results have the bits of the products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q(x), self.k(x), self.v(x)), -1)


def halved(weight):
    """Return a weight of the same kind with half the values."""
    if not isinstance(weight, QuantizedWeight):
        return weight / 2
    return weight.map_parts(lambda part: part / 2 if part.is_floating_point() else part)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float", "int4"])
def test_batch_invariant_layers_are_one_product_in_graphs(kind, monkeypatch):
    """Eager calls, graphs of Inductor and those of the program give equal bits, also after a weight is overwritten."""
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 16)
    model, x = Columns().to("cuda", BF16), torch.randn(16, 256, device="cuda", dtype=BF16)
    if kind == "int4":
        gemmtune.quantize_(model, kind, group=64)
    with (
        torch.no_grad(),
        settings.patch(backends=("aten", "triton", "cuda"), rows="shared"),
        inductor_config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        gemmtune.optimize(model, tune=x, batch_invariant=True, progress=False)
        replayed, compiled = torch.compile(model, mode="reduce-overhead", dynamic=False), torch.compile(model, dynamic=False)
        compiled(x)
        assert [d.taken for d in gemmtune.explain(compiled).decisions] == ["joined"] * 3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
        for weight in (model.v.weight, model.q.weight):
            for _ in range(4):  # warmed up, captured, replayed
                assert torch.equal(replayed(x).clone(), model(x))
            assert torch.equal(replayed(x[:1]).clone(), model(x)[:1])
            graph.replay()
            assert torch.equal(captured, model(x))
            weight.copy_(halved(weight))
    gemmtune.restore(model)


def test_memory_of_kernels_is_in_no_pool():
    """A thread that warms up a graph of Inductor allocates from its pool, in which nothing may remain.

    torch's allocator divides 20 MiB among tensors of 2 MiB of one pool, so these lie side by side.
    """
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()

    def made() -> torch.Tensor:
        return torch.zeros(2**21, dtype=torch.uint8, device="cuda")

    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        first, memory, second = made(), kept(made, 0, stream.cuda_stream), made()
    stream.synchronize()
    assert not memory.any()
    assert second.data_ptr() == first.data_ptr() + 2**21
    assert not first.data_ptr() <= memory.data_ptr() < first.data_ptr() + 20 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["float", "int4"])
def test_a_model_on_another_gpu_than_the_current_one(kind):
    """Its kernels and their memory are of its GPU: eager, compiled, in CUDA graphs, and copied to the other GPU."""
    model, x = Columns().to("cuda:1", BF16), torch.randn(16, 256, device="cuda:1", dtype=BF16)
    if kind == "int4":
        gemmtune.quantize_(model, kind, group=64)
    with torch.no_grad(), settings.patch(backends=("aten", "triton", "cuda")):
        expected = model(x).float()

        def assert_right(result):
            torch.testing.assert_close(result.float().to("cuda:1"), expected, rtol=3e-2, atol=3e-2)

        gemmtune.optimize(model, tune=x, progress=False)
        assert_right(model(x))
        for options in ({}, {"mode": "reduce-overhead"}, {"backend": backend.gemmtune}):
            compiled = torch.compile(model, dynamic=False, **options)
            for _ in range(4):
                assert_right(compiled(x).clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(1), torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
        assert_right(captured)
        assert_right(copy.deepcopy(model).to("cuda:0")(x.to("cuda:0")))
        assert torch.cuda.current_device() == 0
    gemmtune.restore(model)


@pytest.mark.slow
def test_a_graph_out_of_the_cache_is_ready_before_it_is_captured(monkeypatch):
    """The pass does not run then: what it does for a capture, the code does when it is loaded."""
    model, x = Heads().to("cuda", BF16), torch.randn(16, 256, device="cuda", dtype=BF16)
    backend.install(policy=FixedPolicy("alone"))
    try:
        with (
            torch.no_grad(),
            fresh_cache(),
            settings.patch(tune="never"),
            inductor_config.patch("triton.slow_path_cudagraph_asserts", True),
        ):
            expected = model(x)
            torch.compile(model, mode="reduce-overhead")(x)
            torch._dynamo.reset()
            planned.forget_launches()
            hits = counters["inductor"]["fxgraph_cache_hit"]
            compiled = torch.compile(model, mode="reduce-overhead")
            seen = []
            ready = planned.ready_launch
            monkeypatch.setattr(planned, "ready_launch", lambda *key: seen.append(key) or ready(*key))
            for _ in range(4):
                torch.testing.assert_close(compiled(x).clone(), expected, rtol=3e-2, atol=3e-2)
    finally:
        uninstall()
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
    assert not seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("m", "k", "block"), [(3, 300, 300), (2, 256, 128), (3, 200, 128), (1, 9000, 9000)])
def test_rows_are_rounded_to_float8_by_one_kernel(m, k, block, dtype):
    """As torch's operations do it on a CPU, bit by bit, NaN, infinity and rows of zeros included."""
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        pytest.skip(f"this GPU has no instruction for it: sm{LEAST_CAPABILITY[0]}{LEAST_CAPABILITY[1]} has")
    a = (torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None]).to(dtype)
    a[-1, : k // 2] = 0
    for value in (None, 0.0, float("inf"), float("nan")):
        if value is not None:
            a[0, 5] = value
        numbers, scales = rows_in_float8(a.cuda(), block)
        want_numbers, want_scales = rows_in_float8(a, block)
        assert serves(a.cuda())
        assert torch.equal(scales.cpu().nan_to_num(-1, -2), want_scales.nan_to_num(-1, -2))
        assert torch.equal(numbers.cpu().float().nan_to_num(1000), want_numbers.float().nan_to_num(1000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_model_is_that_of_its_weights(kind, compiled):
    model = Mlp(256).cuda().to(BF16)
    gemmtune.quantize_(model, kind)
    plain = Mlp(256).cuda().to(BF16)
    for ours, theirs in zip((model.up, model.down), (plain.up, plain.down), strict=True):
        assert isinstance(ours.weight, QuantizedWeight)
        theirs.weight.data.copy_(ours.weight.dequantize())
        theirs.bias.data.copy_(ours.bias)
    x = torch.randn(16, 256, device="cuda", dtype=BF16)
    with torch.no_grad():
        gemmtune.optimize(model, tune=x, progress=False)
        try:
            run = torch.compile(model, fullgraph=True) if compiled else model
            got, want = run(x), plain(x)
        finally:
            gemmtune.restore(model)
    assert (got - want).norm() <= (0.06 if kind == "float8" else 0.02) * want.norm()
