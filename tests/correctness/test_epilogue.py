"""evaluate(trace(f)) computes what torch computes for f."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.problem.epilogue import Epilogue, evaluate
from gemmtune.problem.trace import trace

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "scale": lambda acc, s: acc * 3.0,
    "relu-affine": lambda acc, s: torch.relu(acc * 3.3 - 1.234),
    "relu6": lambda acc, s: F.relu6(acc * s),
    "gelu": lambda acc, s: F.gelu(acc + s),
    "gelu-tanh": lambda acc, s: F.gelu(acc + s, approximate="tanh"),
    "swiglu": lambda acc, s: F.silu(acc) * s,
    "tanh-erf": lambda acc, s: torch.tanh(acc) + torch.erf(s - acc),
    "sigmoid": lambda acc, s: torch.sigmoid(-acc / (abs(s) + 0.5)),
    "exp": lambda acc, s: torch.exp(acc.clamp(max=2.0)) - 1,
    "roots": lambda acc, s: torch.sqrt(abs(acc)) + torch.rsqrt(torch.square(acc) + 1.0),
    "clamp": lambda acc, s: acc.clamp(-0.5, 0.75) * s,
    "bounds": lambda acc, s: torch.minimum(torch.maximum(acc, s), -s),
    "where": lambda acc, s: torch.where(acc >= s, acc, s * 0.5),
    "comparisons": lambda acc, s: (acc < s) * acc + (acc == s) * s + (acc != s).to(acc.dtype),
    "leaky": lambda acc, s: F.leaky_relu(acc, 0.2) + 1 / (acc * acc + 1),
    "rsub": lambda acc, s: 2 - acc + torch.rsub(s, acc),
    "cast-then-scale": lambda acc, s: acc.to(torch.float16) * 0.125,
    "cast-up": lambda acc, s: (acc.to(torch.bfloat16) + s).to(torch.float32),
    "powers": lambda acc, s: acc**2 + s**3,
}


def _operand(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _assert_close(got: torch.Tensor, expected: torch.Tensor, *dtypes: torch.dtype, case: object = "") -> None:
    """Within two roundings to the narrowest dtype: torch's own kernels differ by that between strided and dense tensors, and
    its kernels for x**3 differ between devices in how often they round."""
    tolerance = 2 * max(torch.finfo(d).eps for d in (got.dtype, expected.dtype, *dtypes))
    limits = {"rtol": tolerance, "atol": tolerance * expected.abs().max().item()}
    torch.testing.assert_close(got, expected, **limits, check_dtype=False, msg=lambda text: f"{case} {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_computes_what_the_function_computes(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in ((17,), (9, 1), (9, 17), (1, 17), ()):
        s = _operand(shape, dtype, seed=1)
        epilogue = trace(function, acc_dtype, [s])
        for given_dtype in {acc_dtype, dtype}:  # fused: the accumulator itself; unfused: the result in its own dtype
            acc = _operand((9, 17), given_dtype, seed=2)
            got, expected = evaluate(epilogue, acc, [s]), function(acc, s)
            if given_dtype == acc_dtype:
                assert got.dtype == expected.dtype == epilogue.nodes[-1].dtype, shape
            _assert_close(got, expected, s.dtype, case=shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_into_out_and_into_the_accumulator_itself(name: str, dtype: torch.dtype) -> None:
    s = _operand((17,), dtype, seed=3)
    epilogue = trace(FUNCTIONS[name], torch.float64 if dtype == torch.float64 else torch.float32, [s])
    acc = _operand((9, 17), dtype, seed=4)
    expected = evaluate(epilogue, acc, [s]).to(dtype)
    out = torch.full((9, 34), float("nan"), dtype=dtype)[:, ::2]
    assert evaluate(epilogue, acc, [s], out=out) is out
    _assert_close(out, expected)
    assert evaluate(epilogue, acc, [s], out=acc) is acc
    _assert_close(acc, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinities_go_through_as_in_torch(name: str) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38])
    acc, s = special[:, None].expand(7, 7), special[None, :].expand(7, 7)
    got = evaluate(trace(FUNCTIONS[name], torch.float32, [s]), acc, [s])
    torch.testing.assert_close(got, FUNCTIONS[name](acc, s), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_function(name: str) -> None:
    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor | None]:
        acc, s = (_operand((9, 17), torch.float64, seed).requires_grad_() for seed in (5, 6))
        return list(torch.autograd.grad(function(acc, s).sum(), [acc, s], allow_unused=True))

    epilogue: Epilogue = trace(FUNCTIONS[name], torch.float64, [torch.ones(9, 17, dtype=torch.float64)])
    for got, expected in zip(gradients(lambda acc, s: evaluate(epilogue, acc, [s])), gradients(FUNCTIONS[name]), strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected)


_LEAVES = ("acc", "s")
_UNARY = ("torch.neg", "abs", "torch.sigmoid", "torch.tanh", "torch.relu", "F.silu", "F.gelu", "torch.square", "torch.erf")
_BINARY = ("+", "-", "*")
_expressions = st.recursive(
    st.sampled_from(_LEAVES) | st.sampled_from(["0.5", "-2", "3"]),
    lambda inner: (
        st.tuples(st.sampled_from(_UNARY), inner).map(lambda t: f"{t[0]}({t[1]} * acc)")
        | st.tuples(inner, st.sampled_from(_BINARY), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | st.tuples(inner, inner).map(lambda t: f"torch.where(acc > 0, {t[0]} + s, {t[1]} - acc)")
        | inner.map(lambda x: f"(acc + {x}).clamp(-1, 2)")
        | inner.map(lambda x: f"(acc * {x}).to(torch.bfloat16)")
    ),
    max_leaves=8,
)


@given(expression=_expressions, shape=st.sampled_from([(), (5,), (3, 1), (3, 5)]), seed=st.integers(0, 99))
def test_random_expressions(expression: str, shape: tuple[int, ...], seed: int) -> None:
    function = eval(f"lambda acc, s: ({expression}) + acc * 0", {"torch": torch, "F": F})
    acc, s = _operand((3, 5), torch.float32, seed), _operand(shape, torch.float16, seed + 1)
    expected = function(acc, s)
    epilogue = trace(function, torch.float32, [s])
    assert epilogue.nodes[-1].dtype == expected.dtype
    torch.testing.assert_close(evaluate(epilogue, acc, [s]), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
