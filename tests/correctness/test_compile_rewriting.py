"""The pass on graphs of torch.compile: the nodes it replaces, their replacements, and the results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import (
    Block,
    FixedPolicy,
    Mlp,
    assert_as_good,
    decided,
    in_float64,
    outputs_and_gradients,
    rewriting_backend,
)
from rotation import rotated

import gemmtune
from gemmtune.integration.compile.rewriting import RewriteProducts

Tensor = torch.Tensor


def epilogues(function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> list[str]:
    """Return the epilogue of each GEMM, empty for one rewritten alone. Check that the result is as accurate as eager torch's."""
    with decided() as made, torch.no_grad():
        compiled = torch.compile(function, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True, dynamic=dynamic)
        got = compiled(*inputs)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        assert_as_good([got], [function(*inputs)], [function(*wide)])
    return [str(d.fused.epilogue) if d.taken == "fused" and d.fused else "" for d in made]


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


A, B, ROW, RESULT = normal(6, 8), normal(8, 4), normal(4), normal(6, 4)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda a, b: a @ b, (A, B), [""]),
        (lambda a, b: torch.relu(a @ b), (A, B), ["relu(acc)"]),
        (lambda a, b, c: (a @ b + c) * 2, (A, B, ROW), ["mul(add(acc, x0), 2)"]),
        (lambda a, b, c: c - a @ b, (A, B, RESULT), ["sub(x0, acc)"]),
        (lambda a, b, c: torch.add(c, a @ b, alpha=3), (A, B, RESULT), ["add(x0, mul(acc, 3))"]),
        (lambda a, b, c: torch.where(c > 0, a @ b, 0.0), (A, B, RESULT), ["where(x0, acc, 0.0)"]),
        (lambda a, b: (a @ b).clamp(min=-0.5), (A, B), ["clamp(acc, -0.5, inf)"]),
        (lambda a, b: F.leaky_relu(a @ b), (A, B), ["where(gt(acc, 0), acc, mul(acc, 0.01))"]),
        (lambda a, b: (a @ b).to(torch.float64), (A, B), ["acc.to(float64)"]),
        (lambda a, b, c: a @ b * c, (A, B, torch.tensor(2.0)), ["mul(acc, x0)"]),
        (lambda a, b, c: a @ b + c, (A, B, normal(4, 6).t()), ["add(acc, x0)"]),
        (lambda a, b, c: torch.addmm(c, a, b, beta=2).tanh(), (A, B, ROW), ["tanh(acc)"]),
        (lambda a, b, c: torch.baddbmm(c, a, b).neg(), (normal(3, 6, 8), normal(3, 8, 4), normal(3, 6, 4)), ["neg(acc)"]),
        (lambda a, b, c: F.silu(a @ b) * (a @ c), (A, B, normal(8, 4)), ["mul(div(acc, add(exp(neg(acc)), 1)), x0)", ""]),
    ],
)  # fmt: skip
def test_pointwise_nodes_behind_a_gemm_become_its_epilogue(function, inputs, expected):
    assert epilogues(function, *inputs) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b).sum(-1),
        lambda a, b: (a @ b).t() + 1,
        lambda a, b: (a @ b)[:2] * 2,
        lambda a, b: torch.stack([x := a @ b, x * 2]),  # the product itself is needed
        lambda a, b: (x := a @ b) / x.amax(-1, keepdim=True),
        lambda a, b: torch.fmod(a @ b, 2.0),
        lambda a, b: (a @ b) + torch.ones(6, 1),  # a column for each row
    ],
)
def test_other_nodes_behind_a_gemm_stay(function):
    assert epilogues(function, A, B) == [""]


