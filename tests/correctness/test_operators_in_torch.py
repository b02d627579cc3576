"""Calls that torch has to see: transforms, modes, traces, the profiler, subclasses; and versions of what was written."""

from __future__ import annotations

import functools
import math
import random
import sys
import types

import pytest
import torch
from torch import func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.statement import meaning_of

F64 = torch.float64


@pytest.fixture(autouse=True)
def torch_alone(own_store):
    with settings.patch(backends=("aten",), tune="never"):
        yield


def floats(*size: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype)


A, B, C, D, BIAS = floats(4, 3), floats(3, 5), floats(4, 2), floats(2, 5), floats(5)


@pytest.fixture
def warm() -> None:
    """A plan is at hand: what is not plain must not take it."""
    gemmtune.mm(A, B)


def loss(mm):
    return lambda x: mm(x, B).sin().sum()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "transform", [func.grad, func.jacrev, func.hessian, func.jacfwd, lambda f: func.grad(lambda x: func.grad(f)(x).sum())]
)
def test_function_transforms(transform):
    torch.testing.assert_close(transform(loss(gemmtune.mm))(A), transform(loss(torch.mm))(A))


def test_vjp_and_vmap_of_a_gradient():
    batch = floats(6, 4, 3)
    value, pullback = func.vjp(lambda x, y: gemmtune.addmm(BIAS, x, y, alpha=2), A, B)
    torch.testing.assert_close(pullback(value), (2 * value @ B.mT, 2 * A.mT @ value))
    for f in (func.grad, lambda f: func.jacrev(func.grad(f))):
        torch.testing.assert_close(func.vmap(f(loss(gemmtune.mm)))(batch), func.vmap(f(loss(torch.mm)))(batch))


DENSE = {
    "mm": (A, B),
    "addmm": (BIAS, A, B),
    "bmm": (floats(2, 4, 3), floats(2, 3, 5)),
    "baddbmm": (floats(4, 1), floats(2, 4, 3), floats(2, 3, 5)),
    "mm_plus_mm": (A, B, C, D),
}


@pytest.mark.parametrize("op", DENSE)
def test_vmap_over_any_of_the_operands(op: str):
    tensors, ours = DENSE[op], getattr(gemmtune, op)
    for which in range(1, 2 ** len(tensors)):
        dims = tuple((i % 2) - 1 if which >> i & 1 else None for i in range(len(tensors)))
        given = [x if d is None else torch.stack([x, 2 * x, x + 1], d) for x, d in zip(tensors, dims, strict=True)]
        slices = [[x if d is None else x.select(d, i) for x, d in zip(given, dims, strict=True)] for i in range(3)]
        torch.testing.assert_close(func.vmap(ours, dims)(*given), torch.stack([ours(*one) for one in slices]))
    nested = func.vmap(func.vmap(ours))(*(x.expand(2, 3, *x.shape) for x in tensors))
    torch.testing.assert_close(nested, ours(*tensors).expand_as(nested))


def test_vmap_over_one_operand_of_a_result_that_is_stored_transposed():
    columns, weight, batch = floats(2, 4, 3, dtype=torch.float32), floats(2, 3, 5, dtype=torch.float32), floats(6, 3, 8)
    offs, block = torch.tensor([3, 8], dtype=torch.int32), gemmtune.sparse.create_blocked_tensor(16, 16, block=16)
    rows, x = floats(6, 16, dtype=torch.float32), floats(4, 16, dtype=torch.float32)
    for product, given in (
        (lambda y: gemmtune.grouped_mm(columns, y, offs), batch.float()),
        (lambda y: gemmtune.grouped_mm(y, weight[0], torch.tensor([2, 5], dtype=torch.int32)), floats(6, 2, 4, 3).float()),
        (lambda y: gemmtune.sparse.linear(x, block, y), rows),
    ):
        torch.testing.assert_close(func.vmap(product)(given), torch.stack([product(one) for one in given]))


