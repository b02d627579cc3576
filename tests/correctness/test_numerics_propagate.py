"""How errors go through epilogues: what right evaluations can give is allowed, what the graph forbids is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gemmtune.numerics.propagate import Approximate, propagate, rounded
from gemmtune.problem.epilogue import evaluate
from gemmtune.problem.trace import trace

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x: x + 3.3, "sub": lambda x: 1.234 - x, "mul": lambda x: x * x, "div": lambda x: x / (x * x + 1),
    "reciprocal": lambda x: 1 / x, "neg": lambda x: -x, "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "relu": torch.relu,
    "relu6": torch.nn.functional.relu6, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "clamp": lambda x: torch.clamp(x, -0.5, 1.1),
    "minimum": lambda x: torch.minimum(x, x * 2 - 1), "maximum": lambda x: torch.maximum(x, -x),
    "where": lambda x: torch.where(x > 0.5, x, x * 0.01), "where eq": lambda x: torch.where(x == 1, 5.0, x),
    "cast": lambda x: x.to(BF16) * 3.3 + 0.1, "cast last": lambda x: torch.tanh(x).to(F16),
    "own sigmoid": lambda x: x / (1 + torch.exp(-x)), "nested": lambda x: torch.sqrt(torch.relu(torch.sigmoid(x) - 0.5)),
}  # fmt: skip
POINTS = torch.cat(
    [
        torch.linspace(-6, 6, 4001, dtype=F64),
        torch.tensor(
            [0.0, 0.5, 1.0, -1.0, 1.1, 6.0, 1e-30, -1e-30, 1e-40, 88.0, -88.9, -104.0, 300.0, -300.0, 1e4, -1e4], dtype=F64
        ),
    ]
)


def zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=F64, device=x.device)


def accepts(expected: Approximate, got: torch.Tensor) -> torch.Tensor:
    """As ``is_right`` does, without the rule for infinities."""
    got = got.double()
    near = (got - expected.value).abs() <= expected.error
    return near | (got == expected.value) | (got.isnan() & expected.value.isnan()) | (expected.error == math.inf)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3, 0.5])
def test_every_right_evaluation_is_allowed(name: str, spread: float) -> None:
    epilogue = trace(FUNCTIONS[name], F32, ())
    points = POINTS.float().double()
    acc = Approximate(value=points, error=torch.full_like(points, spread))
    expected = propagate(epilogue, acc, (), precision=F32, flush=False, reference_is_float64=False)
    generator = torch.Generator().manual_seed(0)
    for shift in (-1.0, 0.0, 1.0, *torch.rand(5, generator=generator).mul(2).sub(1).tolist()):
        inside = (points + shift * spread).float()
        inside = torch.where((inside.double() - points).abs() <= spread, inside, points.float())
        right = accepts(expected, evaluate(epilogue, inside, ()))
        assert right.all(), (points[~right][:5], evaluate(epilogue, inside, ())[~right][:5], expected.value[~right][:5])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_unfused_way_is_allowed_where_declared(name: str, dtype: torch.dtype) -> None:
    epilogue = trace(FUNCTIONS[name], F32, ())
    points = POINTS[POINTS.abs() < 5].float().double()
    acc = rounded(Approximate(value=points, error=torch.full_like(points, 1e-6)), dtype, flush=False)
    expected = propagate(epilogue, acc, (), precision=dtype, flush=False, reference_is_float64=False)
    right = accepts(expected, evaluate(epilogue, points.to(dtype), ()))
    assert right.all(), (points[~right][:5], expected.value[~right][:5])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_is_allowed(name: str) -> None:
    epilogue = trace(FUNCTIONS[name], F64, ())
    acc = Approximate(value=POINTS, error=zero(POINTS))
    expected = propagate(epilogue, acc, (), precision=F64, flush=False, reference_is_float64=True)
    assert accepts(expected, evaluate(epilogue, POINTS, ())).all()


def bound_at(function: Callable[..., torch.Tensor], x: float, error: float = 0.0) -> tuple[float, float]:
    acc = Approximate(value=torch.tensor([x], dtype=F64), error=torch.tensor([error], dtype=F64))
    result = propagate(trace(function, F32, ()), acc, (), precision=F32, flush=False, reference_is_float64=False)
    return result.value.item(), result.error.expand(1).item()


@pytest.mark.parametrize(
    ("name", "x", "most"),
    [("gelu", 1.0, 3e-6), ("exp", 1.0, 3e-6), ("tanh", 0.3, 2e-6), ("sqrt", 2.0, 1e-6), ("div", 1.0, 1e-6), ("add", 1.0, 2e-6)],
)
def test_bounds_are_no_wider_than_a_few_units(name: str, x: float, most: float) -> None:
    assert 0 < bound_at(FUNCTIONS[name], x)[1] < most


def test_functions_that_only_select_add_nothing() -> None:
    for name in ("relu", "abs", "neg", "relu6"):
        assert bound_at(FUNCTIONS[name], 1.5)[1] == 0


def test_casts_and_products_of_exact_values_are_exact() -> None:
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16) * 3.0

    x = 1 + 2.0**-9 + 2.0**-12
    assert bound_at(triple, x) == ((torch.tensor(x).bfloat16() * 3.0).item(), 0.0)
    assert bound_at(lambda x: x * 2.0 + 1.0, 5.0) == (11.0, 0.0)


def test_a_step_within_reach_allows_both_branches_and_nothing_else() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0.5, 10.0, x)

    assert bound_at(step, 0.5, 1e-3)[1] == pytest.approx(9.5, abs=0.01)
    assert bound_at(step, 0.6, 1e-3) == (10.0, 0.0)
    assert bound_at(step, 0.5)[0] == 0.5


@pytest.mark.parametrize("function", [lambda acc, x: torch.where(acc > x, x, 100.0), lambda acc, x: torch.where(x > acc, x, 100.0)])
def test_either_side_of_a_comparison_may_be_off(function: Callable[..., torch.Tensor]) -> None:
    operand = torch.tensor([[1.2, 5.0]])
    acc = Approximate(value=torch.ones(1, 2, dtype=F64), error=torch.full((1, 2), 0.5, dtype=F64))
    expected = propagate(trace(function, F32, [operand]), acc, [operand], precision=F32, flush=False, reference_is_float64=False)
    assert expected.error[0, 0] >= 98
    assert expected.error[0, 1] == 0


def test_poles_and_overflow_within_reach_allow_anything() -> None:
    assert bound_at(FUNCTIONS["reciprocal"], 1e-4, 1e-3)[1] == math.inf
    assert bound_at(FUNCTIONS["reciprocal"], 1.0, 1e-3)[1] < 2e-3
    assert bound_at(FUNCTIONS["sqrt"], 1e-4, 1e-3)[1] == math.inf
    assert bound_at(FUNCTIONS["exp"], 100.0)[1] == math.inf


def test_nan_stays_certain() -> None:
    for name in FUNCTIONS:
        value, error = bound_at(FUNCTIONS[name], math.nan)
        plain = evaluate(trace(FUNCTIONS[name], F32, ()), torch.tensor([math.nan]), ())
        assert math.isnan(value) == bool(plain.isnan())
        assert math.isfinite(error)
    assert math.isnan(bound_at(FUNCTIONS["sqrt"], -1.0)[0])
    assert bound_at(FUNCTIONS["sqrt"], -1.0)[1] == 0


def test_operands_broadcast() -> None:
    row = torch.tensor([1.0, 2.0, 3.0], dtype=F16)
    epilogue = trace(lambda x, y: x * y + y, F32, (row,))
    acc = Approximate(value=torch.ones(1, 2, 3, dtype=F64), error=torch.full((1, 2, 3), 1e-3, dtype=F64))
    result = propagate(epilogue, acc, (row.expand(1, 2, 3),), precision=F32, flush=False, reference_is_float64=False)
    assert result.value[0, 1].tolist() == [2, 4, 6]
    assert result.error[0, 1].tolist() == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-2)
