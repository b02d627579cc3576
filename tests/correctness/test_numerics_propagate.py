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
    """Compare like ``is_right``, without the rule for infinities."""
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
        assert bound_at(FUNCTIONS[name], 1.5, 0.25)[1] == 0.25


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


@pytest.mark.parametrize("function", [lambda acc, x: torch.where(acc > x, x, 100.0), lambda acc, x: torch.where(x > acc, x, 100.0)])
def test_a_comparison_is_certain_with_a_nan_that_is(function: Callable[..., torch.Tensor]) -> None:
    acc = Approximate(value=torch.ones(1, 2, dtype=F64), error=torch.tensor([[math.inf, 0.0]], dtype=F64))
    nan = Approximate(value=torch.full((1, 2), math.nan, dtype=F64), error=torch.tensor([[0.0, math.inf]], dtype=F64))
    given = torch.empty(1, 2)
    expected = propagate(trace(function, F32, [given]), acc, [nan], precision=F32, flush=False, reference_is_float64=False)
    assert expected.value.tolist() == [[100.0, 100.0]]
    assert expected.error.tolist() == [[0.0, math.inf]]


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


def units(x: float, e: float) -> dict[str, tuple[Callable[..., torch.Tensor], float, float]]:
    """Return by name a function, the propagated error ``e`` at ``x``, and the float32 roundoffs of its evaluation."""
    exp, sigmoid, tanh, erf = math.exp(x), 1 / (1 + math.exp(-x)), math.tanh(x), math.erf(x)
    gelu, by_exponential = x / 2 * (1 + math.erf(x / math.sqrt(2))), 8 + 2 * abs(x)
    return {
        "add": (lambda y: y + y, 2 * e, 0), "sub": (lambda y: 4.0 - y, e, 0), "mul": (lambda y: y * y, 2 * x * e + e * e, 0),
        "div": (lambda y: y / 4.0, e / 4, 4 * x / 4), "reciprocal": (lambda y: 3.0 / y, 3 * (1 / x * e) / (x - e), 4 / x * 3),
        "sqrt": (torch.sqrt, math.sqrt(x) - math.sqrt(x - e), 4 * math.sqrt(x)),
        "rsqrt": (torch.rsqrt, (x - e) ** -0.5 - x**-0.5, 4 * x**-0.5),
        "exp": (torch.exp, exp * math.expm1(e), by_exponential * exp),
        "sigmoid": (torch.sigmoid, e / 4, by_exponential * sigmoid),
        "silu": (torch.nn.functional.silu, 1.1 * e, by_exponential * x * sigmoid),
        "tanh": (torch.tanh, e, 8 * (1 + tanh)), "erf": (torch.erf, 1.13 * e, 8 * (1 + erf)),
        "gelu": (torch.nn.functional.gelu, 1.13 * e, 8 * (x + gelu)),
    }  # fmt: skip


ROUNDED = [name for name in units(1.0, 0.1) if name != "reciprocal"]


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize(
    ("dtype", "unit", "tiny", "factor"), [(F32, 2.0**-24, 2.0**-149, 1), (F64, 2.0**-53, 2.0**-1074, 2)], ids=str
)
def test_error_is_incoming_plus_evaluation_error(name: str, dtype: torch.dtype, unit: float, tiny: float, factor: int) -> None:
    for x, e in ((1.5, 0.25), (1.5, 1e-9), (0.75, 0.0)):
        function, carried, evaluation = units(x, e)[name]
        acc = Approximate(value=torch.tensor([x], dtype=F64), error=torch.tensor([e], dtype=F64))
        graph = trace(function, dtype, ())
        got = propagate(graph, acc, (), precision=dtype, flush=False, reference_is_float64=dtype == F64)
        exact = e == 0 and name in ("add", "sub", "mul") and dtype == F32
        own = factor * evaluation * unit + unit * (abs(got.value.item()) + carried) + tiny
        assert got.error.item() == pytest.approx(0 if exact else carried + own, rel=1e-7)
        flushed = propagate(graph, acc, (), precision=dtype, flush=True, reference_is_float64=dtype == F64)
        if e:
            assert flushed.error.item() >= got.error.item()


def test_flushing_adds_the_smallest_normal_number() -> None:
    acc = Approximate(value=torch.tensor([2.0**-120], dtype=F64), error=torch.tensor([2.0**-126], dtype=F64))
    graph = trace(lambda x: x * 0.5, F32, ())
    plain, flushed = (
        propagate(graph, acc, (), precision=F32, flush=flush, reference_is_float64=False).error.item() for flush in (False, True)
    )
    assert flushed - plain == pytest.approx(2.0**-126 - 2.0**-149, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "error", "flush", "expected"),
    [
        (1.0, 0.0, False, (1.0, 0.0)),
        (1.0 + 2.0**-12, 0.0, False, (1.0, 0.0)),
        (1.0, 0.0, True, (1.0, 2.0**-14)),
        (3.0, 0.5, False, (3.0, 0.5 + 2.0**-11 * 3.5 + 2.0**-25)),
        (-3.0, 0.5, True, (-3.0, 0.5 + 2.0**-11 * 3.5 + 2.0**-14)),
        (1.0 + 2.0**-12, 0.5, False, (1.0 + 2.0**-12, 0.5 + 2.0**-11 * (1.5 + 2.0**-12) + 2.0**-25)),
    ],
)
def test_rounding_is_exact_or_half_a_unit(value: float, error: float, flush: bool, expected: tuple[float, float]) -> None:
    made = Approximate(value=torch.tensor([value], dtype=F64), error=torch.tensor([error], dtype=F64))
    got = rounded(made, F16, flush=flush)
    assert (got.value.item(), got.error.item()) == expected


def test_minimum_and_clamp_take_the_larger_error() -> None:
    operand = torch.tensor([[1.0]])
    acc = Approximate(value=torch.ones(1, 1, dtype=F64), error=torch.full((1, 1), 0.5, dtype=F64))

    def error(function: Callable[..., torch.Tensor]) -> float:
        graph = trace(function, F32, [operand])
        return propagate(graph, acc, [operand], precision=F32, flush=False, reference_is_float64=False).error.item()

    assert error(lambda x, y: torch.maximum(x, y)) == error(lambda x, y: torch.minimum(y, x)) == 0.5
    assert error(lambda x, y: torch.clamp(x, -3, 3) + 0 * y) == pytest.approx(0.5, rel=1e-6)
    assert error(lambda x, y: torch.where(y > 0, x, 9 * x)) == 0.5
    assert error(lambda x, y: torch.where(y > 0, y, x)) == 0


@pytest.mark.parametrize(
    ("x", "e", "anything"),
    [(65504.0, 0.0, False), (65504.0, 1.0, True), (-65504.0, 1.0, True), (65000.0, 400.0, False), (65000.0, 480.0, True)],
)
def test_possible_overflow_allows_any_value(x: float, e: float, anything: bool) -> None:
    """Rounding 65000 to float16 adds 32."""
    assert bound_at(lambda y: -y, x, e) == (-x, e)
    assert (bound_at(lambda y: y.half(), x, e)[1] == math.inf) == anything
    assert (bound_at(lambda y: abs(y.half()), x, e)[1] == math.inf) == anything