def test_the_longest_epilogue_without_other_readers_is_fused():
    assert epilogues(lambda a, b, c: torch.stack([x := a @ b + c, x.relu()]), A, B, ROW) == ["add(acc, x0)"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_epilogue_continues_behind_views_of_the_rows(dynamic):
    x, weight, residual = normal(2, 3, 8), torch.nn.Parameter(normal(4, 8)), normal(2, 3, 4)
    found = epilogues(lambda x, w, r: r + F.gelu(F.linear(x, w)), x, weight, residual, dynamic=dynamic)
    assert found == ["add(x0, mul(mul(acc, 0.5), add(erf(mul(acc, 0.7071067811865476)), 1)))"]


def test_an_epilogue_keeps_all_bfloat16_roundings_except_the_first():
    a, b, c = (x.to(torch.bfloat16) for x in (A, B, RESULT))
    assert epilogues(lambda a, b, c: c + F.silu(a @ b), a, b, c) == ["add(x0, div(acc, add(exp(neg(acc)), 1)).to(bfloat16))"]


def test_a_reduction_behind_the_epilogue_is_found():
    def normed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = a @ b + c
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
        for _ in range(40):  # the residual continues farther than the search
            x = x + c * y
        return x

    with decided(), torch.no_grad():
        seen: list[bool] = []
        policy = FixedPolicy("fused", only=lambda product: seen.append(product.before_reduction) or True)
        torch.compile(normed, backend=rewriting_backend(policy))(A, B, RESULT)
        torch.compile(lambda a, b, c: a @ b + c, backend=rewriting_backend(policy))(A, B, RESULT)
    assert seen == [True, False]


@pytest.mark.parametrize("size", [(0, 8), (6, 0)])
def test_an_empty_product_stays_torchs(size):
    with decided() as made, torch.no_grad():
        torch.compile(torch.mm, backend=rewriting_backend(FixedPolicy("fused")), dynamic=False)(
            torch.ones(size), torch.ones(size[1], 4)
        )
    assert [(d.taken, d.reason) for d in made] == [("", "nothing to multiply")]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", rotated([torch.float32, torch.bfloat16], 2, "rewritten models"))
@pytest.mark.parametrize(("model", "gemms"), [(Mlp(), 6), (Block(), 15)])
def test_rewritten_models_have_right_results_and_gradients(model, gemms, dtype, dynamic):
    model = model.to(dtype)
    width = next(model.parameters()).shape[-1]
    with decided() as made:
        compiled = torch.compile(model, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True, dynamic=dynamic)
        exact = in_float64(model)
        for length in (5, 8) if dynamic else (5,):
            x = normal(2, length, width, dtype=dtype)
            got = outputs_and_gradients(compiled, list(model.parameters()), x)
            eager = outputs_and_gradients(model, list(model.parameters()), x)
            assert_as_good(got, eager, outputs_and_gradients(exact, list(exact.parameters()), x.double()))
    assert len(made) == gemms
    assert all(d.taken for d in made)
    assert {d.taken for d in made} == {"alone", "fused"}


def test_operands_with_another_alignment_than_at_compile_time():
    with decided(), torch.no_grad():
        compiled = torch.compile(lambda a, b: (a @ b).relu(), backend=rewriting_backend(FixedPolicy("fused")), dynamic=False)
        compiled(A, B)
        shifted = torch.empty(A.numel() + 1)[1:].view(A.shape).copy_(A)
        torch.testing.assert_close(compiled(shifted, B), (A @ B).relu())


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (
            lambda a, w, s, r: torch.relu(gemmtune.mixed_mm(a, w, scale_b=s)) + r,
            (A, torch.arange(-16, 16, dtype=torch.int8).view(8, 4), torch.rand(1, 4), RESULT),
            "add(relu(acc), x0)",
        ),
        (
            lambda a, w: gemmtune.int_mm(a, w).float() * 0.5,
            (torch.arange(48, dtype=torch.int8).view(6, 8), torch.arange(-16, 16, dtype=torch.int8).view(8, 4)),
            "mul(acc, 0.5).to(float32)",
        ),
    ],
)
def test_epilogues_of_gemmtunes_operators_are_fused(function, inputs, expected):
    with decided() as made, torch.no_grad():
        compiled = torch.compile(function, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert [(d.taken, str(d.fused and d.fused.epilogue)) for d in made] == [("fused", expected)]


@pytest.mark.parametrize("name", ["_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
def test_torchs_scaled_grouped_products_are_replaced(name: str):
    """Rewrite a graph as traced on a GPU, because torch's operator has no CPU kernel."""
    target = getattr(torch.ops.aten, name, None)
    if target is None:
        assert torch.__version__ < "2.11"
        return
    values = {
        "a": normal(8, 16).to(torch.float8_e4m3fn),
        "b": normal(3, 16, 16).to(torch.float8_e4m3fn).mT,
        "scale_a": torch.rand(8) + 0.5,
        "scale_b": torch.rand(3, 16) + 0.5,
        "offs": torch.tensor([2, 2, 8], dtype=torch.int32),
    }
    graph = torch.fx.Graph()
    nodes = {role: graph.placeholder(role) for role in values}
    for role, node in nodes.items():
        node.meta["val"] = values[role]
    a, b, scale_a, scale_b, offs = nodes.values()
    row: list[int] = [1]
    given = (a, b, [scale_a], row, [], [scale_b], row, [], offs) if name.endswith("v2") else (a, b, scale_a, scale_b, offs)
    product = graph.call_function(target.default, given, {"out_dtype": torch.bfloat16})
    product.meta["val"] = torch.empty(8, 16, dtype=torch.bfloat16)
    graph.output(product)
    with decided() as made:
        RewriteProducts(FixedPolicy("alone"))(graph)
    [decision] = made
    assert (decision.taken, decision.alone.op, str(decision.alone.scale_b.size)) == ("alone", "scaled_grouped_mm", "(3, 1, 16)")
    got = torch.fx.GraphModule(torch.nn.Module(), graph)(*values.values())
    want = gemmtune.scaled_grouped_mm(*values.values())
    assert torch.equal(got, want)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda y: (lambda gates, others: F.silu(gates) * others)(*y.chunk(2, -1)),
    "slices": lambda y: y[:, 8:] * F.silu(y[:, :8]),
    "float32": lambda y: (F.silu(y[:, :8].float()) * y[:, 8:]).to(y.dtype),
    "masked": lambda y: torch.mul(
        *(f(x) for f, x in zip((F.silu, lambda x: x), y.masked_fill(MASK, 0.0).chunk(2, -1), strict=True))
    ),
    "other half": lambda y: F.silu(y[:, 8:]) * y[:, :8],
    "another function": lambda y: F.gelu(y[:, :8]) * y[:, 8:],
    "gates are kept": lambda y: F.silu(y[:, :8]) * y[:, 8:] + y[:, :8],
}
MASK = torch.arange(8).unsqueeze(-1) > 5


@pytest.mark.parametrize("name", GATES)
def test_swiglu_is_fused_into_a_grouped_product(name: str):
    x, w = normal(8, 16, dtype=torch.bfloat16), normal(3, 16, 16, dtype=torch.bfloat16).mT
    offs = torch.tensor([2, 2, 8], dtype=torch.int32)

    def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return GATES[name](torch._grouped_mm(x, w, offs=offs))

    with decided() as made, torch.no_grad():
        got = torch.compile(experts, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True, dynamic=False)(x, w, offs)
        want = experts(x.double().float(), w.double().float(), offs)
    torch.testing.assert_close(got.float(), want, atol=0.2, rtol=0.02)
    fused = name in ("chunk", "slices", "float32", "masked")
    [decision] = made
    assert (decision.taken, bool(decision.fused and decision.fused.gated)) == (("fused", True) if fused else ("alone", False))


def test_torchs_grouped_products_are_replaced():
    x, w, offs = (
        normal(8, 8, dtype=torch.bfloat16),
        normal(3, 8, 8, dtype=torch.bfloat16).mT,
        torch.tensor([2, 2, 8], dtype=torch.int32),
    )

    def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return F.silu(torch._grouped_mm(x, w, offs=offs)) * 2

    given = [y.clone().requires_grad_() for y in (x, w)]
    want = experts(*given, offs)
    grads = torch.autograd.grad(want.sum(), given)
    with decided() as made:
        compiled = torch.compile(experts, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True)
        got = compiled(*given, offs)
        found = torch.autograd.grad(got.sum(), given)
    assert torch.allclose(got, want, atol=0.1)
    assert all(torch.allclose(y, z, atol=0.2) for y, z in zip(found, grads, strict=True))
    taken = {d.alone.op: d for d in made if d.taken and d.alone is not None}
    assert taken.keys() == {"grouped_mm", "grouped_k_mm"}
    with decided() as made, torch.no_grad():
        torch.compile(experts, backend=rewriting_backend(FixedPolicy("fused")), fullgraph=True)(x, w, offs)
        torch.compile(lambda a, b, o: torch._grouped_mm(a, b, offs=o), backend=rewriting_backend(FixedPolicy("fused")))(
            w.mT, x.t(), offs
        )
    first, second = made
    assert str(first.fused.epilogue) == "mul(div(acc, add(exp(neg(acc)), 1)).to(bfloat16), 2)"
    assert second.reason == "torch alone has its other forms"