def test_vmap_over_narrow_operands():
    a, b = torch.arange(24).view(2, 4, 3).to(torch.int8), torch.arange(30).view(2, 3, 5).to(torch.int8)
    want = torch.stack([x.int() @ y.int() for x, y in zip(a, b, strict=True)])
    assert torch.equal(func.vmap(gemmtune.int_mm)(a, b), want)
    scale = torch.rand(2, 5)
    got = func.vmap(lambda y, s: gemmtune.mixed_mm(A.float(), y, scale_b=s.view(1, 5)))(b, scale)
    torch.testing.assert_close(got, A.float() @ (b.float() * scale[:, None]))


@pytest.mark.turn(7, 8)
@pytest.mark.usefixtures("warm")
def test_compiled_autograd_runs_the_gradients_of_operators():
    x = A.clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (got,) = torch.autograd.grad(torch.ops.gemmtune.mm(x, B).sin().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad((x @ B).sin().sum(), x)[0])


@pytest.mark.parametrize("op", [*DENSE, "mixed_mm"])
def test_batched_gradients_and_second_derivatives(op: str):
    if op == "mixed_mm":
        weight = (4 * B).to(torch.int8)
        scales = [x.float().abs().view(1, 5).requires_grad_() for x in (BIAS, BIAS + 1)]
        leaves, f = [A.float().requires_grad_(), *scales], lambda a, s, z: gemmtune.mixed_mm(a, weight, scale_b=s, zero_b=z)
        composed = lambda a, s, z: torch.mm(a, (weight - z) * s)  # noqa: E731
        for wanted in (1, 3):
            ours, theirs = (torch.autograd.grad(g(*leaves).sin().sum(), leaves[:wanted], create_graph=True) for g in (f, composed))
            torch.testing.assert_close(ours, theirs)
            second = [torch.autograd.grad(sum(x.square().sum() for x in first), leaves) for first in (ours, theirs)]
            torch.testing.assert_close(*second)
        many = torch.autograd.grad(f(*leaves), leaves, torch.ones(3, 4, 5), is_grads_batched=True)
        torch.testing.assert_close([x[1] for x in many], list(torch.autograd.grad(f(*leaves).sum(), leaves)))
        return
    leaves, f = [x.clone().requires_grad_() for x in DENSE[op]], getattr(gemmtune, op)
    assert torch.autograd.gradcheck(f, leaves, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, check_batched_grad=True, fast_mode=True)


def test_vectorised_jacobian_through_an_epilogue():
    def f(mm):
        return lambda x: torch.relu(mm(x, B)) if mm is torch.mm else mm(x, B, epilogue=torch.relu)

    ours, theirs = (torch.autograd.functional.jacobian(f(mm), A, vectorize=True) for mm in (gemmtune.mm, torch.mm))
    torch.testing.assert_close(ours, theirs)


def call_it(f, x, y):
    return f(x, y)


@pytest.mark.usefixtures("warm")
def test_functionalize_and_tracing():
    assert torch.equal(func.functionalize(gemmtune.mm)(A, B), gemmtune.mm(A, B))

    def into(x, y):
        return gemmtune.mm(x, y, out=torch.empty(4, 5, dtype=F64))

    for f in (gemmtune.mm, func.functionalize(gemmtune.mm), into, func.functionalize(into)):
        traced = make_fx(functools.partial(call_it, f))(A, B)
        assert torch.ops.gemmtune.mm.default in {node.target for node in traced.graph.nodes}
        torch.testing.assert_close(traced(2 * A, B), 2 * A @ B)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("warm")
def test_jit_trace():
    traced = torch.jit.trace(lambda x, y: gemmtune.mm(x, y, epilogue=torch.relu), (A, B))
    assert "gemmtune::mm" in str(traced.graph)
    torch.testing.assert_close(traced(2 * A, B), torch.relu(2 * A @ B))


@pytest.mark.usefixtures("warm")
def test_flops_and_profiler():
    with FlopCounterMode(display=False) as flops:
        gemmtune.mm(A, B)
        gemmtune.mm_plus_mm(A, B, C, D)
        gemmtune.int_mm(A.to(torch.int8), B.to(torch.int8))
    assert flops.get_total_flops() == 2 * 4 * 5 * (3 + 3 + 2 + 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gemmtune.mm(A, B)
    assert "gemmtune::mm" in {event.key for event in profile.key_averages()}


@pytest.mark.usefixtures("warm")
def test_function_modes_and_subclasses_see_the_operator():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Marked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    with Mode():
        gemmtune.mm(A, B)
    assert torch.ops.gemmtune.mm.default in seen
    seen.clear()
    got = gemmtune.mm(A.as_subclass(Marked), B)
    assert torch.ops.gemmtune.mm.default in seen
    assert type(got) is Marked


def test_a_subclass_with_a_dispatch_of_its_own_sees_torchs_operations():
    from torch.testing._internal.two_tensor import TwoTensor

    got = gemmtune.addmm(BIAS, TwoTensor(A, 2 * A), B)
    torch.testing.assert_close((got.a, got.b), (BIAS + A @ B, BIAS + 2 * A @ B))


def test_fake_and_meta_tensors():
    fake = torch._subclasses.FakeTensorMode()
    a, b = fake.from_tensor(A), fake.from_tensor(B)
    for result in (gemmtune.mm(a, b), gemmtune.mm(a, b, epilogue=torch.relu), gemmtune.mm(A.to("meta"), B.to("meta"))):
        assert (tuple(result.shape), result.dtype) == ((4, 5), F64)
    with fake, pytest.raises(RuntimeError, match="mm: shapes do not fit: "):
        gemmtune.mm(a, a)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("epilogue", [None, torch.relu])
def test_out_counts_up_its_version(epilogue, cold: bool):
    out, weight = torch.zeros(4, 5, dtype=F64), torch.ones(4, 5, dtype=F64, requires_grad=True)
    for _ in range(1 if cold else 3):
        loss = (weight * out).sum()
        version = out._version
        assert gemmtune.mm(A, B, out=out, epilogue=epilogue) is out
        assert out._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    version = out._version
    torch.ops.gemmtune.mm(A, B, out=out)
    assert out._version > version


def test_a_ready_call_with_out_looks_at_the_memory_again():
    buffer = torch.zeros(8, 8, dtype=F64)
    square = floats(4, 4)
    gemmtune.mm(square, square, out=buffer[4:, :4])
    a = buffer[:4, :4].copy_(square)
    gemmtune.mm(a, square, out=buffer[4:, :4])
    torch.testing.assert_close(buffer[4:, :4], square @ square)
    for _ in range(2):
        with pytest.raises(gemmtune.InvalidProblemError, match="out shares memory with a"):
            gemmtune.mm(a, square, out=buffer[2:6, :4])


def test_out_that_is_lazily_negated_gets_the_result():
    out = torch._neg_view(torch.zeros(4, 5, dtype=F64))
    gemmtune.mm(A, B, out=out)
    torch.testing.assert_close(out.resolve_neg(), A @ B)


def test_an_epilogue_means_what_it_says_at_each_call():
    factor = 2.0
    for factor in (2.0, 3.0, 3):
        scaled = gemmtune.mm(A, B, epilogue=lambda acc: acc * factor)  # noqa: B023
        torch.testing.assert_close(scaled, factor * A @ B)
    for shift in (BIAS, 2 * BIAS):
        torch.testing.assert_close(gemmtune.mm(A, B, epilogue=torch.add, epilogue_args=(shift,)), A @ B + shift)
    for zero in (0.0, -0.0, 0.0):
        torch.testing.assert_close(gemmtune.mm(A, B, epilogue=lambda acc: acc / zero), A @ B / zero)  # noqa: B023


def imports(acc):
    import epilogue_factors

    return acc * epilogue_factors.factor


def test_an_epilogue_that_reads_a_state_reads_it_at_each_call(monkeypatch):
    values = {"factor": 0.0}
    read, drawn = values.get, random.random
    monkeypatch.setitem(sys.modules, "epilogue_factors", factors := types.ModuleType("epilogue_factors"))
    functions = (
        lambda acc: acc * read("factor"),
        lambda acc: acc + drawn(),
        lambda acc: acc + torch.rand(()).item(),
        lambda acc: acc * torch.get_default_dtype().itemsize,
        lambda acc: acc * globals()["FACTOR"],
        imports,
    )
    before = torch.get_default_dtype()
    for function in functions:
        results = []
        for number, dtype in ((2.0, torch.float32), (3.0, torch.float64)):
            values["factor"] = factors.factor = number
            monkeypatch.setitem(globals(), "FACTOR", number)
            try:
                torch.set_default_dtype(dtype)
                results += [gemmtune.mm(A, B, epilogue=function), gemmtune.mm(A, B, epilogue=torch.relu)]
            finally:
                torch.set_default_dtype(before)
        assert not torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])


def test_graphs_of_functions_that_read_no_state_are_kept():
    scale, gelu = 0.5, torch.nn.functional.gelu
    for function in (
        torch.relu,
        lambda acc: torch.nn.functional.silu(acc) * scale,
        lambda acc, x: torch.where(x > 0, acc.clamp_(min=-1.0), float(x.shape[-1])).to(torch.float16),
        lambda acc: gelu(acc, approximate="tanh") + math.sqrt(2.0) * scale,
    ):
        assert meaning_of(function) is not None


def test_autocast_has_gradients_in_the_dtype_of_autocast():
    a, b = floats(4, 3, dtype=torch.float32).requires_grad_(), floats(3, 5, dtype=torch.float32)
    grads = []
    for mm in (gemmtune.mm, torch.ops.gemmtune.mm, torch.mm):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = mm(a, b)
        assert result.dtype == torch.bfloat16
        grads += torch.autograd.grad(result.sum(), a)
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[2])


def test_what_no_gradient_reads_may_change_before_the_backward_pass():
    a, b = A.clone().requires_grad_(), B.clone()
    inp = BIAS.clone().requires_grad_()
    shifted = inp * 1
    result = gemmtune.addmm(shifted, a * 1, b)
    shifted.add_(1)
    result.sum().backward()
    torch.testing.assert_close(inp.grad, torch.full_like(inp, 4))


def test_complex_gradients_are_torchs():
    a, b = (torch.complex(x, x.flip(0)).requires_grad_() for x in (A, B))
    grads = [torch.autograd.grad(mm(a, b).abs().sum(), (a, b)) for mm in (gemmtune.mm, torch.ops.gemmtune.mm, torch.mm)]
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])


def test_a_wanted_gradient_that_there_is_not_is_told():
    scale = torch.ones(5, requires_grad=True)
    a, b = A.to(torch.int8), B.to(torch.int8)
    for call in (lambda: gemmtune.int_mm_mul(a, b, scale), lambda: torch.ops.gemmtune.int_mm_mul(a, b, scale).sum().backward()):
        with pytest.raises(
            gemmtune.InvalidProblemError, match="int_mm_mul: scale requires grad, but the operation has no gradient"
        ):
            call()
    with pytest.raises(RuntimeError, match=r"gemmtune::mm.out: a call with out= is not differentiable"):
        torch.ops.gemmtune.mm(A.clone().requires_grad_(), B, out=torch.empty(4, 5, dtype=F64))


def test_inside_torch_compile_there_are_torchs_operations_and_operators():
    graphs = []

    def backend(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    weight = (4 * B).to(torch.int8)

    @torch.compile(backend=backend, fullgraph=True)
    def f(a, b):
        return gemmtune.mm(a, b) + gemmtune.mm_plus_mm(a, b, a, b) + gemmtune.mixed_mm(a, weight, epilogue=torch.relu)

    a, b = A.float().requires_grad_(), B.float()
    got = f(a, b)
    torch.testing.assert_close(got, 3 * a @ b + torch.relu(a @ weight.float()))
    assert not any("gemmtune.mm." in name for name in graphs[0])
    assert {"gemmtune.mm_plus_mm.default", "gemmtune.mixed_mm.default"} <= graphs[0]
